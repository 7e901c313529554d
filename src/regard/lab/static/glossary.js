// The glossary: terms on the pages that open their meaning by tap, and a dialog with all terms. The texts come from the
// lab, which has a copy of docs/glossary.md.
import { get } from "./api.js";
import { element, showMessage } from "./dom.js";
import { ELEMENTS, pageTerms } from "./glossary/page_terms.js";

let groups = null; // [{ title, terms: [{ name, note, meaning }] }]
let loading = null;

// The id of a term: its name, with its note if it has one: "sink (learned)".
function termId({ name, note }) {
  return note ? `${name} (${note})` : name;
}

export function loadGlossary() {
  loading ??= get("/api/glossary").then((response) => {
    groups = response.groups;
    return groups;
  });
  loading.catch(() => { loading = null; }); // so that the next call tries again
  return loading;
}

function findTerm(id) {
  for (const group of groups ?? []) {
    const term = group.terms.find((candidate) => termId(candidate) === id);
    if (term) return term;
  }
  return null;
}

// Text of the glossary, in which `code` is set in backticks.
function withCode(text) {
  return text.split("`").map((part, i) => (i % 2 ? element("code", { text: part }) : part));
}

// Terms on pages

// A word that opens its meaning. `id` names its entry.
export function termButton(text, id) {
  const button = element("button", {
    type: "button", className: "term", text, "aria-expanded": "false", dataset: { term: id },
  });
  button.addEventListener("click", (event) => {
    event.preventDefault(); // a term in a label must not change the control of the label
    event.stopPropagation();
    if (popover.button === button) closePopover();
    else openPopover(button, id);
  });
  return button;
}

// "a [[head]] and its [[query, key, value|queries]]" as nodes, with a button for each term.
export function withTerms(text) {
  const nodes = [];
  for (const [i, part] of text.split(/\[\[|\]\]/).entries()) {
    if (i % 2 === 0) {
      nodes.push(part);
      continue;
    }
    const [id, shown] = part.split("|");
    nodes.push(termButton(shown ?? id, id));
  }
  return nodes;
}

const popover = { button: null, box: null };

async function openPopover(button, id) {
  closePopover();
  try {
    await loadGlossary();
  } catch (error) {
    showMessage(error.message, "error");
    return;
  }
  const term = findTerm(id);
  if (!term || !button.isConnected) return;
  const name = element("b", { text: termId(term) });
  const meaning = element("p", { id: "term-meaning" }, name, ": ", ...withCode(term.meaning));
  const all = element("button", { type: "button", className: "quiet", text: "all terms" });
  all.addEventListener("click", () => {
    closePopover();
    openGlossary(id);
  });
  const label = `meaning of ${term.name}`;
  const box = element("div", { className: "popover", role: "dialog", "aria-label": label }, meaning, all);
  document.body.append(box);
  Object.assign(popover, { button, box });
  button.setAttribute("aria-expanded", "true");
  button.setAttribute("aria-describedby", meaning.id);
  placePopover();
}

// Below the word, or above it if there is no room, and never outside the window.
function placePopover() {
  const { button, box } = popover;
  if (!button) return;
  if (!button.isConnected) {
    closePopover();
    return;
  }
  const word = button.getBoundingClientRect();
  const { width, height } = box.getBoundingClientRect();
  const left = Math.max(8, Math.min(word.left, document.documentElement.clientWidth - width - 8));
  const below = word.bottom + 6;
  const top = below + height > innerHeight - 8 ? Math.max(8, word.top - height - 6) : below;
  box.style.left = `${left}px`;
  box.style.top = `${top}px`;
}

function closePopover() {
  popover.button?.setAttribute("aria-expanded", "false");
  popover.button?.removeAttribute("aria-describedby");
  popover.box?.remove();
  popover.button = null;
  popover.box = null;
}

