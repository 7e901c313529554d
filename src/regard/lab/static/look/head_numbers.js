// Loads the numbers of the selected head, with its scores as they are set, and those of head A of a comparison: several
// parts of the page show them.
import { get } from "../api.js";
import { showMessage } from "../dom.js";
import { pinnedHead, pinnedName } from "./pinned_head.js";
import { currentLayer, HEAD_SETTINGS, requestFields } from "./view_state.js";

export function createHeadNumbersLoader(view) {
  let request = null;

  async function load(changed) {
    request?.abort();
    const layer = currentLayer(view);
    // The numbers of another head must not stay under the name of this one. Those of another β stay for a moment.
    const isSameHead = changed && !["recording", "layerIndex", "head", "batch"].some((name) => changed.has(name));
    if (!isSameHead) view.change({ headNumbers: null });
    if (!layer || view.head === null) return;
    request = new AbortController();
    const { signal } = request;
    try {
      const headNumbers = await get("/api/look/head", requestFields(view), signal);
      if (!signal.aborted) view.change({ headNumbers });
    } catch (error) {
      if (error.name === "AbortError") return;
      view.change({ headNumbers: null });
      showMessage(error.message, "error");
    }
  }

  let pinnedRequest = null;

  async function loadPinned(changed) {
    if (changed && !changed.has("pinned") && view.pinnedNumbers) {
      // Only the name depends on what else is selected.
      const { head, numbers } = view.pinnedNumbers;
      view.change({ pinnedNumbers: { head, numbers, name: pinnedName(head, view) } });
      return;
    }
    pinnedRequest?.abort();
    view.change({ pinnedNumbers: null });
    if (!view.pinned || !view.description) return;
    pinnedRequest = new AbortController();
    const { signal } = pinnedRequest;
    try {
      const head = await pinnedHead(view, signal);
      if (!head) return;
      const numbers = await get("/api/look/head", requestFields(head), signal);
      if (!signal.aborted) view.change({ pinnedNumbers: { head, numbers, name: pinnedName(head, view) } });
    } catch (error) {
      if (error.name !== "AbortError") showMessage(error.message, "error");
    }
  }

  view.on(`${HEAD_SETTINGS} description`, load);
  view.on("pinned description", loadPinned);
  load();
  loadPinned();
  return () => {
    request?.abort();
    pinnedRequest?.abort();
  };
}
