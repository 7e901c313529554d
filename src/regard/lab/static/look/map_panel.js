// The map of the selected head. In a comparison also the map of head A, and the difference; they move together.
import { get } from "../api.js";
import { paint, paintSigned } from "../colour.js";
import { element, formatNumber, showMessage } from "../dom.js";
import { onTheme } from "../theme.js";
import { pinnedHead, pinnedName } from "./pinned_head.js";
import { Difference, PooledMap, Tiles } from "./tiles.js";
import { headName, longLabel, shortLabel, tokenTexts } from "./token_labels.js";
import {
  currentLayer, HEAD_SETTINGS, headIndex, headSettings, lockedToken, requestFields, scoresChanged, scoreText,
  wholeMap,
} from "./view_state.js";
import { cachedWeights, formatWeight, loadWeights } from "./load_weights.js";
import { ZoomMap } from "./zoom_map.js";

const SHORT_HELP = "Ctrl or ⌘ + wheel zooms";
const HELP = "Zoom with Ctrl or ⌘ and the wheel, with two fingers, or with + and −, to the locked cell. Drag or use the "
  + "arrow keys to move, 0 shows all. Shift and arrow keys move the locked cell, Escape releases it.";

const showError = (error) => showMessage(error.message, "error");
const rangeText = ([first, last]) => (first >= last ? first : `${first} … ${last}`);

