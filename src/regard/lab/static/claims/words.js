// Verdicts and roles in words.
import { element } from "../dom.js";

export const VERDICTS = { "holds": ["✓", "holds"], "holds if": ["◐", "if"], "fails as written": ["✗", "fails"], "undecided": ["?", "undecided"] };
export const ROLES = {
  written: "As written", condition: "Where the condition is met", corrected: "As corrected", control: "Control, which must fail",
};

export function verdict(name) {
  const [mark, kind] = VERDICTS[name] ?? ["?", "undecided"];
  return element("span", { className: `verdict ${kind}`, text: `${mark} ${name}` });
}

export function number(value) {
  if (Array.isArray(value)) return value.map(number).join(", ");
  if (value === null) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? Number(value.toPrecision(3)).toExponential().replace("e+", "e") : String(Number(value.toPrecision(4)));
  return text.replaceAll("-", "−");
}
