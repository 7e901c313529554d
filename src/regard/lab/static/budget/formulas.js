// Formulas in the theory's letters, the same with the numbers put in, and what they come to.
import { element } from "../dom.js";

const OPEN = new Set(["parameters", "FLOPs, forward", "crossover in FLOPs"]);

function math(text) {
  return document.importNode(new DOMParser().parseFromString(text, "application/xml").documentElement, true);
}

function line(terms, sign, value = null) {
  return element("p", {}, sign ? element("span", { className: "equals", text: sign }) : null,
    ...terms.flatMap((term) => [math(term), " "]),
    value === null ? null : element("span", { className: "value" }, " = ", element("strong", { text: value })));
}

// Which groups are open stays as it is while numbers change.
export function formulas() {
  const box = element("div");
  const letters = element("dl", { className: "letters" });
  const panel = element("section", { className: "panel formulas" }, element("h2", { text: "Formulas" }), box,
    element("details", {}, element("summary", { text: "what the letters mean" }), letters));
  const chosen = new Map();
  panel.show = (told) => {
    const groups = new Map();
    for (const one of told.formulas) {
      if (!groups.has(one.about)) groups.set(one.about, []);
      groups.get(one.about).push(one);
    }
    box.replaceChildren(...[...groups].map(([about, inside]) => {
      const made = element("details", { open: chosen.get(about) ?? OPEN.has(about), dataset: { about } }, element("summary", { text: about }));
      made.addEventListener("toggle", () => chosen.set(about, made.open));
      for (const one of inside) {
        made.append(element("div", { className: "formula", dataset: { formula: one.name } }, element("h4", { text: one.name }),
          element("div", {}, line(one.letters, ""), line(one.numbers, "=", one.value))));
      }
      return made;
    }));
    letters.replaceChildren(...told.letters.flatMap((one) => [
      element("dt", {}, math(one.letter)), element("dd", { text: `${one.means}: ${one.value.toLocaleString("en")}` })]));
  };
  return panel;
}
