// Numbers of a recording: unpacked as they were packed (see watching/page.py), and thumbnails' maps made of them.

const SMALLEST_REST = 1e-3; // a row that gives less than this to other keys than its sinks has nothing left to show

function codes(packed, head) {
  if (!packed.codes) {
    const text = atob(packed.data);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    packed.codes = new { 8: Uint8Array, 16: Uint16Array, 32: Uint32Array }[packed.bits](bytes.buffer);
    packed.data = ""; // its letters would stay in memory beside the numbers
  }
  const size = packed.shape.slice(1).reduce((a, b) => a * b, 1);
  return packed.codes.subarray(head * size, (head + 1) * size);
}

export function unpacked(packed, head) {
  const largest = 2 ** packed.bits - 1;
  const found = Float32Array.from(codes(packed, head));
  for (let i = 0; i < found.length; i++) found[i] = packed.scale[head] * (found[i] / largest) ** packed.power;
  return found;
}

// A head's pooled map as it is drawn small, with or without what the first keys took: NaN where a row shows nothing.
export function headMap(place, head, hide) {
  if (!place.map) return null;
  const [, rows, width] = place.map.shape;
  const values = unpacked(place.map, head);
  const taken = new Float32Array(rows);
  if (place.share) {
    const bins = place.share.shape[2];
    const share = unpacked(place.share, head);
    for (let i = 0; i < rows; i++) {
      for (let j = 0; j < bins; j++) {
        taken[i] += share[i * bins + j];
        if (!hide) values[i * width + j] += share[i * bins + j];
      }
    }
  }
  for (let i = 0; i < rows; i++) {
    const row = values.subarray(i * width, (i + 1) * width);
    if (hide) {
      const rest = 1 - taken[i];
      for (let j = 0; j < width; j++) row[j] = rest < SMALLEST_REST ? NaN : Math.min(1, row[j] / rest);
    } else if (row.every((x) => x === 0)) {
      row.fill(NaN);
    }
  }
  return { values, rows, width, darkest: darkest(values) };
}

// Where the strongest half per cent of cells starts: a causal map's first row is 1 and would leave all else pale.
function darkest(values) {
  const sorted = values.filter((x) => x > 0).sort();
  if (!sorted.length) return 1;
  return sorted[Math.max(0, sorted.length - 1 - Math.floor(0.005 * values.length))];
}
