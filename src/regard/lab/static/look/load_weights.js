// The weights of one query on all keys ("from"), or of all queries on one key ("to"), with a small cache.
import { getFloats } from "../api.js";
import { requestFields } from "./view_state.js";

const CACHE_SIZE = 64;
const cache = new Map(); // the least recently used first

function cacheKey(settings, direction, index) {
  return JSON.stringify({ ...requestFields(settings), direction, row: index });
}

export function cachedWeights(settings, direction, index) {
  return cache.get(cacheKey(settings, direction, index)) ?? null;
}

export async function loadWeights(settings, direction, index, signal) {
  const key = cacheKey(settings, direction, index);
  const cached = cache.get(key);
  if (cached) {
    cache.delete(key);
    cache.set(key, cached);
    return cached;
  }
  const { values } = await getFloats("/api/look/row", { ...requestFields(settings), direction, row: index }, signal);
  cache.set(key, values);
  while (cache.size > CACHE_SIZE) cache.delete(cache.keys().next().value);
  return values;
}

// The largest `count` weights as [{ index, weight }], the largest first.
export function strongest(values, count) {
  const largest = [];
  for (let index = 0; index < values.length; index++) {
    const weight = values[index];
    if (!(weight > 0)) continue;
    if (largest.length === count && weight <= largest.at(-1).weight) continue;
    let rank = largest.length;
    while (rank > 0 && largest[rank - 1].weight < weight) rank--;
    largest.splice(rank, 0, { index, weight });
    if (largest.length > count) largest.pop();
  }
  return largest;
}

// A weight with six digits: enough to compare it with the result of another program.
export function formatWeight(weight) {
  if (weight === 0) return "0";
  const digits = Math.abs(weight) >= 1e-4 ? weight.toFixed(6) : weight.toExponential(3);
  return digits.replaceAll("-", "−");
}
