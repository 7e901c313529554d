// The words of a recording's tokens, as they are shown.

// What cannot be seen otherwise.
export function written(word) {
  return word.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// The words at a place's queries ("queries") or keys ("keys"); null where the recording has none.
export function wordsOf(found, place, which) {
  return place[which] === null || place[which] === undefined ? null : found.texts[place[which]] ?? null;
}

// Which tokens are patches of a picture: those after the first `before`.
export function before(place) {
  return place.n - place.grid[0] * place.grid[1];
}

// One token in a few letters: its word, its place in the picture, or nothing.
export function word(found, place, which, i) {
  if (place.grid && i >= before(place)) {
    const patch = i - before(place);
    return `${Math.floor(patch / place.grid[1])},${patch % place.grid[1]}`;
  }
  const words = wordsOf(found, place, which);
  return words?.[i] === undefined ? "" : written(words[i]).trim() || "␣";
}

// One token for a sentence: “word” 12.
export function named(found, place, which, i) {
  const shown = word(found, place, which, i);
  if (!shown) return String(i);
  return place.grid && i >= before(place) ? `patch ${shown}` : `“${shown}” ${i}`;
}

// Queries and keys are the same tokens.
export function isSelf(place) {
  return place.n === place.m && place.queries === place.keys;
}

export function headName(place, head) {
  const name = place.name || place.path || "model";
  return `${/^\d+$/.test(name) ? `layer ${name}` : name} · head ${head}`;
}
