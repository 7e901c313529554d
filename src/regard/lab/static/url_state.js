// The view in the address of the page: a link, a reload and the back button restore it.
const leaveListeners = new Set();
const changeListeners = new Set();
let fields = readAddress();

function readAddress() {
  return Object.fromEntries(new URLSearchParams(location.search));
}

function addressOf(values) {
  const search = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== ""));
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
  // A small change: updates the address without an entry for the back button. null or "" removes a field.
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      if (value === null || value === undefined || value === "") delete fields[name];
      else fields[name] = String(value);
    }
    history.replaceState(null, "", addressOf(fields));
  },
  // A change that the back button undoes.
  push(values) {
    history.pushState(null, "", addressOf(fields));
    this.set(values);
  },
  // Go to another page; the back button returns to this view.
  leaveFor(values) {
    fields = { ...values };
    history.pushState(null, "", addressOf(fields));
    for (const listener of leaveListeners) listener();
  },
  onLeave(listener) {
    leaveListeners.add(listener);
  },
  // The open page reads the address again, after another part of the lab has changed it.
  refresh() {
    for (const listener of changeListeners) listener();
  },
  // `listener` is called when the back or forward button changes the address and the page stays open. Returns a function
  // that stops listening.
  onChange(listener) {
    changeListeners.add(listener);
    return () => changeListeners.delete(listener);
  },
};

// The state as one opening of a page gets it. Requests of a page that was left can still end: what they then change must
// not reach the address of the page that is open now.
export function stateOfPage(isOpen) {
  return {
    ...state,
    set(values) {
      if (isOpen()) state.set(values);
    },
    push(values) {
      if (isOpen()) state.push(values);
    },
    onChange(listener) {
      return state.onChange(() => {
        if (isOpen()) listener();
      });
    },
  };
}

addEventListener("popstate", () => {
  fields = readAddress();
  for (const listener of leaveListeners) listener();
  for (const listener of changeListeners) listener();
});
