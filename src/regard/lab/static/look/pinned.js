// Head A of a comparison: any head of any recording, with its own way of making scores, as one field of the address.
import { get } from "../api.js";
import { changedScores } from "./view.js";
import { headName } from "./words.js";

const recordings = new Map(); // id → what the lab says of it, asked for once

export function recordingOf(id, signal) {
  if (!recordings.has(id)) {
    const asking = get("/api/look/recording", { recording: id }, signal);
    recordings.set(id, asking);
    asking.catch(() => recordings.delete(id));
  }
  return recordings.get(id);
}

export function forget(id) {
  recordings.delete(id);
}

export function pin(view) {
  const beta = view.beta === Infinity ? "inf" : view.beta;
  return [view.recording, view.place, view.head, view.batch, beta, Number(view.mask), Number(view.position)].join("~");
}

// What the field names, with its recording and place; null where nothing is pinned or it is no more.
export async function pinned(view, signal) {
  const [recording, place, head, batch, beta, mask, position] = view.pinned.split("~");
  if (position === undefined) return null;
  const found = recording === view.recording ? view.found : await recordingOf(recording, signal).catch(() => null);
  const at = found?.places.find((one) => one.place === Number(place));
  if (!at || !at.heads.includes(Number(head))) return null;
  return {
    recording, place: at.place, head: Number(head), batch: Number(batch) || 0, found, at,
    beta: beta === "inf" ? Infinity : Number(beta), mask: mask === "1", position: position === "1",
  };
}

export function scoresSaid({ beta, mask, position }) {
  const parts = [];
  if (beta !== 1) parts.push(`β ${beta === Infinity ? "∞" : beta}`);
  if (!mask) parts.push("no mask");
  if (!position) parts.push("no position");
  return parts.join(", ");
}

export function pinnedName(a, view) {
  const other = a.recording === view.recording ? "" : ` of ${a.found.title}`;
  const changed = changedScores(a) ? ` (${scoresSaid(a)})` : "";
  return `${headName(a.at, a.head)}${other}${changed}`;
}
