// The picked head's map; beside a pinned one A, the two and their difference, moved together.
import { get } from "../api.js";
import { paint } from "../colour.js";
import { element, note, said } from "../dom.js";
import { onTheme } from "../theme.js";
import { ZoomMap } from "./map.js";
import { pinned, pinnedName } from "./pinned.js";
import { weights } from "./rows.js";
import { Difference, Pooled, Tiles } from "./tiles.js";
import { asked, indexOf, locked, placeOf, SCORES } from "./view.js";
import { headName, named, word } from "./words.js";

const HELP = "Zoom with + and −, move with the arrow keys, 0 shows all. Shift and arrows move the locked cell, Escape lets it go.";

export function makeMaps(root, view) {
  const readout = element("output", { className: "readout" });
  const scale = element("canvas", { className: "scale", "aria-hidden": "true" });
  const most = element("span");
  const buttons = element("div", { className: "zoom", role: "group", "aria-label": "zoom" });
  const row = element("div", { className: "maps" });
  const help = element("p", { className: "help quiet", id: "look-map-help", text: HELP });
  const foot = element("div", { className: "bar under" }, buttons, element("span", { className: "quiet scales" }, "0 ", scale, " ", most), help);
  root.append(row, readout, foot);
  const shown = { A: figure("A"), B: figure("B"), Δ: figure("Δ") };
  const main = shown.B.map;
  let loading = null;

  for (const [text, title, call] of [
    ["−", "zoom out", () => main.zoom(1 / 1.6, ...middle())], ["+", "zoom in", () => main.zoom(1.6, ...middle())],
    ["all", "show the whole map", () => view.change({ at: { u: 0.5, v: 0.5, z: 1 } })],
  ]) buttons.append(element("button", { type: "button", text, title, "aria-label": title, on: { click: () => main.source && call() } }));

  // The locked cell where it is in view, or the middle.
  function middle() {
    const g = main.geometry();
    const [w, h] = [main.canvas.clientWidth, main.canvas.clientHeight];
    const centre = [w - g.width / 2, h - g.height / 2];
    const { row: i, key: j } = main.marks;
    if (typeof i !== "number" || typeof j !== "number") return centre;
    const [x, y] = [g.x(j + 0.5), g.y(i + 0.5)];
    return x > w - g.width && x < w && y > h - g.height && y < h ? [x, y] : centre;
  }

  function figure(name) {
    const canvas = element("canvas", { className: "map", tabindex: 0, role: "application", "aria-describedby": "look-map-help" });
    const caption = element("figcaption");
    const busy = element("span", { className: "busy quiet", hidden: true, text: "computing the overview …" });
    const box = element("figure", { dataset: { map: name } }, caption, element("div", { className: "frame" }, canvas, busy));
    row.append(box);
    const map = new ZoomMap(canvas, {
      hover: (cell) => view.change({ hover: cell && { ...cell, on: name } }),
      lock: (cell) => map.source.pooled || view.change({ row: cell.row, key: cell.key }),
      view: (at) => view.change({ at }),
    });
    map.look(view.at);
    return { box, canvas, caption, busy, map, base: "" };
  }

  async function open(one, head, label, signal) {
    const fields = asked(head);
    const base = JSON.stringify(fields);
    if (!head.at.kept) return openSmall(one, head);
    if (one.base === base && one.map.source) return one.map.source;
    one.busy.textContent = "computing the overview …";
    one.busy.hidden = Boolean(one.map.source); // an old map stays until the new one is there
    one.box.setAttribute("aria-busy", "true");
    try {
      const levels = await get("/api/look/levels", fields, signal);
      const failed = (error) => note(error.message, "error");
      one.map.head = head;
      one.map.show(new Tiles(fields, levels, { changed: () => { one.map.redraw(); tell(); }, failed }), label);
      one.base = base;
      await sinks(one, signal);
      return one.map.source;
    } catch (error) {
      if (error.name !== "AbortError") { // nothing of another head stays under this one's name
        one.base = "";
        one.map.show(null, () => "");
      }
      throw error;
    } finally {
      one.busy.hidden = true;
      one.box.removeAttribute("aria-busy");
    }
  }

  // Without q and k there is the small map alone, or nothing.
  function openSmall(one, head) {
    one.base = "";
    one.map.head = head;
    const source = head.at.map ? new Pooled(head.at, indexOf(head.at, head.head), view.hide) : null;
    one.map.show(source, (which, i) => String(source.bin(which === "keys" ? 1 : 0, i)[0]));
    one.busy.textContent = "No map was observed here.";
    one.busy.hidden = source !== null;
    return source;
  }

  // Without its sinks a map needs to know what they took.
  async function sinks(one, signal) {
    const { source, head } = one.map;
    if (source?.pooled) openSmall(one, head);
    if (!source?.fields || !head) return;
    const columns = view.hide ? Array.from({ length: Math.min(head.at.sink, source.m) }, (_, key) => weights(head, "to", key, signal)) : null;
    const found = columns?.length ? await Promise.all(columns) : null;
    if (one.map.source !== source) return;
    source.hide(found);
    one.map.redraw();
    tell();
  }

  async function refresh() {
    loading?.abort();
    const place = placeOf(view);
    if (!place || view.head === null) return;
    const { signal } = (loading = new AbortController());
    const found = view.found;
    try {
      const a = await pinned(view, signal);
      row.classList.toggle("compared", a !== null);
      shown.A.box.hidden = a === null;
      if (!a) for (const name of ["A", "Δ"]) shut(shown[name]);
      shown.B.caption.textContent = a ? `B  ${headName(place, view.head)}` : "";
      shown.B.canvas.setAttribute("aria-label", `map of ${headName(place, view.head)}: ${place.n} queries by ${place.m} keys`);
      if (a) shown.A.caption.textContent = `A  ${pinnedName(a, view)}`;
      if (a) shown.A.canvas.setAttribute("aria-label", `map of ${pinnedName(a, view)}`);
      const [ofB, ofA] = await Promise.all([
        open(shown.B, { ...headOf(view), at: place }, (which, i) => word(found, place, which, i), signal),
        a && open(shown.A, a, (which, i) => word(a.found, a.at, which, i), signal),
      ]);
      const both = Boolean(ofA?.fields && ofB?.fields) && ofA.n === ofB.n && ofA.m === ofB.m;
      shown.Δ.box.hidden = !both;
      if (both) differ(ofA, ofB);
      marks();
    } catch (error) {
      if (error.name !== "AbortError") note(error.message, "error");
    }
  }

  function shut(one) {
    one.box.hidden = true;
    one.base = "";
    one.map.show(null, () => "");
  }

  function differ(a, b) {
    const one = shown.Δ;
    one.caption.textContent = "B − A";
    one.canvas.setAttribute("aria-label", "map of the difference, B minus A");
    const failed = (error) => note(error.message, "error");
    if (one.base !== a.base + b.base) {
      one.base = a.base + b.base;
      one.map.show(new Difference(a, b, { changed: () => { one.map.redraw(); tell(); }, failed }), main.label);
    }
  }

  function marks() {
    const small = main.source?.pooled;
    const now = { row: small ? null : locked(view, "row"), key: small ? null : locked(view, "key"), hover: view.hover };
    for (const one of Object.values(shown)) if (!one.box.hidden) one.map.mark(now);
    tell();
  }

  // What is under the pointer, or locked.
  function tell() {
    const place = placeOf(view);
    const [i, j] = [locked(view, "row"), locked(view, "key")];
    const full = (cell) => cell && typeof cell.row === "number" && typeof cell.key === "number";
    const cell = full(view.hover) ? view.hover : i !== null && j !== null ? { row: i, key: j } : null;
    // While another head's overview is on its way, the numbers of the one before are not told under its name.
    const late = main.source?.fields && place && shown.B.base !== JSON.stringify(asked({ ...headOf(view), at: place }));
    const values = main.source && !late && place && cell && cell.row < main.source.n && cell.key < main.source.m ? main.read(cell) : null;
    if (main.source) legend();
    if (!values) {
      readout.textContent = main.source ? "Point at a cell to read it, click to lock it." : "";
      for (const name of ["level", "row", "key", "value"]) delete readout.dataset[name];
      return;
    }
    Object.assign(readout.dataset, { level: values.level, row: cell.row, key: cell.key, value: values.value });
    const others = ["A", "Δ"].filter((name) => !shown[name].box.hidden && shown[name].map.source)
      .map((name) => [name, shown[name].map.read(cell)?.value]).filter(([, value]) => value !== undefined)
      .map(([name, value]) => ` · ${name === "A" ? "A" : "B − A"} ${precise(value)}`).join("");
    const weight = element("b", { text: precise(values.value) + others });
    const span = ([a, b]) => (a >= b ? a : `${a} … ${b}`);
    if (main.source.pooled) {
      const [q, k] = [main.source.bin(0, cell.row), main.source.bin(1, cell.key)];
      readout.replaceChildren(`queries ${span(q)} → keys ${span(k)}: `, weight, " of a query's weight, on average. q and k were not kept, so that this is all there is.");
    } else if (values.level === 0) {
      const [q, k] = [named(view.found, place, "queries", cell.row), named(view.found, place, "keys", cell.key)];
      readout.replaceChildren(`query ${q} → key ${k}: weight `, weight);
    } else {
      readout.replaceChildren(
        `queries ${span(values.rows)} → keys ${span(values.keys)}: `, weight,
        " of a query's weight falls into this cell, on average. Zoom in for single weights.",
      );
    }
  }

  function legend() {
    const level = main.geometry().level;
    most.textContent = `${said(main.source.darkest(level))} and more`;
    const ramp = Float32Array.from({ length: 64 }, (_, i) => (i / 63) ** 2);
    paint(scale, ramp, 64, 1, 1);
  }

  view.on(`${SCORES} pinned found`, refresh);
  view.on("hide", () => { for (const name of ["A", "B"]) sinks(shown[name]).catch((error) => note(error.message, "error")); });
  view.on("at", () => { for (const one of Object.values(shown)) one.map.look(view.at); tell(); });
  view.on("row key hover", marks);
  shown.A.box.hidden = shown.Δ.box.hidden = true;
  const stop = onTheme(tell);
  refresh();
  return {
    map: main,
    close() {
      stop();
      loading?.abort();
      for (const one of Object.values(shown)) one.map.close();
    },
  };
}

const headOf = ({ recording, place, head, batch, beta, mask, position }) => ({ recording, place, head, batch, beta, mask, position });

// Six digits: enough to compare with what another program computes.
export function precise(x) {
  if (x === 0) return "0";
  return (Math.abs(x) >= 1e-4 ? x.toFixed(6) : x.toExponential(3)).replaceAll("-", "−");
}
