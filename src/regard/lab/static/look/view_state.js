// The state of the Look page, in one object. The parts of the page change it; then the address is updated and the other
// parts are notified.

const WHOLE_MAP = { u: 0.5, v: 0.5, z: 1 };

// How a field is read from the address and written to it.
const text = {
  read: (value) => value,
  write: (value) => value,
};
const flag = {
  read: (value) => value === "1",
  write: (value) => (value ? "1" : "0"),
};
const integer = {
  read: (value) => (/^\d{1,9}$/.test(value) ? Number(value) : null),
  write: String,
};
// The index of a token, or "off" after the user has released it.
const token = {
  read: (value) => (value === "off" ? "off" : integer.read(value)),
  write: String,
};
const beta = {
  read(value) {
    if (value === "inf") return Infinity;
    const factor = Number(value);
    return Number.isFinite(factor) && factor >= 0 ? factor : 1;
  },
  write: (value) => (value === Infinity ? "inf" : String(value)),
};
const headIds = {
  read: (value) => value.split(",").filter((id) => /^\d+\.\d+$/.test(id)),
  write: (value) => value.join(","),
};
const mapWindow = {
  read(value) {
    const [u, v, z] = value.split(",").map(Number);
    return [u, v, z].every(Number.isFinite) && z >= 1 ? { u, v, z } : WHOLE_MAP;
  },
  write({ u, v, z }) {
    if (z <= 1.0001) return "";
    return [u.toFixed(5), v.toFixed(5), z.toPrecision(5)].join(",");
  },
};

const field = (address, format, initial) => ({ address, format, initial });

// Each field: its name in the address, its format there, and its value if the address does not contain it.
const FIELDS = {
  recording: field("recording", text, ""),
  model: field("model", text, ""),
  layerIndex: field("place", integer, null),
  head: field("head", integer, null),
  batch: field("batch", integer, 0),
  row: field("row", token, null), // the locked query
  key: field("key", token, null), // the locked key
  direction: field("direction", text, "from"), // "from": weights of one query; "to": weights on one key
  display: field("reading", text, "text"),
  beta: field("beta", beta, 1),
  mask: field("mask", flag, true),
  position: field("position", flag, true),
  sort: field("sort", text, ""),
  ascending: field("ascending", flag, false),
  headType: field("kind", text, ""), // only heads of this type are shown
  colourBy: field("colour", text, ""), // a head type whose confidence colours the heads; "": the most confident type
  hideSinks: field("hide", flag, false),
  window: field("at", mapWindow, WHOLE_MAP),
  pinned: field("pinned", text, ""), // head A of a comparison
  ablated: field("ablated", headIds, []),
  replacement: field("by", text, "zero"),
  inputOpen: field("input", flag, true),
};

export function createView(state) {
  const listeners = new Set();
  // Fields that are not in the address: `description` is what the lab knows about the recording.
  // `headNumbers` are the numbers of the selected head, with its scores as they are set; `pinnedNumbers` has the name,
  // the settings and the numbers of head A of a comparison.
  const view = { hover: null, description: null, weights: null, headNumbers: null, pinnedNumbers: null };

  function load() {
    for (const [name, { address, format, initial }] of Object.entries(FIELDS)) {
      const value = state.get(address, null);
      view[name] = value === null ? initial : format.read(value) ?? initial;
    }
  }

  function notify(changed) {
    for (const { names, call } of [...listeners]) {
      if (names.some((name) => changed.has(name))) call(changed);
    }
  }

  // Browsers refuse an address that changes many times per second, as a mouse wheel would change it.
  let waiting = {};
  let timer = 0;

  function flush() {
    clearTimeout(timer);
    if (Object.keys(waiting).length) state.set(waiting);
    waiting = {};
  }

  function store(changed, historyEntry) {
    const fields = {};
    for (const name of changed) {
      if (!FIELDS[name]) continue;
      const { address, format, initial } = FIELDS[name];
      const written = view[name] === null ? "" : format.write(view[name]);
      const isInitial = initial !== null && written === format.write(initial);
      fields[address] = isInitial ? "" : written;
    }
    if (!Object.keys(fields).length) return;
    if (historyEntry) {
      flush();
      state.push(fields);
    } else {
      Object.assign(waiting, fields);
      clearTimeout(timer);
      timer = setTimeout(flush, 120);
    }
  }

  // Set fields, and notify the listeners of those that really changed. With `historyEntry` the back button undoes it.
  view.change = (values, historyEntry = false) => {
    const changed = new Set(Object.keys(values).filter((name) => view[name] !== values[name]));
    if (!changed.size) return;
    for (const name of changed) view[name] = values[name];
    store(changed, historyEntry);
    notify(changed);
  };

  // Call `call` when one of the fields changes, for example on("layerIndex head", …).
  view.on = (names, call) => {
    const listener = { names: names.split(" "), call };
    listeners.add(listener);
    return () => listeners.delete(listener);
  };

  // The page is left: its fields must not be written to the address of another page.
  view.close = () => {
    clearTimeout(timer);
    waiting = {};
    listeners.clear();
  };

  // Read the address again, after the back button.
  view.reload = () => {
    const before = { ...view };
    view.reloading = true;
    clearTimeout(timer);
    waiting = {};
    load();
    notify(new Set(Object.keys(FIELDS).filter((name) => before[name] !== view[name])));
    view.reloading = false;
  };

  load();
  return view;
}

