// Small helpers for building pages by hand.

// element("button", { text, className, dataset, on: { click }, … attributes }, ...children)
export function element(kind, given = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(given)) {
    if (value === null || value === undefined) continue;
    if (name === "text") made.textContent = value;
    else if (name === "className") made.className = value;
    else if (name === "dataset") Object.assign(made.dataset, value);
    else if (name === "on") for (const [event, call] of Object.entries(value)) made.addEventListener(event, call);
    else if (typeof value === "boolean") made.toggleAttribute(name, value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function drawing(kind, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// A number to three digits; a true minus sign, so that columns line up.
export function said(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const text = size === 0 || size >= 0.001 ? x.toFixed(digits) : x.toPrecision(2);
  return text.replaceAll("-", "−");
}

// 12,345,678 → "12.3 M"
export function short(x) {
  const size = Math.abs(x);
  for (const [unit, one] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]]) {
    if (size >= one) return `${(x / one).toPrecision(3)} ${unit}`;
  }
  return said(x);
}

let count = 0;

// A labelled slider: `values` are the steps it can stand on, `show` says one in words. It calls `change(value)` live.
export function slider(label, values, at, show, change) {
  const id = `slider-${count++}`;
  const out = element("output", { for: id, text: show(values[at]) });
  const input = element("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, value: at });
  const tell = () => {
    const value = values[Number(input.value)];
    out.textContent = show(value);
    input.setAttribute("aria-valuetext", show(value));
    return value;
  };
  tell();
  input.addEventListener("input", () => change(tell()));
  const box = element("div", { className: "slider" }, element("label", { for: id, text: label }), input, out);
  box.put = (value) => { input.value = String(Math.max(0, values.indexOf(value))); tell(); };
  return box;
}

export function select(label, options, value, change) {
  const id = `select-${count++}`;
  const made = element("select", { id, on: { change: () => change(made.value) } });
  for (const [name, text] of options) made.append(element("option", { value: name, text }));
  made.value = value;
  return element("div", { className: "field" }, element("label", { for: id, text: label }), made);
}

export function checkbox(label, checked, change) {
  const input = element("input", { type: "checkbox", checked, on: { change: () => change(input.checked) } });
  return element("label", { className: "switch" }, input, ` ${label}`);
}

// Only the last of many calls in a row, once `wait` ms have passed.
export function settled(call, wait = 120) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait);
  };
}

// One line at the foot of the page that goes away by itself; errors stay longer.
export function note(text, kind = "") {
  const box = document.getElementById("notes");
  const line = element("p", { className: kind, text });
  line.append(element("button", { type: "button", "aria-label": "dismiss", text: "×", on: { click: () => line.remove() } }));
  box.append(line);
  setTimeout(() => line.remove(), kind === "error" ? 12000 : 5000);
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
