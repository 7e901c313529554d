// Two columns of tokens with lines between them, as dark as the weights: near the locked token where a text is long.
import { drawing, element, said } from "../dom.js";
import { strongest } from "./rows.js";
import { locked, placeOf } from "./view.js";
import { isSelf, named, word } from "./words.js";

const WINDOW = 60; // tokens of a column
const BEYOND = 8; // strongest answers that are shown though they lie outside the window
const STEP = 14; // pixels of a token
const LEAST = 0.004; // weights below this draw nothing
const WIDEST = 560;

export function makeLines(root, view) {
  const about = element("p", { className: "quiet" });
  const box = element("div", { className: "lines" });
  root.append(about, box);

  // Tokens around `at`.
  function around(total, at) {
    const from = Math.max(0, Math.min(at - Math.floor(WINDOW * 0.7), total - WINDOW));
    return Array.from({ length: Math.min(total, WINDOW) }, (_, i) => from + i);
  }

  function show() {
    const place = placeOf(view);
    root.hidden = view.reading !== "lines";
    if (root.hidden || !place) return;
    const from = view.direction === "from";
    const asked = view.weights?.direction === view.direction ? view.weights : null;
    const middle = locked(view, from ? "row" : "key") ?? asked?.at;
    if (!asked || middle === undefined) {
      box.replaceChildren();
      about.textContent = "Lock a token in the map or in the text, and its lines are drawn here.";
      return;
    }
    // A preview keeps the window of the locked token: a column that moves under the pointer cannot be read.
    const partner = locked(view, from ? "key" : "row") ?? 0;
    const asking = around(from ? place.n : place.m, middle);
    const near = around(from ? place.m : place.n, isSelf(place) ? middle : partner);
    const far = strongest(asked.values, BEYOND).filter(({ weight }) => weight > 0.01).map(({ at }) => at);
    const answering = [...new Set([...near, ...far])].sort((a, b) => a - b);
    draw(place, asking, answering, asked);
  }

  // Where each token of a column stands; a gap where some are left out.
  function heights(column) {
    const found = new Map();
    let y = STEP / 2 + 4;
    column.forEach((i, at) => {
      if (at && i !== column[at - 1] + 1) y += STEP * 0.6;
      found.set(i, y);
      y += STEP;
    });
    return found;
  }

  function draw(place, asking, answering, { at: here, values }) {
    const from = view.direction === "from";
    const [asked, answered] = [heights(asking), heights(answering)];
    const wide = Math.min(WIDEST, box.clientWidth || WIDEST); // so that words keep their size on a small screen
    const [left, right] = [wide * 0.36, wide * 0.64];
    const high = Math.max(...asked.values(), ...answered.values()) + STEP / 2 + 4;
    const svg = drawing("svg", { viewBox: `0 0 ${wide} ${high}`, role: "group", "aria-label": "lines between tokens" });
    const [x0, x1] = from ? [left, right] : [right, left];
    const most = values.reduce((a, b) => Math.max(a, b), 1e-9);
    let within = 0;
    for (const [i, y1] of answered) {
      const share = values[i] / most;
      within += values[i];
      const y0 = asked.get(here);
      if (share < LEAST || y0 === undefined) continue;
      const middle = (x0 + x1) / 2;
      const line = drawing("path", {
        d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`, class: "line",
        "stroke-opacity": Math.min(1, 0.12 + 0.88 * Math.sqrt(share)).toFixed(3), "stroke-width": (1 + 3 * share).toFixed(2),
      });
      const title = drawing("title");
      title.textContent = said(values[i]);
      line.append(title);
      svg.append(line);
    }
    column(svg, place, "queries", from ? asked : answered, from ? null : values, left - 6);
    column(svg, place, "keys", from ? answered : asked, from ? values : null, right + 6);
    box.replaceChildren(svg);
    const total = values.reduce((a, b) => a + b, 0);
    const outside = total > 0 ? 1 - within / total : 0;
    about.textContent = `Queries on the left, keys on the right; ${named(view.found, place, from ? "queries" : "keys", here)} `
      + (from ? "looks at keys." : "is looked at.") + (outside > 0.005 ? ` ${Math.round(100 * outside)} % of its weight goes to tokens that are left out here.` : "");
  }

  // `weights`: of a column that answers.
  function column(svg, place, which, standing, weights, x) {
    const side = which === "queries" ? "row" : "key";
    const anchor = which === "queries" ? "end" : "start";
    let reached = false;
    for (const [i, y] of standing) {
      const shown = word(view.found, place, which, i) || String(i);
      const is = view[side] === i;
      const label = drawing("text", {
        x, y: y + 4, "text-anchor": anchor, "data-at": i, "data-side": side, role: "button", tabindex: is && !weights ? 0 : -1,
        class: ["word", is ? "locked" : "", weights ? (weights[i] > 0.02 ? "seen" : "") : "asks"].join(" "),
        "aria-label": named(view.found, place, which, i),
      });
      reached ||= is;
      label.textContent = shown.length > 22 ? `${shown.slice(0, 21)}…` : shown;
      svg.append(label);
    }
    if (!reached && !weights) svg.querySelector("text.asks")?.setAttribute("tabindex", "0");
  }

  const find = (event) => event.target.closest?.("text.word");
  const focus = (side, at) => box.querySelector(`text[data-side="${side}"][data-at="${at}"]`)?.focus();
  const choose = (one) => {
    if (one.classList.contains("asks")) view.lock(Number(one.dataset.at));
    else view.change({ [one.dataset.side]: Number(one.dataset.at) });
  };
  box.addEventListener("click", (event) => find(event) && choose(find(event)));
  box.addEventListener("keydown", (event) => {
    const one = find(event);
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!one || (!by && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    const { side, at } = one.dataset;
    if (by) focus(side, Number(at) + by);
    else choose(one);
    focus(side, by ? Number(at) + by : at); // the column is drawn anew
  });
  box.addEventListener("mouseover", (event) => {
    const one = find(event);
    const i = one?.classList.contains("asks") ? Number(one.dataset.at) : null;
    view.change({ hover: i === null ? null : { row: null, key: null, [one.dataset.side]: i, on: "lines" } });
  });
  box.addEventListener("mouseleave", () => view.change({ hover: null }));
  view.on("found place direction reading recording row key weights", show);
  addEventListener("resize", show);
  show();
  return () => removeEventListener("resize", show);
}
