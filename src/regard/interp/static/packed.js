// Arrays as regard.interp._page_arrays encodes them: integers, head by head.
// The offline page contains this file, and the lab imports it.

// The integers of one head. The array of a layer is decoded once, when one of its heads is first shown.
export function codes(packed, head) {
  packed.codes ??= packed.bytes ? joinPlanes(packed) : fromBase64(packed);
  const size = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  return packed.codes.subarray(head * size, (head + 1) * size);
}

// The type of array that holds integers of these bits.
function integerArray(bits) {
  if (bits <= 8) return Uint8Array;
  return bits <= 16 ? Uint16Array : Uint32Array;
}

// An array that comes by itself, as base64.
function fromBase64(packed) {
  const text = atob(packed.data);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  packed.data = ""; // the text would stay in memory beside the numbers
  return new (integerArray(packed.bits))(bytes.buffer);
}

// An array of the offline page: the low bytes of all integers, then their next bytes.
function joinPlanes({ bytes, bits, shape }) {
  const integers = new (integerArray(bits))(shape.reduce((a, b) => a * b, 1));
  const size = integers.length;
  for (let plane = 0; plane < integers.BYTES_PER_ELEMENT; plane++) {
    for (let i = 0; i < size; i++) integers[i] |= bytes[plane * size + i] << (8 * plane);
  }
  return integers;
}

// All numbers of one head.
export function values(packed, head) {
  const largest = 2 ** packed.bits - 1;
  const scale = packed.scale[head];
  const numbers = Float32Array.from(codes(packed, head));
  for (let i = 0; i < numbers.length; i++) {
    const relative = numbers[i] / largest;
    numbers[i] = scale * (packed.power === 2 ? relative * relative : relative);
  }
  return numbers;
}

// One number of a head. A list needs only a few of the thousands of numbers that `values` would decode.
export function value(packed, head, i) {
  return packed.scale[head] * (codes(packed, head)[i] / (2 ** packed.bits - 1)) ** packed.power;
}

// A row with less weight than this on keys other than its sinks has nothing left to show.
export const SMALLEST_REST = 1e-3;

// The map [rows × columns] without its sinks: each row minus the weight of the first S keys, divided by the rest. The
// first keys fill the bins 0 … last, several if S > m / columns. All bins before the last hold only first keys, so it is
// exact to subtract from the left until the weight is used up. The weight of a learned sink belongs to no key, and stays.
function withoutSinks(map, sinks, rows, width, last) {
  const rest = Float32Array.from(map);
  for (let i = 0; i < rows; i++) {
    let remaining = sinks[i];
    for (let j = 0; j <= last; j++) {
      const part = Math.min(remaining, rest[i * width + j]);
      rest[i * width + j] -= part;
      remaining -= part;
    }
    const total = 1 - sinks[i];
    for (let j = 0; j < width; j++) {
      // The numbers are rounded, so the rest may be slightly above 1.
      rest[i * width + j] = total < SMALLEST_REST ? NaN : Math.min(1, rest[i * width + j] / total);
    }
  }
  return rest;
}

// A row of a map sums to about 1. A row of zeros has no counted rows.
function blankEmptyRows(map, width) {
  for (let i = 0; i < map.length; i += width) {
    const row = map.subarray(i, i + width);
    if (row.every((weight) => weight === 0)) row.fill(NaN);
  }
}

// The first query or key of a bin, and the one after its last.
export function binRange(bin, bins, total) {
  return [Math.ceil((bin * total) / bins), Math.ceil(((bin + 1) * total) / bins)];
}

// How many keys each bin of a layer's map holds, without the first `without` keys; 1 if this is not known.
function keysPerBin(layer, width, without) {
  return Float32Array.from({ length: width }, (_, bin) => {
    if (layer.m === null) return 1;
    const [first, end] = binRange(bin, width, layer.m);
    return end - Math.min(end, Math.max(first, without));
  });
}

// The pooled map of a head. A cell of `map` is the mean over its queries of the weight on its keys. `perKey` is what is
// drawn, the same divided by the number of keys: bins hold different numbers of keys, and sums would look like stripes.
// NaN marks rows that have nothing to show.
export function headMap(layer, head, hideSinks) {
  if (!layer.map) return null;
  const [, rows, width] = layer.map.shape;
  let map = values(layer.map, head);

  // The map comes per key, and without the weight of the first keys, which is stored beside it.
  const bins = layer.share?.shape[2] ?? 0;
  const otherKeys = keysPerBin(layer, width, bins ? layer.sink : 0);
  for (let i = 0; i < map.length; i++) map[i] *= otherKeys[i % width];
  const share = bins ? values(layer.share, head) : null;
  const sinks = new Float32Array(rows);
  for (let i = 0; i < rows; i++) {
    for (let j = 0; j < bins; j++) {
      map[i * width + j] += share[i * bins + j];
      sinks[i] += share[i * bins + j];
    }
  }
  blankEmptyRows(map, width);
  let keys = keysPerBin(layer, width, 0);
  if (hideSinks && bins) {
    map = withoutSinks(map, sinks, rows, width, bins - 1);
    keys = otherKeys;
  }
  const perKey = map.map((weight, i) => weight / Math.max(1, keys[i % width]));
  const largest = perKey.reduce((a, b) => (b > a ? b : a), 0);
  return { map, perKey, rows, width, largest, darkest: darkestWeight(perKey) };
}

// The weight that gets the darkest colour: 99.5% of the cells stay below it. The first row of a causal map is 1, and
// would leave all others pale.
function darkestWeight(map) {
  const sorted = map.filter((weight) => weight > 0).sort();
  if (!sorted.length) return 1;
  return sorted[Math.max(0, sorted.length - 1 - Math.floor(0.005 * map.length))];
}
