// The picked head on its text: hover a token to preview, click to lock it, Escape to let it go.
import { element } from "../dom.js";
import { isDark, onTheme } from "../theme.js";
import { locked, placeOf } from "./view.js";
import { before, isSelf, named, word, wordsOf, written } from "./words.js";

const PAGE = 600; // tokens on the screen at once

export function makeTokens(root, view) {
  const pager = element("div", { className: "pager bar quiet", hidden: true });
  const box = element("div", { className: "texts" });
  root.append(pager, box);
  let start = 0;
  let blocks = { queries: new Map(), keys: new Map() };
  let built = "";
  let touched = [];

  const asks = () => (view.direction === "from" ? "queries" : "keys");
  const answers = () => (view.direction === "from" ? "keys" : "queries");
  const lockedToken = () => locked(view, view.direction === "from" ? "row" : "key");

  function build(force = false) {
    const place = placeOf(view);
    root.hidden = view.reading !== "text";
    if (root.hidden || !place) return;
    const stamp = [view.recording, place.n, place.m, place.queries, place.keys, place.grid, view.direction, start].join(" ");
    if (stamp === built && !force) return;
    built = stamp;
    box.replaceChildren();
    touched = [];
    pages(place);
    if (place.grid) blocks.queries = blocks.keys = picture(place);
    else if (isSelf(place)) blocks.queries = blocks.keys = text(place, "queries", "");
    else blocks = { queries: text(place, "queries", "queries"), keys: text(place, "keys", "keys") };
    for (const token of blocks[asks()].values()) token.closest(".block").classList.add("asks");
    const first = blocks[asks()].get(lockedToken()) ?? blocks[asks()].values().next().value;
    if (first) first.tabIndex = 0;
    shade();
  }

  function pages(place) {
    const longest = Math.max(place.n, place.m);
    pager.hidden = Boolean(place.grid) || longest <= PAGE;
    if (pager.hidden) start = 0;
    start = Math.max(0, Math.min(start, longest - Math.min(PAGE, longest)));
    const turn = (label, to, off) => element("button", {
      type: "button", text: label, disabled: off, on: { click: () => { start = to; build(); } },
    });
    const here = lockedToken();
    pager.replaceChildren(
      turn("earlier", start - PAGE, start === 0), `tokens ${start} … ${Math.min(start + PAGE, longest) - 1} of ${longest}`,
      turn("later", start + PAGE, start + PAGE >= longest),
      turn("to the locked token", (here ?? 0) - PAGE / 2, here === null || (here >= start && here < start + PAGE)),
    );
  }

  function token(i, label, shown) {
    return element("span", { className: "token", text: shown, dataset: { at: i }, tabindex: -1, role: "button", "aria-label": label });
  }

  function text(place, which, title) {
    const words = wordsOf(view.found, place, which);
    const total = which === "queries" ? place.n : place.m;
    const line = element("div", { className: words ? "text" : "text indices" });
    const made = new Map();
    for (let i = start; i < Math.min(total, start + PAGE); i++) {
      const shown = words ? written(words[i]) : String(i);
      // A space before a word stays outside its token: a shade that starts in the middle of a gap looks misplaced.
      if (shown.startsWith(" ") && shown.length > 1) line.append(" ");
      made.set(i, token(i, `${shown.trim() || "space"}, ${i}`, shown.trimStart() || "␣"));
      line.append(made.get(i), words ? "" : " ");
      if (shown.endsWith("↵") && !written(words?.[i + 1] ?? "↵").startsWith("↵")) line.append(element("br"));
    }
    box.append(element("div", { className: "block", dataset: { side: which } }, title ? element("h4", { text: title }) : null, line));
    return made;
  }

  // Patches as cells over the picture; tokens before them (a class token) as words above it.
  function picture(place) {
    const [high, wide] = place.grid;
    const chips = element("div", { className: "text indices" });
    const cells = element("div", { className: "patches", style: `grid-template-columns: repeat(${wide}, 1fr); aspect-ratio: ${wide} / ${high}` });
    if (view.found.image) cells.style.backgroundImage = `url("${view.found.image}")`;
    const made = new Map();
    const words = wordsOf(view.found, place, "queries");
    for (let i = 0; i < place.n; i++) {
      const first = i < before(place);
      made.set(i, first ? token(i, `token ${i}`, words?.[i] ?? String(i)) : token(i, `patch ${word(view.found, place, "queries", i)}`, ""));
      (first ? chips : cells).append(made.get(i), first ? " " : "");
    }
    box.append(element("div", { className: "block", dataset: { side: "queries" } }, chips, cells));
    return made;
  }

  function shade() {
    const place = placeOf(view);
    for (const one of touched) {
      one.classList.remove("asked", "locked", "partner", "strong");
      one.style.removeProperty("--weight");
      one.removeAttribute("aria-pressed");
      one.removeAttribute("title");
    }
    touched = [];
    if (root.hidden || !place) return;
    const add = (one, name) => {
      if (!one) return;
      one.classList.add(name);
      touched.push(one);
    };
    const here = blocks[asks()].get(lockedToken());
    add(here, "locked");
    here?.setAttribute("aria-pressed", "true");
    const partner = locked(view, view.direction === "from" ? "key" : "row");
    add(blocks[answers()].get(partner), "partner");
    const asked = view.weights;
    box.classList.toggle("asking", Boolean(asked));
    if (!asked || asked.direction !== view.direction) return;
    add(blocks[asks()].get(asked.at), "asked");
    // Shades compare the answers with each other: in a long text the strongest may have little of the whole.
    const most = asked.values.reduce((a, b) => Math.max(a, b), 1e-9);
    for (const [i, one] of blocks[answers()]) {
      const weight = asked.values[i];
      if (!(weight > 0.0002 * most)) continue;
      one.style.setProperty("--weight", Math.min(1, Math.sqrt(weight / most)).toFixed(3));
      one.title = `${named(view.found, place, answers(), i)}: ${weight.toPrecision(4)}`;
      if (weight / most > (isDark() ? 0.45 : 0.6) && !place.grid) one.classList.add("strong");
      touched.push(one);
    }
  }

  // The locked token is on the page that is shown.
  function follow() {
    const here = lockedToken();
    const place = placeOf(view);
    if (place && here !== null && (here < start || here >= start + PAGE)) start = Math.max(0, here - PAGE / 2);
  }

  // And within the part of it that is seen; the page itself does not scroll.
  function reveal() {
    const one = blocks[asks()].get(lockedToken());
    if (root.hidden || !one) return;
    const [here, frame] = [one.getBoundingClientRect(), box.getBoundingClientRect()];
    if (here.top < frame.top || here.bottom > frame.bottom) box.scrollTop += here.top - frame.top - box.clientHeight / 2;
  }

  const find = (event, side) => {
    const one = event.target.closest(".token");
    return one && blocks[side].get(Number(one.dataset.at)) === one ? Number(one.dataset.at) : null;
  };
  const hover = (event) => {
    const i = find(event, asks());
    const cell = view.direction === "from" ? { row: i, key: null } : { row: null, key: i };
    view.change({ hover: i === null ? null : { ...cell, on: "text" } });
  };
  box.addEventListener("mouseover", hover);
  box.addEventListener("mouseleave", () => view.change({ hover: null }));
  box.addEventListener("focusin", (event) => {
    for (const one of box.querySelectorAll(".token[tabindex='0']")) one.tabIndex = -1;
    event.target.tabIndex = 0; // Tab comes back to where one was
    if (event.target.matches(":focus-visible")) hover(event);
  });
  box.addEventListener("focusout", () => view.change({ hover: null }));
  const choose = (event) => {
    const i = find(event, asks());
    const other = find(event, answers());
    // Of two texts the asked one is locked; in the answering one, or with Shift, the cell's other side is chosen.
    if (other !== null && (i === null || event.shiftKey)) view.change({ [view.direction === "from" ? "key" : "row"]: other });
    else if (i !== null) view.lock(i);
  };
  box.addEventListener("click", choose);
  box.addEventListener("keydown", (event) => {
    const from = find(event, asks()) ?? find(event, answers());
    const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (from === null) return;
    if (event.key === "Enter" || event.key === " ") choose(event);
    else if (by) (find(event, asks()) !== null ? blocks[asks()] : blocks[answers()]).get(from + by)?.focus();
    else return;
    event.preventDefault();
  });
  view.on("found place direction reading recording", () => { follow(); build(); reveal(); });
  view.on("row key", () => { follow(); build(); shade(); reveal(); });
  view.on("weights hide", shade);
  const stop = onTheme(shade);
  follow();
  build();
  return stop;
}
