// The picked head's figures, and what ties the parts together.

let picked = null;
let bigMap = null;

function pick(made) {
  picked?.button.setAttribute("aria-pressed", "false");
  picked = made;
  made.button.setAttribute("aria-pressed", "true");
  at("name").textContent = made.words;
  at("said").textContent = sentence(made);
  at("numbers").replaceChildren(...columns.flatMap((name, c) => [
    element("dt", "", name), element("dd", "", said(made.numbers[c])), element("dd", "meaning", data.columns[name]),
  ]));
  drawMap();
  drawProfile();
  drawLine();
  showHead(made);
}

// The numbers as one would say them.
function sentence({ place, numbers }) {
  const of = Object.fromEntries(columns.map((name, c) => [name, numbers[c]]));
  if (of.entropy === null) return "Calls of unequal sizes were merged here: there are no numbers of rows.";
  const percent = (x) => (x === null ? "–" : `${Math.round(100 * x)} %`);
  const parts = [`The average query gives ${percent(of.peak)} to its strongest key`];
  const first = place.sink === 1 ? "the first key" : `the first ${place.sink} keys`;
  if (of.sink !== null) parts.push(`${percent(of.sink)} to ${first}`);
  if (of.local !== null) parts.push(`${percent(of.local)} to keys at most ${place.local} away`);
  const unit = place.grid ? "cells" : "tokens";
  const far = of.distance === null ? "" : ` Its weight lies ${said(of.distance)} ${unit} away on average.`;
  const even = of.spread === null ? "" : ` Spread: ${percent(of.spread)} of the way from one key to all alike.`;
  return `${parts.join(", ")}.${far}${even}`;
}

function drawMap() {
  const { place, head } = picked;
  bigMap = headMap(place, head, view.hide);
  at("map-frame").hidden = at("map-at").hidden = !bigMap;
  at("map-figure").classList.toggle("nothing", !bigMap);
  at("map-at").textContent = "";
  if (!bigMap) return;
  paint(at("map"), bigMap);
  const size = `${bigMap.rows} by ${bigMap.width} cells, largest ${said(bigMap.most)}`;
  at("map").setAttribute("aria-label", `attention of ${picked.words}: ${size}`);
  // A long thin map would push everything else off the screen.
  at("map-box").style.aspectRatio = place.n ? Math.min(2, Math.max(0.5, place.m / place.n)) : 1;
  ticks(at("map-keys"), place.m, "left");
  ticks(at("map-queries"), place.n, "top");
  mapSays(null);
}

// Queries or keys of a bin in words: "12 “the”" or "12–15 “the … of”".
function span(at, bins, total, words) {
  if (total === null) return `bin ${at}`;
  const [first, end] = inBin(at, bins, total);
  const numbers = end - first === 1 ? `${first}` : `${first}–${end - 1}`;
  if (words === null) return numbers;
  const word = (i) => written(data.texts[words][i]).trim();
  return `${numbers} “${end - first === 1 ? word(first) : `${word(first)} … ${word(end - 1)}`}”`;
}

function mapSays(event) {
  const box = at("map-at");
  if (!event) {
    const kept = view.hide && !picked.place.share ? " · sinks cannot be hidden here" : "";
    box.textContent = `largest cell ${said(bigMap.most)}${kept}`;
    return;
  }
  const { i, j } = cell(event);
  const weight = bigMap.map[i * bigMap.width + j];
  const { place } = picked;
  const query = span(i, bigMap.rows, place.n, place.queries);
  const key = span(j, bigMap.width, place.m, place.keys);
  box.textContent = `${Number.isNaN(weight) ? "nothing" : said(weight)} · query ${query} → key ${key}`;
}

function cell(event) {
  const box = at("map").getBoundingClientRect();
  const bin = (share, bins) => Math.min(bins - 1, Math.max(0, Math.floor(share * bins)));
  return {
    i: bin((event.clientY - box.top) / box.height, bigMap.rows),
    j: bin((event.clientX - box.left) / box.width, bigMap.width),
  };
}

