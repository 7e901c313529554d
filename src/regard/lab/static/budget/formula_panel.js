// The formulas in symbols, with numbers inserted, and their values.
import { element } from "../dom.js";

const OPEN_AT_FIRST = new Set(["parameters", "FLOPs, forward", "crossover in FLOPs"]);

// MathML text as an element.
function parseMath(text) {
  return document.importNode(new DOMParser().parseFromString(text, "application/xml").documentElement, true);
}

function formulaLine(terms, sign, value = null) {
  const line = element("p", {});
  if (sign) line.append(element("span", { className: "equals", text: sign }));
  for (const term of terms) line.append(parseMath(term), " ");
  if (value !== null) line.append(element("span", { className: "value" }, " = ", element("strong", { text: value })));
  return line;
}

function groupByTopic(formulas) {
  const groups = new Map();
  for (const formula of formulas) {
    if (!groups.has(formula.about)) groups.set(formula.about, []);
    groups.get(formula.about).push(formula);
  }
  return groups;
}

export function createFormulaPanel() {
  const box = element("div");
  const symbols = element("dl", { className: "letters" });
  const panel = element("section", { className: "panel formulas" },
    element("h2", { text: "Formulas" }),
    box,
    element("details", {}, element("summary", { text: "what the symbols mean" }), symbols));
  const openGroups = new Map(); // open groups stay open when the numbers change

  panel.show = ({ formulas, letters }) => {
    box.replaceChildren();
    for (const [topic, group] of groupByTopic(formulas)) {
      const isOpen = openGroups.get(topic) ?? OPEN_AT_FIRST.has(topic);
      const details = element("details", { open: isOpen, dataset: { about: topic } }, element("summary", { text: topic }));
      details.addEventListener("toggle", () => openGroups.set(topic, details.open));
      for (const { name, letters: symbolic, numbers, value } of group) {
        const lines = element("div", {}, formulaLine(symbolic, ""), formulaLine(numbers, "=", value));
        const title = element("h4", { text: name });
        details.append(element("div", { className: "formula", dataset: { formula: name } }, title, lines));
      }
      box.append(details);
    }
    symbols.replaceChildren();
    for (const { letter, means, value } of letters) {
      const meaning = `${means}: ${value.toLocaleString("en")}`;
      symbols.append(element("dt", {}, parseMath(letter)), element("dd", { text: meaning }));
    }
  };
  return panel;
}
