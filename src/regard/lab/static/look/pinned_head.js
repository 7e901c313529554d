// Head A of a comparison: any head of any recording, with its own score settings. It is one field of the address.
import { loadDescription } from "./recording_cache.js";
import { headName } from "./token_labels.js";
import { scoresChanged, scoreText } from "./view_state.js";

// The selected head as a field of the address.
export function pinnedField(view) {
  const { recording, layerIndex, head, batch } = view;
  const beta = view.beta === Infinity ? "inf" : view.beta;
  return [recording, layerIndex, head, batch, beta, Number(view.mask), Number(view.position)].join("~");
}

// The pinned head with its settings, its layer and the description of its recording. Returns null if no head is pinned
// or its recording is closed.
export async function pinnedHead(view, signal) {
  const [recording, layerIndex, head, batch, beta, mask, position] = view.pinned.split("~");
  if (position === undefined) return null;
  let { description } = view;
  if (recording !== view.recording) description = await loadDescription(recording, signal).catch(() => null);
  const layer = description?.places.find((candidate) => candidate.place === Number(layerIndex));
  if (!layer || !layer.heads.includes(Number(head))) return null;
  return {
    recording,
    layerIndex: layer.place,
    head: Number(head),
    batch: Number(batch) || 0,
    beta: beta === "inf" ? Infinity : Number(beta),
    mask: mask === "1",
    position: position === "1",
    layer,
    description,
  };
}

export function pinnedName(head, view) {
  let name = headName(head.layer, head.head);
  if (head.recording !== view.recording) name += ` of ${head.description.title}`;
  if (scoresChanged(head)) name += ` (${scoreText(head)})`;
  return name;
}
