"use strict";
// The numbers of the page: unpacked as page.py packed them, and what is computed from them. Nothing here draws.

const data = JSON.parse(document.getElementById("data").textContent);
const columns = Object.keys(data.columns);
const SMALLEST_REST = 1e-3; // a row that gives less than this to other keys than its sinks has nothing left to show

// Integers of one head. A base64 text is decoded once, when a head of its place is first looked at.
function codes(packed, head) {
  if (!packed.codes) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const kind = { 8: Uint8Array, 16: Uint16Array, 32: Uint32Array }[packed.bits];
    packed.codes = new kind(bytes.buffer);
    packed.data = ""; // its letters would stay in memory beside the numbers
  }
  const size = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  return packed.codes.subarray(head * size, (head + 1) * size);
}

function values(packed, head) {
  const largest = 2 ** packed.bits - 1;
  const scale = packed.scale[head];
  const found = Float32Array.from(codes(packed, head));
  for (let i = 0; i < found.length; i++) {
    const share = found[i] / largest;
    found[i] = scale * (packed.power === 2 ? share * share : share);
  }
  return found;
}

// One number of a head: a list needs eight of the thousands that `values` would unpack.
function value(packed, head, i) {
  return packed.scale[head] * (codes(packed, head)[i] / (2 ** packed.bits - 1)) ** packed.power;
}

// The map [rows × columns] without its sinks: each row less what the first S keys took, over 1 less that. The sinks
// fill bins 0 … last, more than one where S > m / columns; bins before the last hold first keys alone, so taking from
// the left until all is taken is exact. A learned sink's share is no key's and stays as it is.
function withoutSinks(map, sinks, rows, width, last) {
  const rest = Float32Array.from(map);
  for (let i = 0; i < rows; i++) {
    let left = sinks[i];
    for (let j = 0; j <= last; j++) {
      const taken = Math.min(left, rest[i * width + j]);
      rest[i * width + j] -= taken;
      left -= taken;
    }
    const over = 1 - sinks[i];
    for (let j = 0; j < width; j++) {
      // Numbers are rounded in the page: what is left may come out a little above 1.
      rest[i * width + j] = over < SMALLEST_REST ? NaN : Math.min(1, rest[i * width + j] / over);
    }
  }
  return rest;
}

// A head's map as it is drawn: NaN where a row has nothing to show.
function headMap(place, head, hide) {
  if (!place.map) return null;
  const [, rows, width] = place.map.shape;
  let map = values(place.map, head);
  if (place.share) {
    const bins = place.share.shape[2];
    const share = values(place.share, head);
    const sinks = new Float32Array(rows);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < bins; j++) {
        map[i * width + j] += share[i * bins + j];
        sinks[i] += share[i * bins + j];
      }
    }
    blankEmptyRows(map, rows, width);
    if (hide) map = withoutSinks(map, sinks, rows, width, bins - 1);
  } else {
    blankEmptyRows(map, rows, width);
  }
  let most = 0;
  for (let i = 0; i < map.length; i++) if (map[i] > most) most = map[i];
  return { map, rows, width, most, darkest: darkestOf(map, most) };
}

// The weight that gets the darkest colour: where the strongest half per cent of cells starts. A causal map's first row
// is always 1, and would leave everything else pale. Counted in steps of 1/256 of the largest, which sorts nothing.
function darkestOf(map, most) {
  const counts = new Uint32Array(257);
  for (let i = 0; i < map.length; i++) if (map[i] > 0) counts[Math.floor((256 * map[i]) / most)]++;
  let step = 256;
  for (let left = 0.005 * map.length - counts[256]; step > 1 && left > 0; left -= counts[step]) step--;
  return (most * step) / 256;
}

// A row of a map sums to 1 or nearly so; one of zeros had no rows that count.
function blankEmptyRows(map, rows, width) {
  for (let i = 0; i < rows; i++) {
    let j = i * width;
    while (j < (i + 1) * width && map[j] === 0) j++;
    if (j === (i + 1) * width) map.fill(NaN, i * width, j);
  }
}

// Which queries or keys are in bin number `at` of `bins`: the first, and the one after the last.
function inBin(at, bins, total) {
  return [Math.ceil((at * total) / bins), Math.ceil(((at + 1) * total) / bins)];
}

function isCounted(place, head, i) {
  if (!place.counted) return true;
  const bits = codes(place.counted, place.counted.shape[0] === 1 ? 0 : head);
  return ((bits[i >> 3] >> (7 - (i & 7))) & 1) === 1;
}

// What a row has left for keys that are no sinks: weights are divided by it.
function restOf(place, head, i, hide) {
  return hide && place.sinks ? 1 - value(place.sinks, head, i - place.first) : 1;
}

// The strongest keys of query i, as [{at, weight}], strongest first. Null where its list is not in the page.
function keysOf(place, head, i, hide) {
  if (!place.top || i < place.first) return null;
  const k = place.top.shape[2];
  const places = codes(place.at, head);
  const none = 2 ** place.at.bits - 1;
  const rest = restOf(place, head, i, hide);
  const found = [];
  for (let t = (i - place.first) * k; t < (i - place.first + 1) * k; t++) {
    const weight = value(place.top, head, t);
    if (places[t] === none || weight === 0 || (hide && places[t] < place.sink)) continue;
    if (rest >= SMALLEST_REST) found.push({ at: places[t], weight: Math.min(1, weight / rest) });
  }
  return found;
}

// The queries that have key j among their strongest, strongest first.
function queriesOf(place, head, j, hide) {
  if (!place.top) return null;
  if (hide && j < place.sink) return [];
  const k = place.top.shape[2];
  const places = codes(place.at, head);
  const found = [];
  for (let t = 0; t < places.length; t++) {
    if (places[t] !== j) continue;
    const i = place.first + Math.floor(t / k);
    const weight = value(place.top, head, t);
    const rest = restOf(place, head, i, hide);
    if (weight > 0 && rest >= SMALLEST_REST) found.push({ at: i, weight: Math.min(1, weight / rest) });
  }
  return found.sort((a, b) => b.weight - a.weight);
}
