// The figures of the selected head, and the start of the page.

let selected = null;
let largeMap = null;

function select(item) {
  selected?.button.setAttribute("aria-pressed", "false");
  markGroupRow(selected, item);
  selected = item;
  item.button.setAttribute("aria-pressed", "true");
  byId("name").textContent = item.title;
  byId("summary").textContent = sentence(item);
  showTypes(item);
  showAbout(item.layer);
  byId("numbers").replaceChildren(...columns.flatMap((name, c) => [
    element("dt", "", name),
    element("dd", "", formatNumber(item.numbers[c])),
    element("dd", "meaning", item.layer.meanings[name] ?? data.columns[name]),
  ]));
  showGroups(item);
  drawMap();
  drawProfile();
  drawLine();
  showHead(item);
}

// What a layer reads, in words.
function subject(layer) {
  return layer.grid ? "image" : "text";
}

// The types of the head, and that they were not measured on this text.
function showTypes(item) {
  byId("types").hidden = data.types === null;
  if (data.types === null) return;
  const source = `Types from ${data.types}, not from this ${subject(item.layer)}.`;
  const chips = (item.types?.labels ?? []).map((name) => {
    const percent = `${Math.round(100 * item.types.confidences[name])} %`;
    const chip = element("span", "type", `${name} ${percent}`);
    chip.title = `${name}: confidence ${percent}. ${source}`;
    return chip;
  });
  if (!chips.length) chips.push(element("span", "", item.types ? "no type" : "types of this head are not known"));
  byId("types").replaceChildren(element("span", "quiet", "type"), ...chips, element("small", "", source));
}

// What is exact in this page, and what is pooled or rounded.
function showAbout(layer) {
  const lines = ["Numbers of a head (entropy, peak, …) are the recorded means, not rounded by the page."];
  if (layer.groups) lines.push("Weights on groups of keys: means over all queries that count, rounded to four decimals.");
  if (layer.map) {
    const [, rows, width] = layer.map.shape;
    const each = layer.n === rows && layer.m === width;
    const cells = each ? "one cell per query and key"
      : "each the mean over its queries of the weight on its keys, shown per key";
    lines.push(`Map: ${rows} × ${width} cells, ${cells}. Within ${formatNumber(1 / 255)} of the head’s largest cell.`);
  }
  if (layer.top) {
    const [, k, rows] = layer.top.shape;
    const which = rows === layer.n ? `all ${rows} queries` : `the last ${rows} of ${layer.n} queries`;
    const error = Math.max(1 / (2 ** layer.top.bits - 1), layer.rest ? 1 / (2 ** layer.rest.bits - 1) : 0);
    lines.push(`Strongest keys: exact positions, ${k} per query, of ${which}. Weights are within ${formatNumber(error)}, `
      + "small ones closer; only digits that are known are shown.");
  }
  if (layer.line) {
    const points = layer.line.shape[1];
    const pooled = points === layer.n ? "one point per query" : `${points} points, each the mean of its queries`;
    lines.push(`Entropy along the ${subject(layer)}: ${pooled}.`);
  }
  byId("about-lines").replaceChildren(...lines.map((line) => element("li", "", line)));
}

// The numbers as a sentence.
function sentence({ layer, numbers }) {
  const means = Object.fromEntries(columns.map((name, c) => [name, numbers[c]]));
  if (means.entropy === null) return "Calls of unequal sizes were merged here: there are no means over rows.";
  const percent = (x) => (x === null ? "–" : `${Math.round(100 * x)} %`);
  const parts = [`The average query gives ${percent(means.peak)} to its strongest key`];
  const first = layer.sink === 1 ? "the first key" : `the first ${layer.sink} keys`;
  if (means.sink !== null) parts.push(`${percent(means.sink)} to ${first}`);
  if (means.local !== null) parts.push(`${percent(means.local)} to keys at most ${layer.local} away`);
  const unit = layer.grid ? "patches" : "tokens";
  const far = means.distance === null ? "" : ` Its weight lies ${formatNumber(means.distance)} ${unit} away on average.`;
  const even = means.spread === null ? "" : ` Spread: ${percent(means.spread)} of the way from one key to equal weights.`;
  return `${parts.join(", ")}.${far}${even}`;
}

