// The computation of the locked weight, step by step, with its numbers.
import { get } from "../api.js";
import { debounce, element, formatNumber, svgElement } from "../dom.js";
import { longLabel } from "./token_labels.js";
import { currentLayer, HEAD_SETTINGS, lockedToken, requestFields } from "./view_state.js";
import { formatWeight } from "./load_weights.js";
import { createScorePairs } from "./score_pairs.js";

const LEAST_DECIMALS = 4;
const MOST_DECIMALS = 14; // a float64 has no more
const SPECIAL_NUMBERS = { inf: Infinity, "-inf": -Infinity, nan: NaN }; // JSON has no such numbers
const parseNumber = (value) => (typeof value === "string" ? SPECIAL_NUMBERS[value] : value);
const formatParsed = (value) => formatNumber(parseNumber(value));

export function createWeightSteps(root, view) {
  const body = element("div", { className: "steps" });
  root.append(element("h3", { text: "Why this number" }), body);
  const pairs = createScorePairs(view);
  let request = null;

  async function show() {
    request?.abort();
    const layer = currentLayer(view);
    const row = lockedToken(view, "row");
    const key = lockedToken(view, "key");
    if (!layer || !layer.kept || row === null || key === null) {
      const text = "Lock a cell of the map to see how its weight is computed.";
      body.replaceChildren(element("p", { className: "quiet", text }));
      return;
    }
    request = new AbortController();
    try {
      const steps = await get("/api/look/why", { ...requestFields(view), row, key }, request.signal);
      const query = longLabel(view.description, layer, "queries", row);
      const target = longLabel(view.description, layer, "keys", key);
      const summary = element("p", { className: "who", "aria-live": "polite" },
        query, " attends to ", target, ": ", element("b", { text: formatWeight(steps.weight) }));
      body.replaceChildren(summary, stepList(steps, view.mask), productChart(steps.contributions), pairs.root);
      pairs.update(steps);
      body.dataset.weight = steps.weight;
    } catch (error) {
      if (error.name !== "AbortError") body.replaceChildren(element("p", { className: "error", text: error.message }));
    }
  }

  view.on(`${HEAD_SETTINGS} description row key`, debounce(show, 40));
  show();
  return () => request?.abort();
}

// The steps from q · k to the weight as text, so that the shown numbers reproduce each other: every result is computed
// from the numbers that are shown before it, and rounded once. With too few decimals the last one would not be the weight,
// so there are as many as it needs.
export function shownSteps(steps) {
  const weight = formatWeight(steps.weight);
  let shown = null;
  for (let decimals = LEAST_DECIMALS; decimals <= MOST_DECIMALS; decimals++) {
    shown = roundedSteps(steps, decimals);
    if (shown.weight === null || shown.weight === weight) break;
  }
  return { ...shown, weight };
}

function roundedSteps(steps, decimals) {
  const round = (x) => (Number.isFinite(x) ? Number(x.toFixed(decimals)) : x);
  const text = (x) => (Number.isFinite(x) ? x.toFixed(decimals).replace("-", "−") : formatNumber(x));
  const scale = parseNumber(steps.scale);
  const shownScale = Number.isFinite(scale) ? Number(scale.toPrecision(decimals + 2)) : scale;
  const product = round(steps.product);
  const shown = { product: text(product), scale: plainText(shownScale), biases: [], weight: null };
  if (steps.scaled === null) return shown;

  let score = round(product * shownScale);
  shown.scaled = text(score);
  if (steps.softcap) {
    shown.softcap = plainText(steps.softcap);
    score = round(steps.softcap * Math.tanh(score / steps.softcap));
    shown.capped = text(score);
  }
  for (const { name, value } of steps.biases) {
    const bias = round(parseNumber(value));
    shown.biases.push({ name, text: text(bias) });
    score = round(score + bias);
  }
  shown.score = text(score);

  // The logarithm of the sum of exp(score) over the row.
  const logSum = parseNumber(steps.lse);
  if (steps.hidden || logSum === null || !Number.isFinite(logSum) || !Number.isFinite(score)) return shown;
  shown.logSum = text(round(logSum));
  shown.weight = formatWeight(Math.exp(score - round(logSum)));
  return shown;
}

