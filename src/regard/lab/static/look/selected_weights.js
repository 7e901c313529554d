// Loads the weights of the selected token, locked or under the pointer, which all parts of the page show.
import { debounce, showMessage } from "../dom.js";
import { currentLayer, HEAD_SETTINGS, lockedToken, otherField, selectedField } from "./view_state.js";
import { cachedWeights, loadWeights, strongest } from "./load_weights.js";

export function createWeightLoader(view) {
  let request = null;

  // The token under the pointer, or the locked one.
  function selectedToken() {
    const layer = currentLayer(view);
    const count = view.direction === "from" ? layer.n : layer.m;
    const hovered = view.hover?.[selectedField(view)];
    if (typeof hovered === "number" && hovered < count) return hovered;
    return lockedToken(view, selectedField(view));
  }

  // At first the last query is locked, because it sees the most keys. Returns false if the view had to be changed.
  function ensureLockedToken(layer) {
    const fixed = {};
    for (const [name, count] of [["row", layer.n], ["key", layer.m]]) {
      if (typeof view[name] === "number" && view[name] >= count) fixed[name] = null;
    }
    const name = selectedField(view);
    if (view[name] === null || fixed[name] === null) fixed[name] = view.direction === "from" ? layer.n - 1 : 0;
    if (!Object.keys(fixed).length) return true;
    view.change(fixed); // this calls `load` again
    return false;
  }

  async function load() {
    request?.abort();
    const layer = currentLayer(view);
    if (!layer || !layer.kept || view.head === null) {
      view.change({ weights: null });
      return;
    }
    if (!ensureLockedToken(layer)) return;
    const index = selectedToken();
    if (index === null) {
      view.change({ weights: null });
      return;
    }

    request = new AbortController();
    const { signal } = request;
    const { direction } = view;
    const preview = index !== lockedToken(view, selectedField(view));
    try {
      const values = await loadWeights(view, direction, index, signal);
      if (signal.aborted) return;
      view.change({ weights: { direction, index, values: withoutSinks(values, index), preview } });
      const other = otherField(view);
      if (!preview && view[other] === null) view.change({ [other]: strongestPartner(values) });
    } catch (error) {
      if (error.name === "AbortError") return;
      view.change({ weights: null });
      showMessage(error.message, "error");
    }
  }

  // If sinks are hidden, the weights on the first keys are shown as 0.
  function withoutSinks(values, index) {
    if (!view.hideSinks) return values;
    const { sink } = currentLayer(view);
    if (view.direction === "from") return values.map((weight, key) => (key < sink ? 0 : weight));
    return index < sink ? values.map(() => 0) : values;
  }

  // The token with the largest weight. A key that is not a sink is preferred.
  function strongestPartner(values) {
    const first = view.direction === "from" ? currentLayer(view).sink : 0;
    const candidates = strongest(values, first + 1);
    const partner = candidates.find(({ index }) => index >= first) ?? candidates[0];
    return partner?.index ?? null;
  }

  // Weights that are in the cache are shown at once. Others are requested only if the pointer stays for a moment.
  const loadLater = debounce(load, 35);
  function loadHovered() {
    const index = currentLayer(view) && selectedToken();
    if (index !== null && cachedWeights(view, view.direction, index)) load();
    else loadLater();
  }

  view.on(`${HEAD_SETTINGS} description row key direction hideSinks`, load);
  view.on("hover", loadHovered);
  load();

  // Lock a token; null releases both tokens.
  view.lock = (index) => {
    if (index === null) view.change({ row: "off", key: "off", hover: null });
    else view.change({ [selectedField(view)]: index, [otherField(view)]: null });
  };
  return () => request?.abort();
}
