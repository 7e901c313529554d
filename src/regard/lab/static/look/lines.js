// Two columns of tokens with lines between them, as dark as the weights: near the locked token where a text is long.
import { drawing, element, said } from "../dom.js";
import { locked, placeOf } from "./view.js";
import { isSelf, named, word } from "./words.js";

const WINDOW = 60; // tokens of a column
const STEP = 17; // pixels of a token
const LEAST = 0.004; // weights below this draw nothing

export function makeLines(root, view) {
  const box = element("div", { className: "lines" });
  const about = element("p", { className: "quiet" });
  root.append(about, box);

  // Which tokens a column shows: around `at`.
  function around(total, at) {
    const from = Math.max(0, Math.min(at - Math.floor(WINDOW * 0.7), total - WINDOW));
    return [from, Math.min(total, from + WINDOW)];
  }

  function show() {
    const place = placeOf(view);
    root.hidden = view.reading !== "lines" || !place;
    if (root.hidden) return;
    const asked = view.weights;
    const from = view.direction === "from";
    const here = asked?.at ?? locked(view, from ? "row" : "key");
    if (here === null || here === undefined) {
      box.replaceChildren();
      about.textContent = "Lock a token in the map or in the text, and its lines are drawn here.";
      return;
    }
    // A preview keeps the window of the locked token: a column that moves under the pointer cannot be read.
    const middle = locked(view, from ? "row" : "key") ?? here;
    const same = isSelf(place);
    const partner = locked(view, from ? "key" : "row") ?? 0;
    const rows = around(place.n, from || same ? middle : partner);
    const keys = around(place.m, !from || same ? middle : partner);
    draw(place, rows, keys, here);
  }

  function draw(place, rows, keys, here) {
    const from = view.direction === "from";
    const high = STEP * Math.max(rows[1] - rows[0], keys[1] - keys[0]) + 8;
    const [wide, left, right] = [560, 200, 360];
    const svg = drawing("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "group", "aria-label": "lines between tokens" });
    const at = (i, range) => (i - range[0] + 0.5) * STEP + 4;
    const [asking, answering] = from ? [rows, keys] : [keys, rows];
    const [x0, x1] = from ? [left, right] : [right, left];
    let within = 0;
    let total = 0;
    const values = view.weights?.direction === view.direction ? view.weights.values : [];
    const most = from ? 1 : values.reduce((a, b) => Math.max(a, b), 1e-9);
    values.forEach((weight, i) => {
      total += weight;
      if (i < answering[0] || i >= answering[1]) return;
      within += weight;
      if (weight / most < LEAST || here < asking[0] || here >= asking[1]) return;
      const [y0, y1] = [at(here, asking), at(i, answering)];
      const middle = (x0 + x1) / 2;
      const curve = drawing("path", {
        d: `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`, class: "line",
        "stroke-opacity": Math.min(1, 0.12 + 0.88 * Math.sqrt(weight / most)).toFixed(3),
        "stroke-width": (1 + 3 * (weight / most)).toFixed(2),
      });
      const title = drawing("title");
      title.textContent = said(weight);
      curve.append(title);
      svg.append(curve);
    });
    column(svg, place, "queries", rows, left - 6, "end", values);
    column(svg, place, "keys", keys, right + 6, "start", values);
    box.replaceChildren(svg);
    const outside = total > 0 ? 1 - within / total : 0;
    about.textContent = `${from ? "queries" : "queries that look at it"} on the left, keys on the right. `
      + `${named(view.found, place, from ? "queries" : "keys", here)} ${from ? "looks" : "is looked at"}`
      + (outside > 0.005 ? `; ${Math.round(100 * outside)} % of it lies outside these ${answering[1] - answering[0]} tokens.` : ".");
  }

  function column(svg, place, which, range, x, anchor, values) {
    const side = which === "queries" ? "row" : "key";
    const asks = (view.direction === "from") === (which === "queries");
    for (let i = range[0]; i < range[1]; i++) {
      const shown = word(view.found, place, which, i) || String(i);
      const label = drawing("text", {
        x, y: (i - range[0] + 0.5) * STEP + 8, "text-anchor": anchor, "data-at": i, "data-side": side, tabindex: asks ? 0 : -1, role: "button",
        class: ["word", view[side] === i ? "locked" : "", asks ? "asks" : "", !asks && values[i] > 0.05 ? "seen" : ""].join(" "),
        "aria-label": named(view.found, place, which, i),
      });
      label.textContent = shown.length > 22 ? `${shown.slice(0, 21)}…` : shown;
      svg.append(label);
    }
  }

  const find = (event) => event.target.closest?.("text.word");
  const choose = (event) => {
    const one = find(event);
    if (!one) return;
    if (one.classList.contains("asks")) view.lock(Number(one.dataset.at));
    else view.change({ [one.dataset.side]: Number(one.dataset.at) });
  };
  box.addEventListener("click", choose);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    const one = find(event);
    choose(event);
    box.querySelector(`text[data-side="${one?.dataset.side}"][data-at="${one?.dataset.at}"]`)?.focus();
  });
  box.addEventListener("mouseover", (event) => {
    const one = find(event);
    const i = one?.classList.contains("asks") ? Number(one.dataset.at) : null;
    view.change({ hover: i === null ? null : { row: null, key: null, [one.dataset.side]: i, on: "lines" } });
  });
  box.addEventListener("mouseleave", () => view.change({ hover: null }));
  view.on("found place direction reading recording row key weights", show);
  show();
}