// A number with the digits that it has, and a true minus sign.
function plainText(x) {
  return Number.isFinite(x) ? String(x).replaceAll("-", "−") : formatNumber(x);
}

function stepList(steps, hasMask) {
  const list = element("ol", { className: "chain" });

  function addStep(name, formula, value, explanation = "") {
    list.append(element("li", { title: explanation },
      element("span", { className: "name", text: name }),
      element("span", { className: "sum", text: formula }),
      element("span", { className: "value", text: value })));
  }

  const shown = shownSteps(steps);
  const productText = `${steps.contributions.length} products, below`;
  addStep("q · k", productText, shown.product, "the dot product of the query and the key");

  const isHard = parseNumber(steps.scale) === Infinity;
  const scaleText = "β, the scale or inverse temperature: the number beside the slider";
  if (isHard) addStep("× β", "∞: only the largest q · k of the row counts", "", scaleText);
  else addStep("× β", `${shown.product} × ${shown.scale}`, shown.scaled, scaleText);

  if (shown.softcap) {
    addStep("softcap", `${shown.softcap} · tanh(${shown.scaled} / ${shown.softcap})`, shown.capped);
  }
  const biases = isHard ? steps.biases.map(({ name, value }) => ({ name, text: formatParsed(value) })) : shown.biases;
  for (const bias of biases) addStep(`+ ${bias.name}`, "", bias.text);
  if (shown.score !== undefined && biases.length) addStep("= score", "", shown.score);
  if (!hasMask) addStep("mask", steps.hidden_as_trained ? "switched off; it would hide this key" : "switched off", "off");
  else if (steps.hidden) addStep("mask", "masked: the weight is 0", "×");
  else addStep("mask", "not masked", "✓");

  if (shown.logSum !== undefined) {
    const explanation = `${shown.logSum} is the logarithm of the sum of exp(score) over the row`;
    addStep("softmax", `exp(${shown.score} − ${shown.logSum})`, shown.weight, explanation);
  } else {
    addStep("softmax", isHard && !steps.hidden ? "ties share the weight" : "", shown.weight);
  }
  return list;
}

// The products whose sum is q · k.
function productChart(products) {
  const width = 320;
  const height = 74;
  const low = Math.min(...products, 0);
  const high = Math.max(...products, 0);
  const y = (value) => 1 + ((high - value) / (high - low || 1)) * (height - 2);
  const barWidth = width / products.length;
  const range = `${formatNumber(low)} … ${formatNumber(high)}`;
  const svg = svgElement("svg", {
    viewBox: `0 0 ${width} ${height}`, role: "img", preserveAspectRatio: "none",
    "aria-label": `${products.length} products of q and k, from ${formatNumber(low)} to ${formatNumber(high)}`,
  });
  svg.append(svgElement("line", { x1: 0, x2: width, y1: y(0), y2: y(0), class: "base" }));
  for (const [i, product] of products.entries()) {
    const title = svgElement("title", {}, `q · k, entry ${i}: ${formatNumber(product)}`);
    svg.append(svgElement("rect", {
      class: product < 0 ? "minus" : "plus",
      x: (i * barWidth + barWidth * 0.1).toFixed(2),
      y: y(Math.max(product, 0)).toFixed(2),
      width: (barWidth * 0.8).toFixed(2),
      height: Math.max(0.3, Math.abs(y(0) - y(product))).toFixed(2),
    }, title));
  }
  const caption = element("figcaption", { className: "quiet", text: `q · k, entry by entry: ${range}` });
  return element("figure", { className: "products" }, caption, svg);
}
