// The change of each token's loss as bars, and as shades of the text. Pointing at a token, the arrow keys, or a tap show
// its numbers in a line below the chart.
import { element, formatNumber, svgElement } from "../dom.js";
import { isSpecialLabel, labelNodes, roundStep, visibleText } from "../shared.js";

const CHART_WIDTH = 320; // in units of the SVG, which is stretched to the width of the panel
const CHART_HEIGHT = 100;
const MOST_BARS = 640;
const PAGE_SIZE = 600; // tokens of the text on the screen at once
const MOST_TICKS = 4; // between 0 and the largest change
const INDEX_TICKS = 6;
const ARROW_STEPS = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 };

export const signed = (x) => `${x >= 0 ? "+" : ""}${formatNumber(x)}`;

// `loss` has `before` and `after`: the losses of the tokens from the second one on, so change i is that of token i + 1.
// `texts`: the labels of all tokens, or null. `tokenName(index)` names a token in a sentence. `onLock(index)` is called
// with the token that predicts the selected one. Returns { figure, setPosition }.
export function createLossChart({ before, after }, texts, tokenName, onLock) {
  const changes = after.tokens.map((value, i) => value - before.tokens[i]);
  const groups = groupChanges(changes);
  const count = changes.length;
  const axis = lossAxis(groups);
  const unit = CHART_WIDTH / count;
  let position = null; // the locked token: it predicts token position + 1, whose change is marked
  let pointed = null; // the change under the pointer, or the one that the arrow keys have reached

  const mark = svgElement("line", { y1: 0, y2: CHART_HEIGHT, class: "mark" });
  const pointer = svgElement("rect", { y: 0, height: CHART_HEIGHT, width: Math.max(unit, 1), class: "pointer" });
  const svg = svgElement("svg", {
    viewBox: `0 0 ${CHART_WIDTH} ${CHART_HEIGHT}`, preserveAspectRatio: "none", class: "losses", tabindex: 0,
    role: "slider", "aria-valuemin": 1, "aria-valuemax": count,
    "aria-label": "token whose change of loss is shown; Enter locks the token before it",
  });
  const readout = element("output", { className: "loss-readout", "aria-live": "off" });
  const text = element("div", { className: "loss-text" });
  const tokens = new Map(); // the shown tokens of the text, by index
  let firstShown = null;

  for (const tick of axis.ticks) {
    const y = axis.y(tick);
    svg.append(svgElement("line", { x1: 0, x2: CHART_WIDTH, y1: y, y2: y, class: tick === 0 ? "base zero" : "base" }));
  }
  svg.append(pointer);
  for (const { first, last, mean } of groups) {
    const top = axis.y(Math.max(mean, 0));
    svg.append(svgElement("rect", {
      class: mean > 0 ? "minus" : "plus", x: (first * unit).toFixed(3), y: top.toFixed(2),
      width: Math.max((last - first + 1) * unit * 0.92, 0.5).toFixed(3),
      height: Math.max(axis.y(Math.min(mean, 0)) - top, 0.3).toFixed(2),
      "data-token": first + 1, "data-change": mean,
    }));
  }
  svg.append(mark);

  function changeAt(event) {
    const box = svg.getBoundingClientRect();
    return clampChange(Math.floor(((event.clientX - box.left) / box.width) * count));
  }
  const clampChange = (i) => Math.max(0, Math.min(count - 1, i));
  const point = (i) => {
    pointed = i;
    show();
  };

  const pointInChart = (i) => {
    point(i);
    scrollToToken();
  };

  svg.addEventListener("pointermove", (event) => pointInChart(changeAt(event)));
  svg.addEventListener("pointerleave", () => pointInChart(null));
  svg.addEventListener("click", (event) => onLock(changeAt(event)));
  svg.addEventListener("blur", () => pointInChart(null));
  svg.addEventListener("keydown", (event) => {
    const current = pointed ?? lockedChange();
    if (event.key === "Enter" || event.key === " ") onLock(current);
    else if (event.key === "Home") pointInChart(0);
    else if (event.key === "End") pointInChart(count - 1);
    else if (event.key in ARROW_STEPS) pointInChart(clampChange(current + ARROW_STEPS[event.key]));
    else return;
    event.preventDefault();
  });

  function tokenChange(event) {
    const index = Number(event.target.closest?.("[data-token]")?.dataset.token ?? 0);
    return index > 0 ? index - 1 : null;
  }
  text.addEventListener("pointerover", (event) => point(tokenChange(event)));
  text.addEventListener("pointerleave", () => point(null));
  text.addEventListener("click", (event) => {
    const change = tokenChange(event);
    if (change !== null) onLock(change);
  });

  // The change that is shown if none is pointed at: that of the token after the locked one, else the largest.
  function lockedChange() {
    if (position !== null && position < count) return position;
    let largest = 0;
    for (let i = 1; i < count; i++) {
      if (Math.abs(changes[i]) > Math.abs(changes[largest])) largest = i;
    }
    return largest;
  }

  function describe(i) {
    const group = groups[Math.floor(i / groupSize(count))];
    if (pointed !== null && group.first < group.last) {
      return [`mean of the tokens ${group.first + 1} … ${group.last + 1}: `, `${signed(group.mean)} nats`];
    }
    const from = formatNumber(before.tokens[i]);
    const to = formatNumber(after.tokens[i]);
    return [`loss of ${tokenName(i + 1)}: ${from} → ${to} `, `(${signed(changes[i])} nats)`];
  }

  function show() {
    const i = pointed ?? lockedChange();
    const [sentence, change] = describe(i);
    readout.replaceChildren(sentence, element("b", { text: change }));
    Object.assign(readout.dataset, { token: i + 1, change: changes[i] });
    svg.setAttribute("aria-valuenow", i + 1);
    svg.setAttribute("aria-valuetext", sentence + change);
    pointer.setAttribute("x", i * unit);
    const isLocked = position !== null && position < count;
    mark.style.display = isLocked ? "" : "none";
    if (isLocked) {
      mark.setAttribute("x1", (position + 0.5) * unit);
      mark.setAttribute("x2", (position + 0.5) * unit);
    }
    for (const [index, token] of tokens) token.classList.toggle("pointed", index === i + 1);
  }

  // Scroll the text, not the page, to the token that is shown.
  function scrollToToken() {
    const token = tokens.get((pointed ?? lockedChange()) + 1);
    if (!token) return;
    const isAbove = token.offsetTop < text.scrollTop;
    const isBelow = token.offsetTop + token.offsetHeight > text.scrollTop + text.clientHeight;
    if (isAbove || isBelow) text.scrollTop = token.offsetTop - text.clientHeight / 2;
  }

  // The page of the text with the token after the locked one.
  function showText() {
    const start = Math.floor((lockedChange() + 1) / PAGE_SIZE) * PAGE_SIZE;
    if (!texts || start === firstShown) return;
    firstShown = start;
    tokens.clear();
    text.replaceChildren();
    for (let index = start; index < Math.min(texts.length, start + PAGE_SIZE); index++) {
      const label = visibleText(texts[index]);
      if (label.startsWith(" ") && label.trim()) text.append(" ");
      const token = element("span", { className: "word", dataset: { token: index } }, ...labelNodes(label.trim() || "␣"));
      token.classList.toggle("special", isSpecialLabel(label));
      const change = index > 0 ? changes[index - 1] : 0;
      token.classList.add(change > 0 ? "worse" : "better");
      token.style.setProperty("--change", Math.min(1, Math.abs(change) / axis.largest).toFixed(3));
      tokens.set(index, token);
      text.append(token);
      if (label.endsWith("↵")) text.append(element("br"));
    }
  }

  const caption = element("figcaption", { className: "quiet" },
    "Change of each token's loss in nats. Above 0, orange: worse without the heads.");
  const figure = element("figure", { className: "loss" }, caption,
    element("div", { className: "plot" }, axisTexts(axis), svg, indexTexts(count)), readout);
  if (texts) {
    const pages = Math.ceil(texts.length / PAGE_SIZE);
    figure.append(shadeLegend(axis.largest), text);
    if (pages > 1) figure.append(element("p", { className: "quiet", text: `The text around the shown token, of ${texts.length}.` }));
  }
  return {
    figure,
    setPosition(locked) {
      position = locked;
      showText();
      show();
      scrollToToken();
    },
  };
}