function drawMap() {
  const { layer, head } = selected;
  largeMap = headMap(layer, head, view.hideSinks);
  byId("map-frame").hidden = byId("map-at").hidden = !largeMap;
  byId("no-map").hidden = Boolean(largeMap);
  byId("no-map").textContent = largeMap ? "" : `There is no map here: ${layer.no_map}.`;
  byId("map-at").textContent = "";
  if (!largeMap) return;
  const pooled = isPooled(layer, largeMap) ? "pooled, weight per key, " : "";
  byId("map-note").textContent = `${pooled}queries down, keys across`;
  paint(byId("map"), largeMap);
  const size = `${largeMap.rows} by ${largeMap.width} cells, largest ${formatNumber(largeMap.largest)}`;
  byId("map").setAttribute("aria-label", `attention of ${selected.title}: ${size}`);
  // A long thin map would push everything else off the screen.
  byId("map-box").style.aspectRatio = layer.n ? Math.min(2, Math.max(0.5, layer.m / layer.n)) : 1;
  ticks(byId("map-keys"), layer.m, "left");
  ticks(byId("map-queries"), layer.n, "top");
  showCell(null);
}

// Whether the cells of a map cover several queries or keys.
function isPooled(layer, map) {
  return map.rows !== layer.n || map.width !== layer.m;
}

// The queries or keys of a bin, with their tokens: "12 “the”" or "12–15 “the … of”".
function binLabel(bin, bins, total, textIndex) {
  if (total === null) return `bin ${bin}`;
  const [first, end] = binRange(bin, bins, total);
  const numbers = end - first === 1 ? `${first}` : `${first}–${end - 1}`;
  if (textIndex === null) return numbers;
  const label = (i) => visibleText(data.texts[textIndex][i]).trim();
  if (end - first === 1) return `${numbers} “${label(first)}”`;
  return `${numbers} “${label(first)} … ${label(end - 1)}”`;
}

function showCell(event) {
  const box = byId("map-at");
  if (!event) {
    const note = view.hideSinks && !selected.layer.share ? " · sinks cannot be hidden here" : "";
    const what = isPooled(selected.layer, largeMap) ? "largest cell, per key:" : "largest weight";
    box.textContent = `${what} ${formatNumber(largeMap.largest)}${note}`;
    return;
  }
  const { i, j } = cellAt(event);
  const weight = largeMap.map[i * largeMap.width + j];
  const perKey = largeMap.perKey[i * largeMap.width + j];
  const { layer } = selected;
  const query = binLabel(i, largeMap.rows, layer.n, layer.queries);
  const key = binLabel(j, largeMap.width, layer.m, layer.keys);
  const where = `query ${query} → key ${key}`;
  if (Number.isNaN(weight)) box.textContent = `nothing · ${where}`;
  else if (!isPooled(layer, largeMap)) box.textContent = `${formatNumber(weight)} · ${where}`;
  else box.textContent = `${formatNumber(perKey)} per key, sum over keys ${formatNumber(weight)} · ${where}`;
}

function cellAt(event) {
  const box = byId("map").getBoundingClientRect();
  const bin = (share, bins) => Math.min(bins - 1, Math.max(0, Math.floor(share * bins)));
  return {
    i: bin((event.clientY - box.top) / box.height, largeMap.rows),
    j: bin((event.clientX - box.left) / box.width, largeMap.width),
  };
}

