// The numbers of the page and what is computed from them. Nothing here draws.

const data = JSON.parse(document.getElementById("data").textContent);
const columns = Object.keys(data.columns);
const ARRAYS = ["map", "share", "line", "rest", "list_keys", "top", "profile", "counted"];
const FIRST_CHARACTER = 32; // base 91 uses the printable characters without these four
const UNUSED_CHARACTERS = '<&"\\';

// The compressed block of arrays: two characters are 13 bits, the low bits first.
function blockBytes(text, length) {
  const digits = new Uint8Array(128);
  let digit = 0;
  for (let code = FIRST_CHARACTER; code < 127; code++) {
    if (!UNUSED_CHARACTERS.includes(String.fromCharCode(code))) digits[code] = digit++;
  }
  const bytes = new Uint8Array(length);
  let bits = 0;
  let count = 0;
  let end = 0;
  for (let i = 0; i + 1 < text.length && end < length; i += 2) {
    bits |= (digits[text.charCodeAt(i)] + 91 * digits[text.charCodeAt(i + 1)]) << count;
    count += 13;
    for (; count >= 8 && end < length; count -= 8) {
      bytes[end++] = bits & 255;
      bits >>>= 8;
    }
  }
  if (end < length) bytes[end] = bits & 255;
  return bytes;
}

// Inflate the block, and give every array its bytes.
async function loadArrays() {
  const box = document.getElementById("arrays");
  const packed = blockBytes(box.textContent, data.bytes);
  box.remove(); // the text would stay in memory beside the numbers
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
  for (const layer of data.places) {
    for (const name of ARRAYS) {
      const array = layer[name];
      if (!array) continue;
      const size = array.shape.reduce((a, b) => a * b, 1) * integerArray(array.bits).BYTES_PER_ELEMENT;
      array.bytes = bytes.subarray(array.start, array.start + size);
    }
  }
}

function isCounted(layer, head, i) {
  if (!layer.counted) return true;
  const bits = codes(layer.counted, layer.counted.shape[0] === 1 ? 0 : head);
  return ((bits[i >> 3] >> (7 - (i & 7))) & 1) === 1;
}

// The weight of a row outside of its first keys.
function restOfRow(layer, head, i) {
  return layer.rest ? value(layer.rest, head, i - layer.first) : 1;
}

// The keys of all lists of a head, [k × R]; they are stored as distances.
function listKeys(layer, head) {
  layer.decodedKeys ??= new Map();
  if (!layer.decodedKeys.has(head)) {
    const [, k, rows] = layer.list_keys.shape;
    const keys = Uint32Array.from(codes(layer.list_keys, head));
    const mask = layer.list_keys.bits === 16 ? 0xffff : 0xffffffff;
    for (let row = 0; row < rows; row++) keys[row] = ((layer.first + row - keys[row]) & mask) >>> 0;
    for (let i = rows; i < k * rows; i++) keys[i] = keys[i - rows] - keys[i];
    layer.decodedKeys.set(head, keys);
  }
  return layer.decodedKeys.get(head);
}

// The list of query i as [{index, weight, error}], in the order of the file. Codes are square roots, so the largest
// error of a weight grows with its square root.
function listOf(layer, head, i) {
  const [, k, rows] = layer.top.shape;
  const keys = listKeys(layer, head);
  const largest = 2 ** layer.top.bits - 1;
  const list = [];
  for (let t = i - layer.first; t < k * rows; t += rows) {
    const weight = value(layer.top, head, t);
    if (weight > 0) list.push({ index: keys[t], weight, error: Math.sqrt(weight) / largest });
  }
  // A single first key is not in the lists, because its weight is known from the rest.
  const rest = restOfRow(layer, head, i);
  if (layer.sink === 1 && layer.rest && list.length < k && rest < 1) {
    list.push({ index: 0, weight: 1 - rest, error: restError(layer, rest) });
  }
  return list;
}

function restError(layer, rest) {
  return layer.rest ? Math.sqrt(rest) / (2 ** layer.rest.bits - 1) : 0;
}

// The list of query i, strongest first; without its sinks, as shares of the rest. Null if it is not in the page.
function keysOf(layer, head, i, hideSinks) {
  if (!layer.top || i < layer.first) return null;
  let list = listOf(layer, head, i);
  if (hideSinks) list = withoutFirstKeys(list, layer, restOfRow(layer, head, i));
  return list.sort((a, b) => b.weight - a.weight || a.index - b.index);
}

function withoutFirstKeys(list, layer, rest) {
  if (rest < SMALLEST_REST) return [];
  const others = list.filter(({ index }) => index >= layer.sink);
  return others.map(({ index, weight, error }) => ({
    index,
    weight: Math.min(1, weight / rest),
    error: (error + (weight / rest) * restError(layer, rest)) / rest,
  }));
}

// The queries that have key j among their strongest keys, strongest first.
function queriesOf(layer, head, j, hideSinks) {
  if (!layer.top) return null;
  const queries = [];
  for (let i = layer.first; i < layer.n; i++) {
    const entry = keysOf(layer, head, i, hideSinks).find(({ index }) => index === j);
    if (entry) queries.push({ ...entry, index: i });
  }
  return queries.sort((a, b) => b.weight - a.weight);
}

// A weight in a list with the decimals that the page knows, one to four; the last one may be off by one.
function formatWeight({ weight, error }) {
  const decimals = Math.floor(-Math.log10(error));
  return weight.toFixed(Math.min(4, Math.max(1, decimals)));
}
