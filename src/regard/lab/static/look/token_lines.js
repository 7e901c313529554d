// Two columns of tokens with lines between them, as dark as the weights. Of a long text only the tokens near the locked
// one are shown.
import { element, formatNumber, svgElement } from "../dom.js";
import { isSelfAttention, longLabel, shortLabel } from "./token_labels.js";
import { currentLayer, lockedToken, otherField, selectedField, selectedSide } from "./view_state.js";
import { strongest } from "./load_weights.js";

const COLUMN_LENGTH = 60; // tokens
const FAR_TOKENS = 8; // how many of the largest weights are shown even if their tokens are far away
const LINE_HEIGHT = 14; // pixels
const SMALLEST_SHARE = 0.004; // smaller shares of the largest weight get no line
const LARGEST_WIDTH = 560; // pixels

export function createTokenLines(root, view) {
  const about = element("p", { className: "quiet" });
  const box = element("div", { className: "lines" });
  root.append(about, box);

  // The indices of the tokens around a token.
  function indicesAround(count, index) {
    const first = Math.max(0, Math.min(index - Math.floor(COLUMN_LENGTH * 0.7), count - COLUMN_LENGTH));
    return Array.from({ length: Math.min(count, COLUMN_LENGTH) }, (_, i) => first + i);
  }

  function show() {
    const layer = currentLayer(view);
    root.hidden = view.display !== "lines";
    if (root.hidden || !layer) return;
    const weights = view.weights?.direction === view.direction ? view.weights : null;
    // A preview keeps the tokens around the locked one: a column that moves under the pointer cannot be read.
    const middle = lockedToken(view, selectedField(view)) ?? weights?.index;
    if (!weights || middle === undefined) {
      box.replaceChildren();
      about.textContent = "Lock a token in the map or in the text to see its lines here.";
      return;
    }
    const from = view.direction === "from";
    const selectedCount = from ? layer.n : layer.m;
    const otherCount = from ? layer.m : layer.n;
    const partner = lockedToken(view, otherField(view)) ?? 0;
    const otherIndices = new Set(indicesAround(otherCount, isSelfAttention(layer) ? middle : partner));
    for (const { index, weight } of strongest(weights.values, FAR_TOKENS)) {
      if (weight > 0.01) otherIndices.add(index);
    }
    const selectedHeights = heights(indicesAround(selectedCount, middle));
    const otherHeights = heights([...otherIndices].sort((a, b) => a - b));
    draw(layer, selectedHeights, otherHeights, weights);
  }

  // The vertical position of each token of a column, by index. There is a gap where tokens are left out.
  function heights(indices) {
    const positions = new Map();
    let y = LINE_HEIGHT / 2 + 4;
    let last = null;
    for (const index of indices) {
      if (last !== null && index !== last + 1) y += LINE_HEIGHT * 0.6;
      positions.set(index, y);
      y += LINE_HEIGHT;
      last = index;
    }
    return positions;
  }

  function draw(layer, selectedHeights, otherHeights, { index: selectedIndex, values }) {
    const from = view.direction === "from";
    const width = Math.min(LARGEST_WIDTH, box.clientWidth || LARGEST_WIDTH); // text keeps its size on a small screen
    const height = Math.max(...selectedHeights.values(), ...otherHeights.values()) + LINE_HEIGHT / 2 + 4;
    const left = width * 0.36;
    const right = width * 0.64;
    const svg = svgElement("svg", {
      viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "lines between tokens",
    });

    // One line per token that has weight.
    const startX = from ? left : right;
    const endX = from ? right : left;
    const middleX = (startX + endX) / 2;
    const startY = selectedHeights.get(selectedIndex);
    const largest = values.reduce((a, b) => Math.max(a, b), 1e-9);
    let shownWeight = 0;
    for (const [index, endY] of otherHeights) {
      const share = values[index] / largest;
      shownWeight += values[index];
      if (share < SMALLEST_SHARE || startY === undefined) continue;
      svg.append(svgElement("path", {
        class: "line",
        d: `M${startX} ${startY}C${middleX} ${startY} ${middleX} ${endY} ${endX} ${endY}`,
        "stroke-opacity": Math.min(1, 0.12 + 0.88 * Math.sqrt(share)).toFixed(3),
        "stroke-width": (1 + 3 * share).toFixed(2),
      }, svgElement("title", {}, formatNumber(values[index]))));
    }
    if (from) {
      addColumn(svg, layer, "queries", selectedHeights, null, left - 6);
      addColumn(svg, layer, "keys", otherHeights, values, right + 6);
    } else {
      addColumn(svg, layer, "queries", otherHeights, values, left - 6);
      addColumn(svg, layer, "keys", selectedHeights, null, right + 6);
    }
    box.replaceChildren(svg);
    // A preview does not scroll: the column must not move under the pointer.
    const isPreview = view.weights?.preview;
    if (!isPreview && startY !== undefined) box.scrollTop = startY - box.clientHeight / 2;

    const name = longLabel(view.description, layer, selectedSide(view), selectedIndex);
    const verb = from ? "attends to keys." : "is attended to by queries.";
    about.textContent = `Queries are on the left, keys on the right; ${name} ${verb}`;
    const total = values.reduce((sum, weight) => sum + weight, 0);
    const missing = total > 0 ? 1 - shownWeight / total : 0;
    if (missing > 0.005) {
      about.textContent += ` ${Math.round(100 * missing)} % of its weight is on tokens that are not shown here.`;
    }
  }

  // `weights` are those of the tokens of the column; null for the column of the selected token.
  function addColumn(svg, layer, side, positions, weights, x) {
    const fieldName = side === "queries" ? "row" : "key";
    let hasTabStop = false;
    for (const [index, y] of positions) {
      const text = shortLabel(view.description, layer, side, index) || String(index);
      const isLocked = view[fieldName] === index;
      const isTabStop = isLocked && !weights;
      const classes = ["word"];
      if (isLocked) classes.push("locked");
      if (!weights) classes.push("asks");
      else if (weights[index] > 0.02) classes.push("seen");
      const shownText = text.length > 22 ? `${text.slice(0, 21)}…` : text;
      svg.append(svgElement("text", {
        x, y: y + 4, "text-anchor": side === "queries" ? "end" : "start", class: classes.join(" "),
        "data-at": index, "data-side": fieldName, role: "button", tabindex: isTabStop ? 0 : -1,
        "aria-label": longLabel(view.description, layer, side, index),
      }, shownText));
      hasTabStop ||= isTabStop;
    }
    if (!hasTabStop && !weights) svg.querySelector("text.asks")?.setAttribute("tabindex", "0");
  }

  const labelOf = (event) => event.target.closest?.("text.word");

  function focusLabel(fieldName, index) {
    box.querySelector(`text[data-side="${fieldName}"][data-at="${index}"]`)?.focus();
  }

  function lock(label) {
    const index = Number(label.dataset.at);
    if (label.classList.contains("asks")) view.lock(index);
    else view.change({ [label.dataset.side]: index });
  }

  box.addEventListener("click", (event) => {
    const label = labelOf(event);
    if (label) lock(label);
  });
  box.addEventListener("keydown", (event) => {
    const label = labelOf(event);
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!label || (!step && event.key !== "Enter" && event.key !== " ")) return;
    event.preventDefault();
    const { side: fieldName, at: index } = label.dataset;
    if (step) {
      focusLabel(fieldName, Number(index) + step);
    } else {
      lock(label);
      focusLabel(fieldName, index); // the column was drawn again
    }
  });
  box.addEventListener("mouseover", (event) => {
    const label = labelOf(event);
    if (label?.classList.contains("asks")) {
      const index = Number(label.dataset.at);
      const layer = currentLayer(view);
      const token = layer && isSelfAttention(layer) ? index : null; // lights up its row and its column
      view.change({ hover: { row: null, key: null, [label.dataset.side]: index, token } });
    } else {
      view.change({ hover: null });
    }
  });
  box.addEventListener("mouseleave", () => view.change({ hover: null }));
  view.on("description layerIndex direction display recording row key weights", show);
  addEventListener("resize", show);
  show();
  return () => removeEventListener("resize", show);
}
