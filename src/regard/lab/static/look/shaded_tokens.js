// The tokens of the text, or the patches of an image, shaded by the weights of the selected token. The pointer previews
// a token, a click locks it.
import { element } from "../dom.js";
import { isSpecialLabel, labelNodes, visibleText } from "../shared.js";
import { isDark, onTheme } from "../theme.js";
import { isSelfAttention, longLabel, shortLabel, tokensBeforePatches, tokenTexts } from "./token_labels.js";
import { currentLayer, lockedToken, otherField, otherSide, selectedField, selectedSide } from "./view_state.js";

const PAGE_SIZE = 600; // tokens on the screen at once
// In the light theme, text on a shade is light above this share of the largest weight and dark below it; in the dark
// theme it is the other way round. The contrast is at least 4.5 on both sides of the limit.
const STRONG_SHARE = { light: 0.86, dark: 0.5 };
const ARROW_STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

export function createShadedTokens(root, view) {
  const pager = element("div", { className: "pager bar quiet", hidden: true });
  const box = element("div", { className: "texts" });
  root.append(pager, box);
  let start = 0; // the first token of the page
  let tokens = { queries: new Map(), keys: new Map() }; // index → element
  let builtFor = "";
  let marked = []; // elements that `shade` has to reset
  let pointed = []; // elements of the cell under the pointer

  const selectedTokens = () => tokens[selectedSide(view)];
  const otherTokens = () => tokens[otherSide(view)];
  const lockedIndex = () => lockedToken(view, selectedField(view));

  function build() {
    const layer = currentLayer(view);
    root.hidden = view.display !== "text";
    if (root.hidden || !layer) return;
    const { n, m, queries, keys, grid } = layer;
    const settings = [view.recording, n, m, queries, keys, grid, view.direction, start].join(" ");
    if (settings === builtFor) return;
    builtFor = settings;
    box.replaceChildren();
    marked = [];
    pointed = [];
    showPager(layer);
    if (grid) {
      const patches = addImage(layer);
      tokens = { queries: patches, keys: patches };
    } else if (isSelfAttention(layer)) {
      const text = addText(layer, "queries", "");
      tokens = { queries: text, keys: text };
    } else {
      tokens = { queries: addText(layer, "queries", "queries"), keys: addText(layer, "keys", "keys") };
    }
    for (const token of selectedTokens().values()) token.closest(".block").classList.add("asks");
    const tabStop = selectedTokens().get(lockedIndex()) ?? selectedTokens().values().next().value;
    if (tabStop) tabStop.tabIndex = 0;
    shade();
  }

  function showPager(layer) {
    const count = Math.max(layer.n, layer.m);
    pager.hidden = Boolean(layer.grid) || count <= PAGE_SIZE;
    if (pager.hidden) start = 0;
    start = Math.max(0, Math.min(start, count - Math.min(PAGE_SIZE, count)));
    const end = Math.min(start + PAGE_SIZE, count);
    const locked = lockedIndex();
    const lockedIsShown = locked === null || isOnPage(locked);
    pager.replaceChildren(
      pageButton("earlier", start - PAGE_SIZE, start === 0),
      `tokens ${start} … ${end - 1} of ${count}`,
      pageButton("later", start + PAGE_SIZE, start + PAGE_SIZE >= count),
      pageButton("to the locked token", (locked ?? 0) - PAGE_SIZE / 2, lockedIsShown));
  }

  function pageButton(text, target, disabled) {
    const button = element("button", { type: "button", text, disabled });
    button.addEventListener("click", () => {
      start = target;
      build();
    });
    return button;
  }

  function isOnPage(index) {
    return index >= start && index < start + PAGE_SIZE;
  }

  function createToken(index, label, text) {
    const className = isSpecialLabel(text) ? "token special" : "token";
    const options = { className, dataset: { at: index }, tabindex: -1, role: "button", "aria-label": label };
    const token = element("span", options, ...labelNodes(text));
    // A character and its number must not be separated by a line break.
    if (token.querySelector(".part")) token.classList.add("parted");
    return token;
  }

  // Whether the last character of a token goes on in the next token: "日·1/3", "日·2/3".
  function continues(text) {
    const [, number, count] = /·(\d+)\/(\d+)$/.exec(text) ?? [];
    return Number(number) < Number(count);
  }

  // Returns the elements of the tokens by index.
  function addText(layer, side, title) {
    const texts = tokenTexts(view.description, layer, side);
    const count = side === "queries" ? layer.n : layer.m;
    const line = element("div", { className: texts ? "text" : "text indices" });
    const elements = new Map();
    let parent = line; // or the span that holds the parts of one character
    for (let i = start; i < Math.min(count, start + PAGE_SIZE); i++) {
      const text = texts ? visibleText(texts[i]) : String(i);
      // The space before a word is not part of its shade: a shade that starts in a gap looks misplaced.
      if (text.startsWith(" ") && text.length > 1) parent.append(" ");
      const token = createToken(i, `${text.trim() || "space"}, ${i}`, text.trimStart() || "␣");
      elements.set(i, token);
      if (parent === line && continues(text)) {
        parent = element("span", { className: "character" });
        line.append(parent);
      }
      parent.append(token, texts ? "" : " ");
      if (!continues(text)) parent = line;
      // Of several line breaks in a row only the last one breaks the line.
      const next = visibleText(texts?.[i + 1] ?? "↵");
      if (text.endsWith("↵") && !next.startsWith("↵")) line.append(element("br"));
    }
    const heading = title ? element("h4", { text: title }) : null;
    box.append(element("div", { className: "block", dataset: { side } }, heading, line));
    return elements;
  }

  // Patches are cells over the image. Tokens before them, for example a class token, stand above it.
  function addImage(layer) {
    const [rows, columns] = layer.grid;
    const others = element("div", { className: "text indices" });
    const style = `grid-template-columns: repeat(${columns}, 1fr); aspect-ratio: ${columns} / ${rows}`;
    const patches = element("div", { className: "patches", style });
    const { description } = view;
    if (description.image) patches.style.backgroundImage = `url("${description.image}")`;
    const elements = new Map();
    for (let i = 0; i < layer.n; i++) {
      if (i < tokensBeforePatches(layer)) {
        const token = createToken(i, longLabel(description, layer, "queries", i),
          shortLabel(description, layer, "queries", i));
        elements.set(i, token);
        others.append(token, " ");
      } else {
        const token = createToken(i, `patch ${shortLabel(description, layer, "queries", i)}`, "");
        elements.set(i, token);
        patches.append(token);
      }
    }
    box.append(element("div", { className: "block", dataset: { side: "queries" } }, others, patches));
    return elements;
  }

  function resetShades() {
    for (const token of marked) {
      token.classList.remove("asked", "locked", "partner", "shaded", "strong");
      token.style.removeProperty("--weight");
      token.removeAttribute("aria-pressed");
      token.removeAttribute("title");
    }
    marked = [];
  }

  function mark(token, className) {
    if (!token) return;
    token.classList.add(className);
    marked.push(token);
  }

  function shade() {
    const layer = currentLayer(view);
    resetShades();
    if (root.hidden || !layer) return;
    const locked = selectedTokens().get(lockedIndex());
    mark(locked, "locked");
    locked?.setAttribute("aria-pressed", "true");
    mark(otherTokens().get(lockedToken(view, otherField(view))), "partner");

    const { weights } = view;
    box.classList.toggle("asking", Boolean(weights));
    if (!weights || weights.direction !== view.direction) return;
    mark(selectedTokens().get(weights.index), "asked");
    // Shades are relative to the largest weight: in a long text even the largest weight is small.
    const largest = weights.values.reduce((a, b) => Math.max(a, b), 1e-9);
    const strongShare = isDark() ? STRONG_SHARE.dark : STRONG_SHARE.light;
    for (const [index, token] of otherTokens()) {
      const weight = weights.values[index];
      const share = weight / largest;
      if (!(share > 0.0002)) continue;
      token.style.setProperty("--weight", Math.min(1, Math.sqrt(share)).toFixed(3));
      token.title = `${longLabel(view.description, layer, otherSide(view), index)}: ${weight.toPrecision(4)}`;
      if (!layer.grid) token.classList.add("shaded");
      if (share > strongShare && !layer.grid) token.classList.add("strong");
      marked.push(token);
    }
  }

  // Highlight the tokens under the pointer: one of the text, or the query and the key of a cell of the map.
  function showPointed() {
    for (const token of pointed) token.classList.remove("pointed");
    pointed = [];
    const { hover } = view;
    if (root.hidden || !hover) return;
    for (const [side, range] of [["queries", hover.rows ?? hover.row], ["keys", hover.keys ?? hover.key]]) {
      const [first, last] = Array.isArray(range) ? range : [range, range];
      if (typeof first !== "number") continue;
      for (let index = first; index <= last; index++) {
        const token = tokens[side].get(index);
        if (!token) continue;
        token.classList.add("pointed");
        pointed.push(token);
      }
    }
  }

  // Go to the page of the locked token.
  function showLockedPage() {
    const locked = lockedIndex();
    if (locked !== null && !isOnPage(locked)) start = Math.max(0, locked - PAGE_SIZE / 2);
  }

  // Scroll the locked token into view, without scrolling the whole page.
  function scrollToLocked() {
    const token = selectedTokens().get(lockedIndex());
    if (root.hidden || !token) return;
    const tokenBox = token.getBoundingClientRect();
    const frame = box.getBoundingClientRect();
    const isVisible = tokenBox.top >= frame.top && tokenBox.bottom <= frame.bottom;
    if (!isVisible) box.scrollTop += tokenBox.top - frame.top - box.clientHeight / 2;
  }

  // The index of the event's token if it is one of `elements`, else null.
  function indexIn(elements, event) {
    const token = event.target.closest(".token");
    if (!token) return null;
    const index = Number(token.dataset.at);
    return elements.get(index) === token ? index : null;
  }

  // A token of self-attention is a query and a key: with `token`, the map highlights its row and its column.
  function hover(event) {
    const index = indexIn(selectedTokens(), event);
    const other = indexIn(otherTokens(), event);
    const pointedAt = { row: null, key: null, token: index === other ? index : null };
    if (index !== null) pointedAt[selectedField(view)] = index;
    else if (other !== null) pointedAt[otherField(view)] = other;
    else return view.change({ hover: null });
    return view.change({ hover: pointedAt });
  }

  // In cross-attention there are two texts. A click on the selected side locks its token. A click on the other side, or
  // with Shift, selects the other token of the cell.
  function lock(event) {
    const index = indexIn(selectedTokens(), event);
    const other = indexIn(otherTokens(), event);
    if (other !== null && (index === null || event.shiftKey)) view.change({ [otherField(view)]: other });
    else if (index !== null) view.lock(index);
  }

  function handleKey(event) {
    const isSelected = indexIn(selectedTokens(), event) !== null;
    const elements = isSelected ? selectedTokens() : otherTokens();
    const index = indexIn(elements, event);
    const step = ARROW_STEPS[event.key];
    if (index === null) return;
    if (event.key === "Enter" || event.key === " ") lock(event);
    else if (step) elements.get(index + step)?.focus();
    else return;
    event.preventDefault();
  }

  box.addEventListener("mouseover", hover);
  box.addEventListener("mouseleave", () => view.change({ hover: null }));
  box.addEventListener("focusin", (event) => {
    for (const token of box.querySelectorAll(".token[tabindex='0']")) token.tabIndex = -1;
    event.target.tabIndex = 0; // the Tab key returns to the last token
    if (event.target.matches(":focus-visible")) hover(event);
  });
  box.addEventListener("focusout", () => view.change({ hover: null }));
  box.addEventListener("click", lock);
  box.addEventListener("keydown", handleKey);
  view.on("description layerIndex direction display recording", () => {
    showLockedPage();
    build();
    scrollToLocked();
  });
  view.on("row key", () => {
    showLockedPage();
    build();
    shade();
    scrollToLocked();
  });
  view.on("weights hideSinks", shade);
  view.on("hover", showPointed);
  const stopTheme = onTheme(shade);
  showLockedPage();
  build();
  return stopTheme;
}
