// Head types: their meanings, their colours, and the types of a head.
import { HEAD_TYPE_COLOURS } from "../colour.js";

export const HEAD_TYPES = Object.keys(HEAD_TYPE_COLOURS);

export const MEANINGS = {
  sink: "puts most of its weight on the first token or on special tokens",
  previous: "attends to the token before the query",
  positional: "its largest weight is always at the same offset",
  convolution: "its weights depend almost only on the offset",
  averaging: "has nearly uniform weights",
  induction: "attends to the token after an earlier occurrence of the present token",
  duplicate: "attends to earlier occurrences of the present token",
  content: "neither position nor averaging explains its weights",
};

// The types of a head with their confidence; null if they are not known.
export function typesOf(description, path, head) {
  return description.kinds?.find((entry) => entry.path === path && entry.head === head) ?? null;
}

// How many heads have each type. A head with several types counts for each of them.
export function countTypes(labelsOfHeads) {
  const counts = Object.fromEntries(HEAD_TYPES.map((type) => [type, 0]));
  for (const labels of labelsOfHeads) {
    for (const type of labels) counts[type] = (counts[type] ?? 0) + 1;
  }
  return counts;
}

// The colour of a head: that of its most confident type, or, if the user has chosen a type, that of this type, the
// paler the lower the confidence.
export function headFrameColour(types, chosenType) {
  if (!types) return "transparent";
  if (!chosenType) return types.labels.length ? typeColour(types.labels[0]) : "transparent";
  const percent = Math.round(100 * (types.confidence[chosenType] ?? 0));
  return `color-mix(in srgb, ${typeColour(chosenType)} ${percent}%, transparent)`;
}

export function typeColour(type) {
  return HEAD_TYPE_COLOURS[type] ?? "var(--rule)";
}
