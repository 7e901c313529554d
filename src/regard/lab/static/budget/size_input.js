// A size: a slider over usual values, and a number input for any value. A size that is not set shows the value that
// follows from the other sizes, and a size that is set can be reset to it.
import { element } from "../dom.js";

let inputCount = 0; // inputs need ids of their own, for their labels

// `onChange(value, live)` is called with the new value; null resets the size. `live` names the input while a slider moves or
// a number is typed: several calls in a row are then one change.
export function createSizeInput(label, { optional = false, largest = 2 ** 18, onChange }) {
  const id = `size-${inputCount++}`;
  let steps = [1];
  const range = element("input", { type: "range", min: 0, step: 1, "aria-label": `${label}, slider` });
  const number = element("input", { id, type: "number", min: 1, max: largest, step: 1, inputmode: "numeric" });
  const reset = element("button", {
    type: "button", className: "quiet back", text: "↺", title: `${label}: reset to the value that follows from the others`,
    "aria-label": `${label}: reset`, on: { click: () => onChange(null) },
  });
  range.addEventListener("input", () => {
    const value = steps[Number(range.value)];
    number.value = value;
    range.setAttribute("aria-valuetext", number.value);
    onChange(value, `${id} slider`);
  });
  number.addEventListener("input", () => {
    const value = Number(number.value);
    if (!Number.isInteger(value) || value < 1 || value > largest) return;
    range.value = nearestStep(steps, value);
    onChange(value, id);
  });
  const box = element("div", { className: "size" }, element("label", { for: id, text: label }), range, number, reset);

  // `isSet` tells whether the value is set, or follows from other sizes.
  box.show = (value, newSteps, isSet = true) => {
    const isMissing = value === null || value === undefined;
    steps = newSteps.length ? newSteps : [1];
    range.max = String(steps.length - 1);
    range.value = String(nearestStep(steps, value ?? steps[0]));
    range.setAttribute("aria-valuetext", isMissing ? "none" : String(value));
    box.classList.toggle("follows", !isSet);
    reset.hidden = !optional || !isSet;
    const isTyping = document.activeElement === number && number.value !== "";
    if (!isTyping) number.value = value ?? "";
    number.placeholder = isMissing ? "none" : "";
  };
  box.enable = (enabled) => {
    range.disabled = !enabled;
    number.disabled = !enabled;
  };
  return box;
}

// The index of the step with the nearest logarithm.
function nearestStep(steps, value) {
  const distance = (step) => Math.abs(Math.log(step / value));
  let nearest = 0;
  for (const [i, step] of steps.entries()) {
    if (distance(step) < distance(steps[nearest])) nearest = i;
  }
  return nearest;
}
