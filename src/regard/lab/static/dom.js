// Helpers that build page elements and show messages.
export { formatNumber, svgElement } from "./shared.js";

// element("button", { text, className, dataset, on: { click }, … attributes }, ...children)
export function element(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (value === null || value === undefined) continue;
    if (name === "text") {
      node.textContent = value;
    } else if (name === "className") {
      node.className = value;
    } else if (name === "dataset") {
      Object.assign(node.dataset, value);
    } else if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (typeof value === "boolean") {
      node.toggleAttribute(name, value);
    } else {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const MAX_MESSAGES = 4; // at a time
let controlCount = 0; // controls need ids of their own, for their labels

// A labelled slider over the steps in `values`. `format` turns a value into text; `onChange(value)` is called live.
export function slider(label, values, index, format, onChange) {
  const id = `slider-${controlCount++}`;
  const output = element("output", { for: id, text: format(values[index]) });
  const input = element("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, value: index });
  const update = () => {
    const value = values[Number(input.value)];
    output.textContent = format(value);
    input.setAttribute("aria-valuetext", format(value));
    return value;
  };
  update();
  input.addEventListener("input", () => onChange(update()));
  const box = element("div", { className: "slider" }, element("label", { for: id, text: label }), input, output);
  box.put = (value) => {
    input.value = String(Math.max(0, values.indexOf(value)));
    update();
  };
  return box;
}

export function select(label, options, value, onChange) {
  const id = `select-${controlCount++}`;
  const input = element("select", { id, on: { change: () => onChange(input.value) } });
  for (const [name, text] of options) input.append(element("option", { value: name, text }));
  input.value = value;
  return element("div", { className: "field" }, element("label", { for: id, text: label }), input);
}

export function checkbox(label, checked, onChange) {
  const input = element("input", { type: "checkbox", checked, on: { change: () => onChange(input.checked) } });
  return element("label", { className: "switch" }, input, ` ${label}`);
}

// Options of `select` whose texts are their values.
export function sameNames(names) {
  return names.map((name) => [String(name), String(name)]);
}

// A click on a link calls `act` instead. With a modifier key the browser opens the link in a new tab or window.
export function onPlainClick(link, act) {
  link.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    act();
  });
}

// Of many calls in a row only the last one runs, once `wait` ms have passed.
export function debounce(call, wait = 120) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...args), wait);
  };
}

// One line at the bottom of the window, above the page. It disappears by itself; an error or a notice stays until it is
// dismissed, and a message with a button (`action` is { text, run }) stays for a while.
export function showMessage(text, kind = "", action = null) {
  const notes = document.getElementById("notes");
  for (const shown of [...notes.children]) {
    if (shown.dataset.text === text) shown.remove(); // the same message twice says nothing new
  }
  const line = element("p", { className: kind, dataset: { text } }, element("span", { text }));
  if (action) {
    const run = () => {
      line.remove();
      action.run();
    };
    line.append(element("button", { type: "button", className: "action", text: action.text, on: { click: run } }));
  }
  const dismiss = { type: "button", "aria-label": "dismiss", text: "×", on: { click: () => line.remove() } };
  line.append(element("button", dismiss));
  notes.append(line);
  while (notes.children.length > MAX_MESSAGES) notes.firstChild.remove();
  if (kind !== "error" && kind !== "notice") setTimeout(() => line.remove(), action ? 30000 : 5000);
}

export function download(name, blob) {
  const url = URL.createObjectURL(blob);
  element("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}