function handleKey(event) {
  const { button, box } = popover;
  if (!button) return;
  if (event.key === "Escape") {
    event.stopPropagation(); // Escape also releases a locked token of the Look page
    closePopover();
    button.focus();
  } else if (event.key === "Tab") {
    // The popover is at the end of the document, but it follows its word in the order of Tab.
    const inside = box.querySelector("button");
    if (event.target === button && !event.shiftKey) {
      event.preventDefault();
      inside.focus();
    } else if (event.target === inside) {
      event.preventDefault();
      button.focus();
      closePopover();
    }
  }
}

// Turn the first term of each label of a page into a button. Pages build their labels anew at any time, so the page is
// observed. Returns a function that stops it.
export function markTerms(root, page) {
  let scheduled = false;

  function mark() {
    scheduled = false;
    placePopover();
    for (const node of root.querySelectorAll(ELEMENTS)) {
      if (!node.querySelector(".term") && !node.closest("button, a, summary")) markFirst(node, pageTerms(page, node));
    }
  }

  function schedule() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(mark);
  }

  const observer = new MutationObserver(schedule);
  observer.observe(root, { childList: true, subtree: true, characterData: true });
  schedule();
  return () => {
    observer.disconnect();
    closePopover();
  };
}

// `terms`: [pattern, id] pairs. Only direct text is searched: an element inside has its own meaning.
function markFirst(node, terms) {
  for (const child of node.childNodes) {
    if (child.nodeType !== Node.TEXT_NODE) continue;
    for (const [pattern, id] of terms) {
      const match = pattern.exec(child.data);
      if (!match) continue;
      const rest = child.splitText(match.index);
      rest.splitText(match[0].length);
      rest.replaceWith(termButton(match[0], id));
      return;
    }
  }
}

// The dialog with all terms

let dialog = null;

export async function openGlossary(id = "") {
  try {
    await loadGlossary();
  } catch (error) {
    showMessage(error.message, "error");
    return;
  }
  dialog ??= createDialog();
  dialog.showModal();
  dialog.show(id);
}

function createDialog() {
  const search = element("input", { type: "search", placeholder: "find a term", "aria-label": "find a term" });
  const count = element("span", { className: "quiet", role: "status" });
  const close = element("button", { type: "button", text: "Close" });
  const list = element("div", { className: "terms" });
  const title = element("h2", { id: "glossary-title", text: "Glossary" });
  const box = element("dialog", { id: "glossary", "aria-labelledby": title.id },
    element("div", { className: "bar" }, title, search, count, close), list);
  close.addEventListener("click", () => box.close());
  search.addEventListener("input", () => fill());
  box.addEventListener("click", (event) => {
    if (event.target === box) box.close(); // beside the dialog
  });
  box.addEventListener("keydown", (event) => event.stopPropagation()); // keys of the page below
  document.body.append(box);

  function fill() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    list.replaceChildren();
    for (const group of groups) {
      const entries = element("dl");
      for (const term of group.terms) {
        const text = `${termId(term)} ${term.meaning}`.toLowerCase();
        if (!words.every((word) => text.includes(word))) continue;
        const name = element("dt", { tabindex: -1, dataset: { term: termId(term) } }, element("b", { text: term.name }));
        if (term.note) name.append(` (${term.note})`);
        entries.append(name, element("dd", {}, ...withCode(term.meaning)));
        shown += 1;
      }
      if (entries.children.length) list.append(element("section", {}, element("h3", { text: group.title }), entries));
    }
    count.textContent = shown === 1 ? "1 term" : `${shown} terms`;
    if (!shown) list.append(element("p", { className: "quiet", text: "No term has these words." }));
  }

  // Show all terms, with one of them in view.
  box.show = (id) => {
    search.value = "";
    fill();
    list.scrollTop = 0;
    const entry = [...list.querySelectorAll("dt")].find((node) => node.dataset.term === id);
    if (entry) {
      entry.scrollIntoView({ block: "center" });
      entry.focus();
    } else {
      search.focus();
    }
  };
  return box;
}

document.addEventListener("keydown", handleKey, true);
document.addEventListener("pointerdown", (event) => {
  if (popover.button && !popover.box.contains(event.target) && event.target !== popover.button) closePopover();
});
addEventListener("scroll", placePopover, { capture: true, passive: true });
addEventListener("resize", placePopover);
