// A size: a slider over usual steps, and beside it the number itself, which takes any. One that is not given shows what it
// follows from, and can be given back.
import { element } from "../dom.js";

let count = 0;

// `change(value)`; null gives the size back. `largest`: what the lab takes.
export function size(label, { optional = false, largest = 2 ** 18, change }) {
  const id = `size-${count++}`;
  let steps = [1];
  const range = element("input", { type: "range", min: 0, step: 1, "aria-label": `${label}, slider` });
  const number = element("input", { id, type: "number", min: 1, max: largest, step: 1, inputmode: "numeric" });
  const back = element("button", {
    type: "button", className: "quiet back", title: `${label}: as it follows from the others`,
    "aria-label": `${label}: back to what follows`, text: "↺", on: { click: () => change(null) },
  });
  range.addEventListener("input", () => {
    number.value = steps[Number(range.value)];
    range.setAttribute("aria-valuetext", number.value);
    change(steps[Number(range.value)]);
  });
  number.addEventListener("input", () => {
    const value = Number(number.value);
    if (!Number.isInteger(value) || value < 1 || value > largest) return;
    range.value = nearest(steps, value);
    change(value, true);
  });
  const box = element("div", { className: "size" }, element("label", { for: id, text: label }), range, number, back);
  // Show a value, over these steps; `given`: not only what follows.
  box.put = (value, from, given = true) => {
    steps = from.length ? from : [1];
    range.max = String(steps.length - 1);
    box.classList.toggle("follows", !given);
    back.hidden = !optional || !given;
    range.value = String(nearest(steps, value ?? steps[0]));
    range.setAttribute("aria-valuetext", value === null || value === undefined ? "none" : String(value));
    if (document.activeElement !== number || number.value === "") number.value = value ?? "";
    number.placeholder = value === null || value === undefined ? "none" : "";
  };
  box.enable = (on) => { range.disabled = !on; number.disabled = !on; };
  return box;
}

function nearest(steps, value) {
  let best = 0;
  steps.forEach((step, i) => {
    if (Math.abs(Math.log(step / value)) < Math.abs(Math.log(steps[best] / value))) best = i;
  });
  return best;
}
