// Weights along one query's keys ("from"), or of all queries on one key ("to"): the last few dozen are kept.
import { floats } from "../api.js";
import { asked } from "./view.js";

const KEPT = 64;
const kept = new Map();

function keyOf(view, direction, row) {
  return JSON.stringify({ ...asked(view), direction, row });
}

export function known(view, direction, row) {
  return kept.get(keyOf(view, direction, row)) ?? null;
}

export async function weights(view, direction, row, signal) {
  const key = keyOf(view, direction, row);
  const there = kept.get(key);
  if (there) {
    kept.delete(key);
    kept.set(key, there);
    return there;
  }
  const { values } = await floats("/api/look/row", { ...asked(view), direction, row }, signal);
  kept.set(key, values);
  while (kept.size > KEPT) kept.delete(kept.keys().next().value);
  return values;
}

// The strongest of them, as [{at, weight}], strongest first.
export function strongest(values, most) {
  const found = [];
  for (let at = 0; at < values.length; at++) {
    const weight = values[at];
    if (!(weight > 0) || (found.length === most && weight <= found.at(-1).weight)) continue;
    let i = found.length;
    while (i > 0 && found[i - 1].weight < weight) i--;
    found.splice(i, 0, { at, weight });
    if (found.length > most) found.pop();
  }
  return found;
}
