// The lab's descriptions of recordings (layers, heads, texts, head types), each requested once.
import { get } from "../api.js";

const descriptions = new Map(); // id of a recording → promise of its description

export function loadDescription(id, signal) {
  if (!descriptions.has(id)) {
    const response = get("/api/look/recording", { recording: id }, signal);
    descriptions.set(id, response);
    response.catch(() => descriptions.delete(id)); // so that the next call tries again
  }
  return descriptions.get(id);
}

export function forgetDescription(id) {
  descriptions.delete(id);
}
