// The labels of tokens, layers and heads.
import { visibleText } from "../shared.js";

// The texts of the tokens of a side ("queries" or "keys"); null if the recording has none.
export function tokenTexts(description, layer, side) {
  const index = layer[side];
  if (index === null || index === undefined) return null;
  return description.texts[index] ?? null;
}

// How many tokens come before the patches of an image, for example a class token.
export function tokensBeforePatches(layer) {
  return layer.n - layer.grid[0] * layer.grid[1];
}

function isPatch(layer, index) {
  return Boolean(layer.grid) && index >= tokensBeforePatches(layer);
}

// A short label: the token's text, the row and column of its patch, or nothing.
export function shortLabel(description, layer, side, index) {
  if (isPatch(layer, index)) {
    const patch = index - tokensBeforePatches(layer);
    const columns = layer.grid[1];
    return `${Math.floor(patch / columns)},${patch % columns}`;
  }
  const text = tokenTexts(description, layer, side)?.[index];
  if (text === undefined && layer.grid) return tokensBeforePatches(layer) === 1 ? "class" : `extra ${index}`;
  if (text === undefined) return "";
  return visibleText(text).trim() || "␣";
}

// The text of a token in quotation marks. A space before the word is part of the token, so it is written: “The” and
// “ The” are two tokens. The line must not break at this space.
export function quotedLabel(description, layer, side, index) {
  const label = shortLabel(description, layer, side, index);
  const text = tokenTexts(description, layer, side)?.[index] ?? "";
  const space = text.startsWith(" ") && text.trim() ? "\u00a0" : "";
  return `“${space}${label}”`;
}

// A label for a sentence: “word” 12.
export function longLabel(description, layer, side, index) {
  const label = shortLabel(description, layer, side, index);
  if (!label) return String(index);
  if (isPatch(layer, index)) return `patch ${label}`;
  if (layer.grid && !tokenTexts(description, layer, side)) return `${label} token`;
  return `${quotedLabel(description, layer, side, index)} ${index}`;
}

// Whether queries and keys are the same tokens.
export function isSelfAttention(layer) {
  return layer.n === layer.m && layer.queries === layer.keys;
}

export function layerName(layer) {
  return layer.name || layer.path || "model";
}

export function headName(layer, head) {
  const name = layerName(layer);
  const prefix = /^\d+$/.test(name) ? "layer " : "";
  return `${prefix}${name} · head ${head}`;
}
