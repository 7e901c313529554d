// What is looked at: one object for the whole room. Parts change it, the address follows, and the others are told.

const text = { read: (x) => x, write: (x) => x };
const flag = { read: (x) => x === "1", write: (x) => (x ? "1" : "0") };
const whole = { read: (x) => (/^\d{1,9}$/.test(x) ? Number(x) : null), write: String };
// A token, or "off" where a person has let it go.
const token = { read: (x) => (x === "off" ? "off" : whole.read(x)), write: String };
const beta = {
  read: (x) => (x === "inf" ? Infinity : Number.isFinite(Number(x)) && Number(x) >= 0 ? Number(x) : 1),
  write: (x) => (x === Infinity ? "inf" : String(x)),
};
const list = { read: (x) => x.split(",").filter((one) => /^\d+\.\d+$/.test(one)), write: (x) => x.join(",") };
const window_ = {
  read: (x) => {
    const found = x.split(",").map(Number);
    const fine = found.length === 3 && found.every(Number.isFinite) && found[2] >= 1;
    return fine ? { u: found[0], v: found[1], z: found[2] } : { u: 0.5, v: 0.5, z: 1 };
  },
  write: ({ u, v, z }) => (z <= 1.0001 ? "" : [u.toFixed(5), v.toFixed(5), z.toPrecision(5)].join(",")),
};

// name → [how it is written, what it is where the address does not say]
const FIELDS = {
  recording: [text, ""], model: [text, ""], place: [whole, null], head: [whole, null], batch: [whole, 0],
  row: [token, null], key: [token, null], direction: [text, "from"], reading: [text, "text"],
  beta: [beta, 1], mask: [flag, true], position: [flag, true],
  sort: [text, ""], ascending: [flag, false], kind: [text, ""], hide: [flag, false],
  at: [window_, { u: 0.5, v: 0.5, z: 1 }], pinned: [text, ""], ablated: [list, []], by: [text, "zero"], input: [flag, false],
};

// `isHere`: whether the room is still open; the address of another is not written to.
export function makeView(state, isHere) {
  const watchers = new Set();
  const view = { hover: null, found: null };

  function load() {
    for (const [name, [kind, otherwise]] of Object.entries(FIELDS)) {
      const given = state.get(name, null);
      view[name] = given === null ? otherwise : kind.read(given) ?? otherwise;
    }
  }

  // Browsers refuse an address that changes many times a second, as a wheel would make it.
  let waiting = {};
  let timer = 0;

  function flush() {
    clearTimeout(timer);
    if (Object.keys(waiting).length && isHere()) state.set(waiting);
    waiting = {};
  }

  function store(changed, step) {
    const fields = {};
    for (const name of changed) {
      if (!FIELDS[name]) continue;
      const [kind, otherwise] = FIELDS[name];
      const written = view[name] === null ? "" : kind.write(view[name]);
      fields[name] = otherwise !== null && written === kind.write(otherwise) ? "" : written;
    }
    if (!Object.keys(fields).length) return;
    if (step) {
      flush();
      state.push(fields);
    } else {
      Object.assign(waiting, fields);
      clearTimeout(timer);
      timer = setTimeout(flush, 120);
    }
  }

  // Only what is really another value is told. `step`: the back button comes back to what was before.
  view.change = (given, step = false) => {
    const changed = new Set(Object.keys(given).filter((name) => view[name] !== given[name]));
    if (!changed.size) return;
    for (const name of changed) view[name] = given[name];
    store(changed, step);
    for (const [names, call] of [...watchers]) if (names.some((name) => changed.has(name))) call(changed);
  };
  // Call when one of the names changes, e.g. on("place head", …).
  view.on = (names, call) => {
    const watcher = [names.split(" "), call];
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  };
  // The room is left: its fields are no other room's.
  view.close = () => {
    clearTimeout(timer);
    waiting = {};
    watchers.clear();
  };
  view.reload = () => {
    const before = { ...view };
    view.reloading = true;
    clearTimeout(timer);
    waiting = {};
    load();
    const changed = new Set(Object.keys(FIELDS).filter((name) => before[name] !== view[name]));
    for (const [names, call] of [...watchers]) if (names.some((name) => changed.has(name))) call(changed);
    view.reloading = false;
  };
  load();
  return view;
}

// The place that is looked at; null while another recording is on its way.
export function placeOf(view) {
  if (view.found?.id !== view.recording) return null;
  return view.found?.places.find((place) => place.place === view.place) ?? null;
}

// The head's number within its place, as numbers and maps count it.
export function indexOf(place, head) {
  return place.heads.indexOf(head);
}

export function changedScores({ beta, mask, position }) {
  return beta !== 1 || !mask || !position;
}

// The fields of a request that name the head and how its scores are made.
export function asked({ recording, place, head, batch, beta, mask, position }) {
  const fields = { recording, place, head, batch };
  if (beta === Infinity) fields.hard = true;
  else if (beta !== 1) fields.beta = beta;
  if (!mask) fields.mask = false;
  if (!position) fields.position = false;
  return fields;
}

export const SCORES = "recording place head batch beta mask position";

// The locked token, or null.
export function locked(view, which) {
  const place = placeOf(view);
  const at = view[which];
  if (!place || typeof at !== "number") return null;
  return at < (which === "row" ? place.n : place.m) ? at : null;
}