const groupSize = (count) => Math.ceil(count / MOST_BARS);

// The changes one by one; in a long text the means of neighbours.
function groupChanges(changes) {
  const size = groupSize(changes.length);
  const groups = [];
  for (let first = 0; first < changes.length; first += size) {
    const part = changes.slice(first, first + size);
    const mean = part.reduce((sum, change) => sum + change, 0) / part.length;
    groups.push({ first, last: first + part.length - 1, mean });
  }
  return groups;
}

// The axis of the bars: round ticks from below the lowest to above the highest, and `y(value)` in units of the SVG.
function lossAxis(groups) {
  const low = groups.reduce((least, { mean }) => Math.min(least, mean), 0);
  const high = groups.reduce((most, { mean }) => Math.max(most, mean), 0);
  const largest = Math.max(high, -low, 1e-9);
  // roundStep knows steps from 1 on.
  const power = 10 ** Math.floor(Math.log10(largest / MOST_TICKS));
  const step = roundStep(largest / MOST_TICKS / power) * power;
  const lowest = Math.floor(low / step - 1e-9) + (low === 0 ? 1 : 0);
  const highest = Math.max(Math.ceil(high / step - 1e-9), lowest + 1);
  const ticks = [];
  for (let k = lowest; k <= highest; k++) ticks.push(k * step);
  const y = (value) => ((highest * step - value) / ((highest - lowest) * step)) * CHART_HEIGHT;
  return { ticks, step, largest, y };
}

function axisTexts({ ticks, step, y }) {
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const box = element("div", { className: "axis", "aria-hidden": "true" });
  for (const tick of ticks) {
    const sign = tick > 0 ? "+" : "";
    const number = decimals > 6 ? formatNumber(tick) : tick.toFixed(decimals).replace("-", "−");
    box.append(element("span", { style: `top: ${y(tick).toFixed(2)}%`, text: tick === 0 ? "0" : sign + number }));
  }
  return box;
}

function indexTexts(count) {
  const box = element("div", { className: "indices", "aria-hidden": "true" });
  const step = roundStep(count / INDEX_TICKS);
  for (let index = step; index <= count; index += step) {
    box.append(element("span", { style: `left: ${((100 * (index - 0.5)) / count).toFixed(2)}%`, text: index }));
  }
  box.append(element("span", { className: "name", text: "token" }));
  return box;
}

function shadeLegend(largest) {
  return element("p", { className: "loss-legend quiet" },
    `−${formatNumber(largest)} `, element("span", { className: "ramp", "aria-hidden": "true" }),
    ` +${formatNumber(largest)} nats, on the text:`);
}
