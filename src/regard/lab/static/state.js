// What is looked at, in the address: a link, a reload and the back button bring it back.
const leaving = new Set();
const changed = new Set();
let fields = read();

function read() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

function address() {
  const search = new URLSearchParams(Object.entries(fields).filter(([, value]) => value !== ""));
  return search.size ? `?${search}` : location.pathname;
}

export const state = {
  get(name, otherwise = "") {
    return fields[name] ?? otherwise;
  },
  number(name, otherwise) {
    const value = Number(fields[name]);
    return fields[name] === undefined || !Number.isFinite(value) ? otherwise : value;
  },
  // A small change: the address follows, without a step for the back button. null or "" takes a field away.
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") delete fields[name];
      else fields[name] = String(value);
    }
    history.replaceState(null, "", address());
  },
  // A step that the back button takes back.
  push(values) {
    history.pushState(null, "", address());
    this.set(values);
  },
  // To another room: what was looked at here stays with the back button.
  leaveFor(values) {
    fields = { ...values };
    history.pushState(null, "", address());
    for (const call of leaving) call();
  },
  onLeave(call) {
    leaving.add(call);
  },
  // Called when the back button has changed the fields within a room; returns how to stop.
  onChange(call) {
    changed.add(call);
    return () => changed.delete(call);
  },
};

addEventListener("popstate", () => {
  fields = read();
  for (const call of leaving) call();
  for (const call of changed) call();
});