// Marks the row of the active query on the map, and its position on the curve of entropies.
function markRow(i) {
  const { layer } = selected;
  const mark = byId("map-mark");
  mark.hidden = i === null || !largeMap || layer.n === null;
  if (!mark.hidden) {
    const bin = Math.floor((i * largeMap.rows) / layer.n);
    mark.style.top = `${(100 * bin) / largeMap.rows}%`;
    mark.style.height = `${100 / largeMap.rows}%`;
  }
  const line = document.querySelector("#line .mark");
  if (!line) return;
  const x = layer.n > 1 && i !== null ? (i / (layer.n - 1)) * (CURVE_WIDTH - 2) + 1 : 0;
  line.setAttribute("visibility", i === null ? "hidden" : "visible");
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

function drawProfile() {
  const { layer, head } = selected;
  byId("profile-figure").hidden = !layer.profile && !layer.cross;
  if (layer.cross) byId("profile").replaceChildren(element("p", "quiet", layer.meanings.offset));
  if (!layer.profile) return;
  const profile = values(layer.profile, head);
  const [, high, wide] = layer.profile.shape;
  if (wide === undefined) {
    const radius = (high - 1) / 2;
    const svg = curve([...profile], [`−${radius}`, "0: the query itself", `+${radius}`], true);
    svg.setAttribute("aria-label", `mean weight at offsets −${radius} to ${radius}`);
    byId("profile").replaceChildren(svg);
    return;
  }
  const canvas = element("canvas", "profile-grid");
  paint(canvas, { perKey: profile, rows: high, width: wide, darkest: Math.max(...profile) });
  canvas.setAttribute("role", "img");
  const far = `${(high - 1) / 2} rows and ${(wide - 1) / 2} columns of patches`;
  canvas.setAttribute("aria-label", `mean weight at offsets of up to ${far}`);
  byId("profile").replaceChildren(canvas);
}

function drawLine() {
  const { layer, head } = selected;
  byId("line-figure").hidden = !layer.line;
  byId("line-title").textContent = `entropy along the ${subject(layer)}`;
  if (!layer.line) return;
  const bins = layer.line.shape[1];
  const points = Array.from(values(layer.line, head), (x, b) => {
    const [first, end] = binRange(b, bins, layer.n);
    for (let i = first; i < end; i++) if (isCounted(layer, head, i)) return x;
    return null;
  });
  const svg = curve(points, ["0", "", String(layer.n - 1)], false);
  svg.append(svgElement("line", { class: "mark", y1: 0, y2: CURVE_HEIGHT, visibility: "hidden" }));
  svg.setAttribute("aria-label", `entropy of each query along the ${subject(layer)}`);
  byId("line").replaceChildren(svg);
}

function start() {
  document.title = data.model ? `${data.model} – regard` : "regard";
  byId("model").textContent = data.model || "attention";
  const counts = [...new Set(data.places.map((layer) => layer.heads.length))];
  const tokens = [...new Set(data.places.map((layer) => layer.n).filter((n) => n !== null))];
  const size = `${data.places.length} layer${data.places.length > 1 ? "s" : ""} × ${counts.join(" or ")} heads`;
  document.body.classList.toggle("with-types", data.types !== null);
  byId("sizes").textContent = size + (tokens.length ? `, ${tokens.join(" or ")} tokens` : "");
  makeTokens();
  makeOverview(select);
  showHint(null);
  paintScale(byId("scale"));
  byId("map").addEventListener("mousemove", showCell);
  byId("map").addEventListener("mouseleave", () => showCell(null));
  byId("map").addEventListener("click", (event) => {
    if (!selected.layer.top || textView.direction !== "from") return;
    lock(binRange(cellAt(event).i, largeMap.rows, selected.layer.n)[0]);
  });
  byId("hide").addEventListener("change", () => { view.hideSinks = byId("hide").checked; redraw(); });
  darkScheme.addEventListener("change", () => { colourCodes = colourTable(); paintScale(byId("scale")); redraw(); });
  const isFirst = ({ layer, number }) => layer.path === data.selected?.path && number === data.selected.head;
  select(heads.find(isFirst) ?? heads.find((item) => item.layer.map) ?? heads[0]);
  resetReachable(heads);
}

function redraw() {
  drawThumbnails();
  drawMap();
  drawProfile();
  shade();
}

function showProblem(text) {
  byId("problem").textContent = text;
  byId("problem").hidden = false;
}

async function openPage() {
  if (typeof DecompressionStream === "undefined") {
    showProblem("This browser cannot decompress the numbers of this page. It needs Chrome 80, Firefox 113, Safari 16.4, "
      + "or a later version.");
    return;
  }
  try {
    await loadArrays();
  } catch {
    showProblem("The numbers of this page cannot be read: the file is incomplete or was changed. Write it again.");
    return;
  }
  start();
  document.documentElement.dataset.ready = "";
}

openPage();
