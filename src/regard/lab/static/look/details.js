// More of the picked head: its profile by offset, its entropy along the text, its numbers and how sure its kinds are.
import { get } from "../api.js";
import { paint } from "../colour.js";
import { drawing, element, note, said } from "../dom.js";
import { onTheme } from "../theme.js";
import { kindColour, kindOf, MEANINGS } from "./grid.js";
import { locked, placeOf } from "./view.js";

const [WIDE, HIGH] = [320, 92];

export function makeDetails(root, view) {
  const profile = element("figure", { className: "panel" });
  const entropy = element("figure", { className: "panel" });
  const numbers = element("section", { className: "panel" });
  const kinds = element("section", { className: "panel" });
  root.append(profile, entropy, numbers, kinds);
  let found = null;
  let asking = null;

  async function ask() {
    asking?.abort();
    const place = placeOf(view);
    if (!place || view.head === null) return;
    const { signal } = (asking = new AbortController());
    const { recording, head, batch } = view;
    try {
      found = await get("/api/look/head", { recording, place: place.place, head, batch }, signal);
      show();
    } catch (error) {
      if (error.name !== "AbortError") note(error.message, "error");
    }
  }

  function show() {
    const place = placeOf(view);
    if (!found || !place) return;
    profile.replaceChildren(element("figcaption", { text: "Profile: mean weight by offset" }), ...profileOf(found.profile));
    entropy.replaceChildren(element("figcaption", { text: "Entropy along the text" }), lineOf(found.line, found.positions));
    const list = element("dl", { className: "numbers" });
    for (const [name, meaning] of Object.entries(view.found.columns)) {
      list.append(element("dt", { text: name }), element("dd", { text: said(found.numbers[name]) }), element("dd", { className: "quiet", text: meaning }));
    }
    numbers.replaceChildren(element("h3", { text: "Numbers" }), list);
    showKinds(place);
  }

  function showKinds(place) {
    const kind = kindOf(view.found, place.path, view.head);
    kinds.hidden = !kind;
    if (!kind) return;
    const list = element("dl", { className: "sureness" });
    for (const [name, sure] of Object.entries(kind.confidence).sort((a, b) => b[1] - a[1])) {
      const bar = element("span", { className: "share", style: `--share: ${sure}; --kind: ${kindColour(name)}` });
      list.append(element("dt", { text: name, title: MEANINGS[name] }), element("dd", {}, bar, element("span", { text: `${Math.round(100 * sure)} %` })));
    }
    kinds.replaceChildren(element("h3", { text: "How sure each kind is" }), list);
  }

  function profileOf(given) {
    if (!given) return [element("p", { className: "quiet", text: "No profile was observed here." })];
    return Array.isArray(given.values[0]) ? [twoWays(given)] : [oneWay(given)];
  }

  // Bars around the middle, as far as there is anything to see.
  function oneWay({ values, radius }) {
    const most = Math.max(...values, 1e-12);
    let far = 4;
    values.forEach((x, i) => { if (x > 0.02 * most) far = Math.max(far, Math.abs(i - radius)); });
    far = Math.min(radius, Math.max(far, 8), 64);
    const shown = values.slice(radius - far, radius + far + 1);
    const svg = chart(`mean weight at offsets −${far} to ${far}; the largest, ${said(most)}, is at ${values.indexOf(Math.max(...values)) - radius}`);
    const size = WIDE / shown.length;
    shown.forEach((x, i) => {
      const tall = (x / most) * (HIGH - 30);
      const bar = drawing("rect", { x: (i * size + size * 0.08).toFixed(2), y: (HIGH - 16 - tall).toFixed(2), width: (size * 0.84).toFixed(2), height: Math.max(tall, 0.4).toFixed(2), class: "plus" });
      const title = drawing("title");
      title.textContent = `offset ${i - far}: ${said(x)}`;
      bar.append(title);
      svg.append(bar);
    });
    write(svg, 0, HIGH - 2, `−${far}`, "start");
    write(svg, WIDE / 2, HIGH - 2, "0", "middle");
    write(svg, WIDE, HIGH - 2, `+${far}`, "end");
    write(svg, WIDE, 10, said(most), "end");
    return svg;
  }

  function twoWays({ values, radii }) {
    const canvas = element("canvas", { className: "profile", role: "img", "aria-label": `mean weight by offset, ${radii[0]} rows and ${radii[1]} columns either way` });
    const flat = Float32Array.from(values.flat(), (x) => x ?? NaN);
    paint(canvas, flat, values[0].length, values.length, flat.reduce((a, b) => (b > a ? b : a), 1e-12));
    const [rows, cols] = [values.length, values[0].length];
    const mark = element("i", { style: `left: ${(100 * radii[1]) / cols}%; top: ${(100 * radii[0]) / rows}%; width: ${100 / cols}%; height: ${100 / rows}%`, title: "the query itself" });
    return element("div", { className: "two-ways", style: `aspect-ratio: ${cols} / ${rows}` }, canvas, mark);
  }

  // Click or drag on the line to lock the token there.
  function lineOf(points, positions) {
    if (!points?.length) return element("p", { className: "quiet", text: "No entropy was observed here." });
    const most = Math.max(...points.map((y) => y ?? 0), 1e-12);
    const svg = chart(`entropy of ${positions} queries, at most ${said(most)} nats`);
    const x = (i) => (points.length === 1 ? WIDE / 2 : ((i + 0.5) / points.length) * WIDE);
    let path = "";
    points.forEach((y, i) => {
      if (y !== null) path += `${path && points[i - 1] !== null ? "L" : "M"}${x(i).toFixed(1)} ${(HIGH - 16 - (y / most) * (HIGH - 30)).toFixed(1)}`;
    });
    svg.append(drawing("path", { d: path, class: "curve" }));
    const here = locked(view, "row");
    if (here !== null) {
      const at = ((here + 0.5) / positions) * WIDE;
      svg.append(drawing("line", { x1: at, x2: at, y1: 12, y2: HIGH - 16, class: "mark" }));
    }
    write(svg, 0, HIGH - 2, "0", "start");
    write(svg, WIDE, HIGH - 2, String(positions - 1), "end");
    write(svg, WIDE, 10, `${said(most)} nats`, "end");
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const row = Math.floor(((event.clientX - box.left) / box.width) * positions);
      view.change({ direction: "from", row: Math.max(0, Math.min(positions - 1, row)), key: null });
    });
    return svg;
  }

  function chart(label) {
    const svg = drawing("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": label });
    svg.append(drawing("line", { x1: 0, x2: WIDE, y1: HIGH - 16, y2: HIGH - 16, class: "base" }));
    return svg;
  }

  function write(svg, x, y, text, anchor) {
    const label = drawing("text", { x, y, "text-anchor": anchor });
    label.textContent = text;
    svg.append(label);
  }

  view.on("recording place head batch found", ask);
  view.on("row kinds", show);
  const stop = onTheme(show);
  ask();
  return () => { stop(); asking?.abort(); };
}
