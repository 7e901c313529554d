// The ledger as a list, filtered by words, source and verdict.
import { element, onPlainClick } from "../dom.js";
import { typeset } from "./safe_mathml.js";
import { verdict, verdictMark, VERDICTS, whatHolds } from "./words.js";

// `onFilter(shown, all)` is called with the number of claims that are listed.
export function list(ledger, state, onSelect, onFilter) {
  const search = element("input", {
    type: "search", placeholder: "find", "aria-label": "find claims by words", value: state.get("q"), on: { input: filter },
  });
  const source = element("select", { "aria-label": "source", on: { change: filter } },
    element("option", { value: "", text: "all documents" }),
    ...ledger.documents.map(({ key, label }) => element("option", { value: key, text: label })));
  source.value = ledger.documents.some(({ key }) => key === state.get("source")) ? state.get("source") : "";

  // One button per verdict that occurs; at most one is pressed.
  const chips = [];
  for (const name of Object.keys(VERDICTS)) {
    const count = ledger.claims.filter((claim) => claim.verdict === name).length;
    if (!count) continue;
    const chip = element("button", {
      type: "button", className: "chip", "aria-pressed": String(state.get("verdict") === name), dataset: { verdict: name },
    }, verdict(name), ` ${count}`);
    chip.addEventListener("click", () => {
      const pressed = chip.getAttribute("aria-pressed") !== "true";
      for (const other of chips) other.setAttribute("aria-pressed", String(pressed && other === chip));
      filter();
    });
    chips.push(chip);
  }

  const items = new Map();
  const sections = Object.entries(ledger.parts).map(([title, names]) => {
    const rows = names.map(addItem);
    return { box: element("section", {}, element("h3", { text: title }), element("ul", {}, ...rows)), names };
  });

  function addItem(name) {
    const claim = ledger.claims.find((one) => one.id === name);
    const outcome = element("span", { className: "ran" });
    const title = element("span", { className: "title" }, ...typeset(claim.typeset.title));
    const words = element("span", { className: "words" }, title, whatHolds(claim, "span"));
    const link = element("a", { href: `?page=claims&claim=${name}` }, verdictMark(claim.verdict), words, outcome);
    onPlainClick(link, () => onSelect(name));
    const row = element("li", {}, link);
    const text = `${name} ${claim.title} ${claim.statement} ${claim.what_holds} ${claim.correction} ${claim.latex}`.toLowerCase();
    items.set(name, { row, link, outcome, claim, text });
    return row;
  }

  const count = element("p", { className: "quiet", role: "status" });
  const verdicts = element("div", { className: "chips", role: "group", "aria-label": "verdict" }, ...chips);
  const box = element("div", { className: "ledger" },
    element("div", { className: "filters" }, search, source, verdicts),
    count,
    element("div", { className: "parts" }, ...sections.map((section) => section.box)));

  function filter() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const chosen = chips.find((chip) => chip.getAttribute("aria-pressed") === "true")?.dataset.verdict ?? "";
    let shown = 0;
    for (const { row, claim, text } of items.values()) {
      const hasWords = words.every((word) => text.includes(word));
      const hasSource = !source.value || claim.sources.includes(source.value);
      const hasVerdict = !chosen || claim.verdict === chosen;
      row.hidden = !(hasWords && hasSource && hasVerdict);
      if (!row.hidden) shown += 1;
    }
    for (const section of sections) section.box.hidden = section.names.every((name) => items.get(name).row.hidden);
    if (shown === items.size) count.textContent = `${shown} claims`;
    else if (shown) count.textContent = `${shown} of ${items.size} claims`;
    else count.textContent = "No claim matches.";
    onFilter(shown, items.size);
    state.set({ q: search.value.trim(), source: source.value, verdict: chosen });
  }

  filter();
  return {
    box,
    mark(name) {
      for (const [id, { link }] of items) {
        if (id === name) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    scrollTo(name) {
      // Only the list scrolls: scrollIntoView would move the whole page.
      const parts = box.querySelector(".parts");
      const row = items.get(name)?.row.getBoundingClientRect();
      const frame = parts.getBoundingClientRect();
      if (row && row.top < frame.top) parts.scrollTop -= frame.top - row.top;
      else if (row && row.bottom > frame.bottom) parts.scrollTop += row.bottom - frame.bottom;
    },
    // The result of a run with the recorded parameters; null while it runs.
    showResult(name, result) {
      const { outcome } = items.get(name);
      if (result === null) {
        outcome.textContent = "…";
        outcome.className = "ran";
        outcome.title = "";
      } else if (result.error) {
        outcome.textContent = "!";
        outcome.className = "ran bad";
        outcome.title = result.error;
      } else if (result.as_recorded) {
        outcome.textContent = "as recorded";
        outcome.className = "ran good";
        outcome.title = `in ${result.seconds.toFixed(1)} s`;
      } else {
        outcome.textContent = "changed";
        outcome.className = "ran bad";
        outcome.title = `now: ${result.verdict}`;
      }
    },
    clearResult(name) {
      items.get(name).outcome.textContent = "";
    },
    visible: () => [...items].filter(([, { row }]) => !row.hidden).map(([name]) => name),
  };
}
