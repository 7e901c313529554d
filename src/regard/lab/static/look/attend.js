// The token that is asked about, locked or under the pointer, and its weights: one question, which all views answer.
import { note, settled } from "../dom.js";
import { known, strongest, weights } from "./rows.js";
import { locked, placeOf, SCORES } from "./view.js";

export function makeAttend(view) {
  let asking = null;

  // Direction "from" asks a query where it looks, "to" asks a key who looks at it.
  const which = () => (view.direction === "from" ? "row" : "key");
  const other = () => (view.direction === "from" ? "key" : "row");

  function at() {
    const place = placeOf(view);
    const total = view.direction === "from" ? place.n : place.m;
    const hovered = view.hover?.[which()];
    return typeof hovered === "number" && hovered < total ? hovered : locked(view, which());
  }

  // A first token to ask about: the last, which has seen the most. null where it had to be set.
  function ready() {
    const place = placeOf(view);
    if (!place || !place.kept || view.head === null) return false;
    const fix = {};
    for (const [name, total] of [["row", place.n], ["key", place.m]]) {
      if (typeof view[name] === "number" && view[name] >= total) fix[name] = null;
    }
    if (view[which()] === null || fix[which()] === null) {
      fix[which()] = view.direction === "from" ? place.n - 1 : 0;
    }
    if (!Object.keys(fix).length) return true;
    view.change(fix); // which asks again
    return null;
  }

  async function ask() {
    asking?.abort();
    const fine = ready();
    if (fine === null) return;
    if (!fine) return view.change({ weights: null });
    const here = at();
    if (here === null) return view.change({ weights: null });
    const { signal } = (asking = new AbortController());
    const { direction } = view;
    const preview = here !== locked(view, which());
    try {
      const values = await weights(view, direction, here, signal);
      if (signal.aborted) return;
      view.change({ weights: { direction, at: here, values: shown(values, here), preview } });
      if (!preview && view[other()] === null) view.change({ [other()]: partner(values) });
    } catch (error) {
      if (error.name === "AbortError") return;
      view.change({ weights: null });
      note(error.message, "error");
    }
  }

  // With sinks hidden the first keys take nothing.
  function shown(values, here) {
    const { sink } = placeOf(view);
    if (!view.hide) return values;
    return view.direction === "from" ? values.map((x, i) => (i < sink ? 0 : x)) : here < sink ? values.map(() => 0) : values;
  }

  // The strongest key that is no sink, where there is one.
  function partner(values) {
    const first = view.direction === "from" ? placeOf(view).sink : 0;
    const found = strongest(values, first + 1);
    return (found.find(({ at }) => at >= first) ?? found[0])?.at ?? null;
  }

  const later = settled(ask, 35);
  const hovered = () => {
    const here = placeOf(view) && at();
    if (here !== null && known(view, view.direction, here)) ask();
    else later();
  };
  view.on(`${SCORES} found row key direction hide`, ask);
  view.on("hover", hovered);
  ask();

  // Ask about a token, or let it go.
  view.lock = (token) => view.change(token === null ? { row: "off", key: "off", hover: null } : { [which()]: token, [other()]: null });
  return () => asking?.abort();
}
