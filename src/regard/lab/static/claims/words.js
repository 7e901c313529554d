// Verdicts, roles of findings, and numbers as text.
import { element } from "../dom.js";
import { typeset } from "./safe_mathml.js";

// The mark of a verdict, its class in the style sheet, and what it means.
export const VERDICTS = {
  "holds": ["✓", "holds", "true as it stands"],
  "holds conditionally": ["◐", "conditionally", "true only under a condition that the statement leaves out"],
  "false as stated": ["✗", "false", "there is a counterexample; another statement is true instead"],
  "undecided": ["?", "undecided", "the findings do not decide it"],
};
export const ROLES = {
  stated: "As stated",
  condition: "With its condition",
  corrected: "As corrected",
  control: "Control, which must fail",
};

export function verdict(name) {
  const [mark, className, meaning] = VERDICTS[name] ?? VERDICTS.undecided;
  return element("span", { className: `verdict ${className}`, title: meaning, text: `${mark} ${name}` });
}

// The mark alone; the word is for screen readers and for the mouse.
export function verdictMark(name) {
  const [mark, className] = VERDICTS[name] ?? VERDICTS.undecided;
  return element("span", { className: `mark verdict ${className}`, role: "img", "aria-label": name, title: name, text: mark });
}

// The true statement in one line, for a claim that does not hold as it stands.
export function whatHolds(claim, tag = "p") {
  if (!claim.what_holds) return null;
  return element(tag, { className: "instead" }, element("b", { text: "What holds: " }), ...typeset(claim.typeset.what_holds));
}

// A number, a text, or a list of them, with true minus signs.
export function number(value) {
  if (Array.isArray(value)) return value.map(number).join(", ");
  if (value === null) return "–";
  if (typeof value === "string") return value;
  if (Number.isInteger(value)) return value.toLocaleString("en").replace("-", "−");
  const size = Math.abs(value);
  let text = String(Number(value.toPrecision(4)));
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) {
    text = Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  }
  return text.replaceAll("-", "−");
}

// The same as nodes: lines break between the numbers of a list, never inside of one.
export function unbrokenNumbers(value) {
  if (typeof value === "string") return [value];
  if (!Array.isArray(value)) return [element("span", { text: number(value) })];
  return value.flatMap((one, index) => {
    const comma = index < value.length - 1 ? "," : "";
    return [element("span", { text: number(one) + comma }), " "];
  });
}