// The asked query's row on the map and its place on the line of entropies.
function markRow(i) {
  const { place } = picked;
  const mark = at("map-mark");
  mark.hidden = i === null || !bigMap || place.n === null;
  if (!mark.hidden) {
    const bin = Math.floor((i * bigMap.rows) / place.n);
    mark.style.top = `${(100 * bin) / bigMap.rows}%`;
    mark.style.height = `${100 / bigMap.rows}%`;
  }
  const line = document.querySelector("#line .mark");
  if (!line) return;
  const x = place.n > 1 && i !== null ? (i / (place.n - 1)) * (WIDE - 2) + 1 : 0;
  line.setAttribute("visibility", i === null ? "hidden" : "visible");
  line.setAttribute("x1", x);
  line.setAttribute("x2", x);
}

function drawProfile() {
  const { place, head } = picked;
  at("profile-figure").hidden = !place.profile;
  if (!place.profile) return;
  const found = values(place.profile, head);
  const [, high, wide] = place.profile.shape;
  if (wide === undefined) {
    const radius = (high - 1) / 2;
    const svg = curve([...found], [`−${radius}`, "0: the query’s own place", `+${radius}`], true);
    svg.setAttribute("aria-label", `mean weight at offsets −${radius} to ${radius}`);
    at("profile").replaceChildren(svg);
    return;
  }
  const canvas = element("canvas", "profile-grid");
  paint(canvas, { map: found, rows: high, width: wide, darkest: Math.max(...found) });
  canvas.setAttribute("role", "img");
  const far = `${(high - 1) / 2} rows and ${(wide - 1) / 2} columns of patches`;
  canvas.setAttribute("aria-label", `mean weight at offsets of up to ${far}`);
  at("profile").replaceChildren(canvas);
}

function drawLine() {
  const { place, head } = picked;
  at("line-figure").hidden = !place.line;
  if (!place.line) return;
  const bins = place.line.shape[1];
  const points = Array.from(values(place.line, head), (x, b) => {
    const [first, end] = inBin(b, bins, place.n);
    for (let i = first; i < end; i++) if (isCounted(place, head, i)) return x;
    return null;
  });
  const svg = curve(points, ["0", "", String(place.n - 1)], false);
  svg.append(drawing("line", { class: "mark", y1: 0, y2: HIGH, visibility: "hidden" }));
  svg.setAttribute("aria-label", "entropy of each query along the text");
  at("line").replaceChildren(svg);
}

function start() {
  document.title = data.model ? `${data.model} – regard` : "regard";
  at("model").textContent = data.model || "attention";
  const counts = [...new Set(data.places.map((place) => place.heads.length))];
  const tokens = [...new Set(data.places.map((place) => place.n).filter((n) => n !== null))];
  const many = `${data.places.length} place${data.places.length > 1 ? "s" : ""} × ${counts.join(" or ")} heads`;
  at("sizes").textContent = many + (tokens.length ? `, ${tokens.join(" or ")} tokens` : "");
  makeTokens();
  makeOverview(pick);
  hint(null);
  paintScale(at("scale"));
  at("map").addEventListener("mousemove", mapSays);
  at("map").addEventListener("mouseleave", () => mapSays(null));
  at("map").addEventListener("click", (event) => {
    if (picked.place.top && reading.direction === "from") lock(inBin(cell(event).i, bigMap.rows, picked.place.n)[0]);
  });
  at("hide").addEventListener("change", () => { view.hide = at("hide").checked; redraw(); });
  darkness.addEventListener("change", () => { colours = ramp(); paintScale(at("scale")); redraw(); });
  pick(heads.find((made) => made.place.map) ?? heads[0]);
  reachable(heads);
}

function redraw() {
  drawThumbnails();
  drawMap();
  drawProfile();
  shade();
}

start();
