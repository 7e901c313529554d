// Two models side by side: the model of the page, and a preset or a model that was pinned before.
import { post } from "../api.js";
import { element, select } from "../dom.js";
import { distinctTitles, modelBody, modelTitle, presetBody } from "./model_settings.js";
import { formatBytes, formatCount, formatExact, formatLongest, formatSeconds } from "./units.js";

const PINNED = "pinned";
const LONGEST_SHARED = 6000; // characters of a pinned model in the address
const FORMATS = {
  bytes: formatBytes, seconds: formatSeconds, count: formatCount, tokens: formatExact, "tokens/s": formatCount,
};

// `page.changed()` is called when another model is selected. The second model is kept in the address as `against`.
export function createComparison(page, state) {
  const { options } = page;
  let pinned = null;
  let selected = "";

  const list = select("compare with", [], "", (name) => {
    selected = name;
    page.changed();
  });
  const listInput = list.querySelector("select");
  const pinButton = element("button", {
    type: "button", text: "pin", title: "remember this model, and compare the next one with it", on: { click: pin },
  });
  const control = element("div", { className: "bar against" }, list, pinButton);
  const heading = element("h2");
  const body = element("div");
  const panel = element("section", { className: "panel comparison", hidden: true }, heading, body);

  // Read the second model from the address. A model that was pinned before stays in the list.
  function restore() {
    const text = state.get("against");
    const found = readPinned(text);
    if (found) pinned = found;
    selected = "";
    if (found) selected = PINNED;
    else if (Object.hasOwn(options.presets, text)) selected = text;
    showList();
  }

  function pin() {
    pinned = { title: modelTitle(page.settings, options, page.plan), model: modelBody(page.settings) };
    selected = PINNED;
    showList();
    page.changed();
  }

  function showList() {
    const names = [["", "no other model"]];
    if (pinned) names.push([PINNED, `pinned: ${pinned.title}`]);
    for (const [name, preset] of Object.entries(options.presets)) names.push([name, preset.title]);
    listInput.replaceChildren(...names.map(([value, text]) => element("option", { value, text })));
    listInput.value = selected;
  }

  function second() {
    if (selected === PINNED) return pinned;
    const preset = options.presets[selected];
    return { title: preset.title, model: presetBody(preset) };
  }

  // What the address says about the second model.
  function address() {
    if (selected !== PINNED) return selected;
    const text = JSON.stringify(pinned);
    return text.length <= LONGEST_SHARED ? text : "";
  }

  // `run` is the body of the request of the page's own plan.
  async function show(run, signal) {
    panel.hidden = selected === "";
    if (panel.hidden) return;
    const other = second();
    const ownTitle = modelTitle(page.settings, options, page.plan);
    const [title, otherTitle] = distinctTitles([ownTitle, other.title], [run, other.model]);
    try {
      const response = await post("/api/budget/compare", { first: run, second: other.model }, signal);
      const [n, otherN] = response.tokens;
      const lengths = n === otherN ? `both at n = ${formatExact(n)}` : `n = ${formatExact(n)} and ${formatExact(otherN)}`;
      heading.textContent = `${title} and ${otherTitle}, ${lengths}`;
      body.replaceChildren(comparisonTable(title, otherTitle, response.figures, response.without_limit));
    } catch (error) {
      if (error.name === "AbortError") throw error;
      heading.textContent = `${title} and ${otherTitle}`;
      body.replaceChildren(element("p", { className: "error", role: "alert", text: error.message }));
    }
  }

  restore();
  return { control, panel, show, address, restore };
}

// A pinned model in the address; null if it is not one. The lab checks its sizes.
function readPinned(text) {
  if (!text.startsWith("{")) return null;
  try {
    const { title, model } = JSON.parse(text);
    return typeof title === "string" && model ? { title, model } : null;
  } catch {
    return null;
  }
}

function comparisonTable(first, second, figures, withoutLimit) {
  const header = element("tr", {}, element("th", { scope: "col", text: "figure" }));
  for (const text of [first, second, "difference", "ratio"]) {
    header.append(element("th", { scope: "col", className: "number", text }));
  }
  const rows = element("tbody");
  for (const figure of figures) {
    const [firstWithout, secondWithout] = withoutLimit[figure.figure];
    const cells = [
      firstWithout ? "no limit" : valueText(figure, figure.first_value),
      secondWithout ? "no limit" : valueText(figure, figure.second_value), differenceText(figure),
      figure.ratio === null ? "–" : `${figure.ratio.toFixed(2)} ×`,
    ];
    const row = element("tr", { dataset: { figure: figure.figure } },
      element("th", { scope: "row", text: figure.figure }));
    for (const text of cells) row.append(element("td", { className: "number", text }));
    rows.append(row);
  }
  const table = element("table", { className: "parts" }, element("thead", {}, header), rows);
  return element("div", { className: "wide", tabindex: 0, role: "region", "aria-label": "comparison" }, table);
}

function valueText({ figure, unit }, value) {
  if (value === null) return figure === "crossover n*" ? "never" : "–";
  if (figure === "parameters") return formatExact(value);
  if (figure.startsWith("longest n")) return formatLongest(value);
  return FORMATS[unit](value);
}

function differenceText(figure) {
  const { difference } = figure;
  if (difference === null) return "–";
  if (difference === 0) return "same";
  return (difference > 0 ? "+" : "−") + valueText(figure, Math.abs(difference));
}