export function wholeMap() {
  return { ...WHOLE_MAP };
}

// The selected layer; null while another recording is loading.
export function currentLayer(view) {
  if (!view.description || view.description.id !== view.recording) return null;
  return view.description.places.find((layer) => layer.place === view.layerIndex) ?? null;
}

// Select a head ("layer.head") for ablation, or keep it if it is selected.
export function toggleAblation(view, id) {
  const others = view.ablated.filter((ablated) => ablated !== id);
  view.change({ ablated: others.length < view.ablated.length ? others : [...view.ablated, id] });
}

// The index of a head among the recorded heads of its layer, which need not be all.
export function headIndex(layer, head) {
  return layer.heads.indexOf(head);
}

// What one head is selected by: its recording, layer and batch entry, and how its scores are computed.
export function headSettings({ recording, layerIndex, head, batch, beta, mask, position }) {
  return { recording, layerIndex, head, batch, beta, mask, position };
}

// The names of these fields, for `view.on`.
export const HEAD_SETTINGS = "recording layerIndex head batch beta mask position";

export function scoresChanged({ beta, mask, position }) {
  return beta !== 1 || !mask || !position;
}

// How the scores differ from the trained ones, in words; empty if they do not. The field `beta` is a factor on the
// trained scale, and β is the scale itself: both are 0 or ∞ together.
export function scoreText({ beta, mask, position }) {
  const parts = [];
  if (beta === 0) parts.push("β 0");
  else if (beta === Infinity) parts.push("β ∞");
  else if (beta !== 1) parts.push(`β ${beta} × trained`);
  if (!mask) parts.push("no mask");
  if (!position) parts.push("no position");
  return parts.join(", ");
}

// The fields of a request for one head.
export function requestFields({ recording, layerIndex, head, batch, beta, mask, position }) {
  const fields = { recording, place: layerIndex, head, batch };
  if (beta === Infinity) fields.hard = true;
  else if (beta !== 1) fields.beta = beta;
  if (!mask) fields.mask = false;
  if (!position) fields.position = false;
  return fields;
}

// The field of the token whose weights are shown ("row" or "key"), and the field of the tokens that have the weights.
export function selectedField(view) {
  return view.direction === "from" ? "row" : "key";
}

export function otherField(view) {
  return view.direction === "from" ? "key" : "row";
}

// The sides of the map that these fields belong to.
export function selectedSide(view) {
  return view.direction === "from" ? "queries" : "keys";
}

export function otherSide(view) {
  return view.direction === "from" ? "keys" : "queries";
}

// The index of the locked token of a field ("row" or "key"), or null.
export function lockedToken(view, name) {
  const layer = currentLayer(view);
  const index = view[name];
  if (!layer || typeof index !== "number") return null;
  const count = name === "row" ? layer.n : layer.m;
  return index < count ? index : null;
}