export function createMapPanel(root, view) {
  const readout = element("output", { className: "readout" });
  const scale = element("canvas", { className: "scale", "aria-hidden": "true" });
  const scaleMaximum = element("span");
  const buttons = element("div", { className: "zoom", role: "group", "aria-label": "zoom" });
  const row = element("div", { className: "maps" });
  const help = element("p", { className: "help quiet", title: HELP },
    SHORT_HELP, element("span", { className: "unseen", id: "look-map-help", text: HELP }));
  const legend = element("span", { className: "quiet scales" }, "0 ", scale, " ", scaleMaximum, ", square-root scale");
  root.append(row, readout, element("div", { className: "bar under" }, buttons, legend, help));
  const figures = { A: createFigure("A"), B: createFigure("B"), Δ: createFigure("Δ") };
  const main = figures.B.map;
  const signedScale = element("canvas", { className: "scale", "aria-hidden": "true" });
  const signedEnds = [element("span"), element("span")];
  figures.Δ.box.append(element("p", { className: "quiet signed" },
    signedEnds[0], " ", signedScale, " ", signedEnds[1], " · orange: A is larger, blue: B is larger"));
  const noDifference = element("p", { className: "quiet unlike", hidden: true });
  row.append(noDifference);
  let request = null;
  let sameTokens = true; // whether A and B have the same tokens

  addButton("−", "zoom out", () => main.zoomToLocked(1 / 1.6));
  addButton("+", "zoom in", () => main.zoomToLocked(1.6));
  addButton("all", "show the whole map", () => view.change({ window: wholeMap() }));

  function addButton(text, title, act) {
    const button = element("button", { type: "button", text, title, "aria-label": title });
    button.addEventListener("click", () => {
      if (main.source) act();
    });
    buttons.append(button);
  }

  function createFigure(name) {
    const canvas = element("canvas", {
      className: "map", tabindex: 0, role: "application", "aria-describedby": "look-map-help",
    });
    const caption = element("figcaption");
    const busy = element("span", { className: "busy quiet", hidden: true, text: "computing the overview …" });
    const frame = element("div", { className: "frame" }, canvas, busy);
    const box = element("figure", { dataset: { map: name } }, caption, frame);
    row.append(box);
    const map = new ZoomMap(canvas, {
      onHover: (cell) => view.change({ hover: hoverOf(map.source, cell) }),
      onLock(cell) {
        if (!map.source.isPooled) view.change({ row: cell.row, key: cell.key });
      },
      onMove: (mapWindow) => view.change({ window: mapWindow }),
    });
    map.setWindow(view.window);
    // `base` identifies the head whose map is shown; `head` has its settings, layer and description. `isCurrent` is false
    // while the map of a head that is not selected any more stays on the screen.
    return { box, canvas, caption, busy, map, base: "", head: null, isCurrent: false };
  }

  function tileHandlers(map) {
    return {
      onChange() {
        map.redraw();
        showReadout();
      },
      onError: showError,
    };
  }

  // Show the map of a head in a figure. Returns its source.
  async function showHead(figure, head, signal) {
    if (!head.layer.kept) return showPooled(figure, head);
    const { map } = figure;
    const fields = requestFields(head);
    const base = JSON.stringify(fields);
    if (figure.base === base && map.source) {
      figure.isCurrent = true;
      return map.source;
    }

    // The last map stays until the new one is loaded.
    figure.busy.textContent = "computing the overview …";
    figure.busy.hidden = Boolean(map.source);
    figure.box.setAttribute("aria-busy", "true");
    try {
      const levels = await get("/api/look/levels", fields, signal);
      figure.head = head;
      map.show(new Tiles(fields, levels, tileHandlers(map)),
        (side, index) => shortLabel(head.description, head.layer, side, index));
      figure.base = base;
      figure.isCurrent = true;
      await updateSinks(figure, signal);
      return map.source;
    } catch (error) {
      // The map of another head must not stay under the name of this one.
      if (error.name !== "AbortError") clearMap(figure);
      throw error;
    } finally {
      figure.busy.hidden = true;
      figure.box.removeAttribute("aria-busy");
    }
  }

  // Without q and k there is only the pooled map, or no map.
  function showPooled(figure, head) {
    const { layer } = head;
    figure.base = "";
    figure.isCurrent = true;
    figure.head = head;
    const source = layer.map ? new PooledMap(layer, headIndex(layer, head.head), view.hideSinks) : null;
    figure.map.show(source, (side, index) => shortLabel(head.description, layer, side, index));
    figure.busy.textContent = `There is no map here: ${layer.no_map}.`;
    figure.busy.hidden = source !== null;
    return source;
  }

  function clearMap(figure) {
    figure.base = "";
    figure.map.show(null, () => "");
  }

  // To hide sinks, a map needs the weights of all queries on the first keys.
  async function updateSinks(figure, signal) {
    const { head } = figure;
    const { source } = figure.map;
    if (source?.isPooled) showPooled(figure, head);
    if (!source?.fields || !head) return;
    const requests = [];
    if (view.hideSinks) {
      const sinkCount = Math.min(head.layer.sink, source.m);
      for (let key = 0; key < sinkCount; key++) requests.push(loadWeights(head, "to", key, signal));
    }
    const columns = await Promise.all(requests);
    if (figure.map.source !== source) return;
    source.hideSinks(columns.length ? columns : null);
    figure.map.redraw();
    updateDifferenceSinks();
    showReadout();
  }

  // The difference hides the same keys as the two maps.
  function updateDifferenceSinks() {
    const { source } = figures.Δ.map;
    const a = figures.A.map.source;
    const b = figures.B.map.source;
    if (!source || !a?.fields || !b?.fields) return;
    source.hideSinks(a.sinkColumns, b.sinkColumns);
    figures.Δ.map.redraw();
  }

  async function refresh() {
    request?.abort();
    // The maps stay until the new ones are loaded, but their weights are not those of the selected head any more.
    for (const figure of Object.values(figures)) figure.isCurrent = false;
    showReadout();
    const layer = currentLayer(view);
    if (!layer || view.head === null) return;
    request = new AbortController();
    const { signal } = request;
    const headB = { ...headSettings(view), layer, description: view.description };
    const nameB = headName(layer, view.head);
    try {
      const headA = await pinnedHead(view, signal);
      row.classList.toggle("compared", headA !== null);
      figures.A.box.hidden = headA === null;
      const changes = scoresChanged(view) ? ` (${scoreText(view)})` : "";
      figures.B.caption.textContent = headA ? `B  ${nameB}${changes}` : "";
      figures.B.canvas.setAttribute("aria-label", `map of ${nameB}: ${layer.n} queries by ${layer.m} keys`);
      if (headA) {
        const nameA = pinnedName(headA, view);
        figures.A.caption.textContent = `A  ${nameA}`;
        figures.A.canvas.setAttribute("aria-label", `map of ${nameA}`);
      } else {
        noDifference.hidden = true;
        for (const name of ["A", "Δ"]) {
          figures[name].box.hidden = true;
          clearMap(figures[name]);
        }
      }
      const [sourceB, sourceA] = await Promise.all([
        showHead(figures.B, headB, signal),
        headA && showHead(figures.A, headA, signal),
      ]);
      sameTokens = headA === null || haveSameTokens(headA, headB);
      const reason = headA ? reasonNoDifference(sourceA, sourceB) : "";
      const comparable = headA !== null && !reason;
      figures.Δ.box.hidden = !comparable;
      noDifference.hidden = !reason;
      noDifference.textContent = reason;
      if (comparable) {
        figures.Δ.caption.textContent = sameTokens ? "B − A" : "B − A, by position: the texts differ";
        showDifference(sourceA, sourceB);
      }
      showMarks();
    } catch (error) {
      if (error.name !== "AbortError") showError(error);
    }
  }

  // Why two maps cannot be subtracted; empty if they can.
  function reasonNoDifference(a, b) {
    if (!a?.fields || !b?.fields) return "There is no map of B − A: it needs q and k of both recordings.";
    if (a.n === b.n && a.m === b.m) return "";
    return `There is no map of B − A: A has ${a.n} queries and ${a.m} keys, B has ${b.n} and ${b.m}.`;
  }

  function haveSameTokens(a, b) {
    if (a.recording === b.recording) return true;
    return ["queries", "keys"].every((side) => {
      const texts = [a, b].map(({ description, layer }) => tokenTexts(description, layer, side));
      return JSON.stringify(texts[0]) === JSON.stringify(texts[1]);
    });
  }

  function showDifference(a, b) {
    const figure = figures.Δ;
    figure.canvas.setAttribute("aria-label", "map of the difference, B minus A");
    const base = a.base + b.base;
    figure.isCurrent = true;
    if (figure.base === base) return;
    figure.base = base;
    figure.map.show(new Difference(a, b, tileHandlers(figure.map)), main.label);
    updateDifferenceSinks();
  }

  // What is under the pointer, as tokens: a cell of a pooled map covers several of them.
  function hoverOf(source, cell) {
    if (!cell || !source.isPooled) return cell;
    const rows = source.bin("queries", cell.row);
    const keys = source.bin("keys", cell.key);
    return { row: rows[0], key: keys[0], rows, keys, cell };
  }

  // The cells to light up: a token of self-attention has a row and a column.
  function hoveredCells(source) {
    const { hover } = view;
    if (!hover || !source) return null;
    if (hover.cell && source.isPooled) return hover.cell;
    const cellOf = (token, cells, count) => {
      if (typeof token !== "number" || token >= count) return null;
      return Math.floor((token * cells) / count);
    };
    return {
      row: cellOf(hover.row ?? hover.token, source.n, source.queryCount ?? source.n),
      key: cellOf(hover.key ?? hover.token, source.m, source.keyCount ?? source.m),
    };
  }

  function showMarks() {
    const locked = { row: null, key: null };
    if (!main.source?.isPooled) {
      locked.row = lockedToken(view, "row");
      locked.key = lockedToken(view, "key");
    }
    for (const { box, map, canvas } of Object.values(figures)) {
      if (box.hidden) continue;
      const hover = hoveredCells(map.source);
      map.setMarks({ ...locked, hover });
      canvas.dataset.hover = hover ? `${hover.row ?? ""},${hover.key ?? ""}` : "";
    }
    showReadout();
  }

  // The cell under the pointer, or the locked cell, or null.
  function readCell() {
    const hover = view.hover?.cell ?? view.hover;
    if (typeof hover?.row === "number" && typeof hover.key === "number") return hover;
    const lockedRow = lockedToken(view, "row");
    const lockedKey = lockedToken(view, "key");
    return lockedRow === null || lockedKey === null ? null : { row: lockedRow, key: lockedKey };
  }

  // The exact weight of the locked cell, which the weights of the locked token contain even if the map is zoomed out; or
  // null while it is not loaded.
  function readLocked(layer, cell) {
    const isHovered = typeof view.hover?.row === "number" && typeof view.hover.key === "number";
    if (!layer?.kept || !cell || isHovered) return null;
    const from = view.direction === "from";
    const values = cachedWeights(view, view.direction, from ? cell.row : cell.key);
    const value = values?.[from ? cell.key : cell.row];
    if (value === undefined) return null;
    return { level: 0, value, rows: [cell.row, cell.row], keys: [cell.key, cell.key] };
  }

  // The value of the cell; null if there is none, or while the map of another head is still shown.
  function readMain(layer, cell) {
    const { source } = main;
    if (!source || !layer || !cell || !figures.B.isCurrent) return null;
    if (cell.row >= source.n || cell.key >= source.m) return null;
    return main.read(cell);
  }

  // Whether a cell of a map is a cell of another map too: maps of other sizes have other cells, and a cell of a pooled map
  // covers several tokens.
  function hasSameCells(source, other, { row, key }) {
    if (!source || Boolean(source.isPooled) !== Boolean(other.isPooled)) return false;
    const haveSameBins = source.queryCount === other.queryCount && source.keyCount === other.keyCount;
    return row < source.n && key < source.m && (!source.isPooled || haveSameBins);
  }

  function showReadout() {
    const layer = currentLayer(view);
    const cell = readCell();
    let reading = readMain(layer, cell);
    if (reading?.level > 0) reading = readLocked(layer, cell) ?? reading;
    if (main.source) showScale();
    if (!reading) {
      const isReadable = main.source && figures.B.isCurrent;
      readout.textContent = isReadable ? "Point at a cell to read its weight, click to lock it." : "";
      for (const name of ["level", "row", "key", "value"]) delete readout.dataset[name];
      return;
    }
    Object.assign(readout.dataset, { level: reading.level, row: cell.row, key: cell.key, value: reading.value });

    let text = formatWeight(reading.value);
    const labelA = nameInA(reading, cell);
    for (const [name, label] of [["A", labelA], ["Δ", "B − A"]]) {
      const { box, map, isCurrent } = figures[name];
      // A mean over several weights is not shown beside a single one.
      const isComparable = !box.hidden && isCurrent && hasSameCells(map.source, main.source, cell);
      const other = isComparable ? map.read(cell) : null;
      if (other && Boolean(other.level) === Boolean(reading.level)) text += ` · ${label} ${formatWeight(other.value)}`;
    }
    const weight = element("b", { text });
    if (main.source.isPooled) {
      const queries = rangeText(main.source.bin("queries", cell.row));
      const keys = rangeText(main.source.bin("keys", cell.key));
      readout.replaceChildren(`queries ${queries} → keys ${keys}: `, weight,
        ` per key on average, ${formatWeight(main.source.sum(cell))} in sum over the keys. `
        + "The recording has no q and k: single weights are not available.");
    } else if (reading.level === 0) {
      const query = longLabel(view.description, layer, "queries", cell.row);
      const key = longLabel(view.description, layer, "keys", cell.key);
      const isHidden = view.hideSinks && cell.key < layer.sink;
      readout.replaceChildren(`query ${query} → key ${key}: weight `, weight,
        isHidden ? " (a sink: not drawn)" : "");
    } else {
      readout.replaceChildren(`queries ${rangeText(reading.rows)} → keys ${rangeText(reading.keys)}: `, weight,
        " of a query's weight falls into this cell, on average. Zoom in to see single weights.");
    }
  }

  // What A is in the readout. If its text is another one, the tokens at the same positions are named too.
  function nameInA(reading, { row, key }) {
    if (sameTokens) return "A";
    const { head } = figures.A;
    if (reading.level || main.source.isPooled || !head) return "A at these positions of its text";
    const query = longLabel(head.description, head.layer, "queries", row);
    return `A, ${query} → ${longLabel(head.description, head.layer, "keys", key)},`;
  }

  function showScale() {
    const { level } = main.geometry();
    let what = "";
    if (main.source.isPooled) what = " per key";
    else if (level) what = ` in the ${2 ** level} keys of a cell`;
    scaleMaximum.textContent = `${formatNumber(main.source.colourMaximum(level))} and more${what}`;
    const ramp = Float32Array.from({ length: 64 }, (_, i) => (i / 63) ** 2);
    paint(scale, ramp, 64, 1, 1);
    const difference = figures.Δ;
    if (difference.box.hidden || !difference.map.source) return;
    const largest = formatNumber(difference.map.source.colourMaximum(difference.map.geometry().level));
    signedEnds[0].textContent = `−${largest}`;
    signedEnds[1].textContent = `+${largest}`;
    const signedRamp = Float32Array.from({ length: 65 }, (_, i) => i / 32 - 1);
    paintSigned(signedScale, signedRamp, 65, 1, 1);
  }

  view.on(`${HEAD_SETTINGS} pinned description`, refresh);
  view.on("hideSinks", () => {
    for (const name of ["A", "B"]) updateSinks(figures[name]).catch(showError);
  });
  view.on("window", () => {
    for (const figure of Object.values(figures)) figure.map.setWindow(view.window);
    showReadout();
  });
  view.on("row key hover", showMarks);
  view.on("weights", showReadout);
  figures.A.box.hidden = true;
  figures.Δ.box.hidden = true;
  const stopTheme = onTheme(showReadout);
  refresh();
  return {
    map: main,
    close() {
      stopTheme();
      request?.abort();
      for (const figure of Object.values(figures)) figure.map.close();
    },
  };
}
