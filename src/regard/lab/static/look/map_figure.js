// The visible part of a map as an SVG figure: cells or an image, labels of tokens, names of the axes, and a scale. Its
// margins follow the labels, so that no label is cut off.
import { weightColour } from "../colour.js";
import { formatNumber, svgElement } from "../dom.js";
import { axisLabels, LABEL_SIZE, LEFT, TOP } from "./axes.js";

const MOST_CELLS = 4096; // if there are more cells, the SVG contains an image instead of rectangles
const MOST_LABELS = 128; // tokens of a side that are labelled in the figure, which grows if they need space
const LARGEST_SIDE = 2400; // pixels of a side of the map that has grown
const IMAGE_SIDE = 1024; // pixels of an image of cells: each cell is a square of as many pixels as fit
const FONT_SIZE = 11;
const GAP = 5; // pixels between a label and the map
const LINE = 16; // pixels of a line of text
const MARGIN = 8; // pixels around the figure
const SCALE_WIDTH = 120;
const SCALE_STEPS = 40;
const TOKEN_FONT = "ui-monospace, 'DejaVu Sans Mono', monospace";
const TEXT_FONT = "system-ui, 'DejaVu Sans', sans-serif";

// Draws the figure of what `map` shows now. `title` is its first line; `hideSinks`: whether the map is without its sinks.
export function mapFigure(map, title, hideSinks) {
  const screen = map.geometry();
  const screenPart = visiblePart(screen);
  const geometry = enlarged(screen, labelFactor(screen, screenPart));
  const style = getComputedStyle(map.canvas);
  const part = visiblePart(geometry);
  const queries = axisLabels(geometry, "queries", map.label.bind(map));
  const keys = axisLabels(geometry, "keys", map.label.bind(map));

  // The margins that the labels need.
  const keyWidth = widest(keys.items, fontOf(keys));
  const keyHeight = keys.hasLabels ? keyWidth : FONT_SIZE;
  const left = MARGIN + LINE + widest(queries.items, fontOf(queries)) + GAP;
  const top = MARGIN + 2 * LINE + keyHeight + GAP;
  const what = hideSinks ? "weight, sinks hidden" : "weight (a row sums to 1)";
  let pooled = "";
  if (map.source.isPooled) pooled = ", pooled, mean per key";
  else if (geometry.level > 0) pooled = `, pooled, sum over ${2 ** geometry.level} keys`;
  const scaleText = `${what}${pooled}, square-root scale`;
  const scaleLine = SCALE_WIDTH + GAP + textWidth(scaleText, TEXT_FONT);
  const maximumText = formatNumber(map.source.colourMaximum(geometry.level));
  const overhang = keys.hasLabels ? 0 : keyWidth / 2; // an index is centred on its key
  const content = Math.max(part.width + overhang, scaleLine + GAP, textWidth(title, TEXT_FONT));
  const width = Math.ceil(left + content + MARGIN);
  const height = Math.ceil(top + part.height + 3 * LINE + MARGIN);

  const svg = svgElement("svg", {
    xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height,
    "font-family": TEXT_FONT, "font-size": FONT_SIZE, fill: style.getPropertyValue("--ink"),
  });
  svg.append(svgElement("rect", { width, height, fill: style.getPropertyValue("--ground") }));
  svg.append(svgElement("text", { x: left, y: MARGIN + FONT_SIZE }, title));

  // The map keeps its coordinates of the screen, and is moved to its place in the figure.
  const moved = svgElement("g", { transform: `translate(${left - part.x} ${top - part.y})` });
  if (geometry.level > 0) addImage(moved, part, screenPixels(map.canvas, screen, screenPart));
  else addPlot(moved, map, geometry, part);
  svg.append(moved);
  addLabels(svg, { queries, keys, part, left, top });
  addScale(svg, map, geometry, { left, y: top + part.height + LINE, scaleText, maximumText });
  return { svg, width, height };
}

// How much larger than on the screen the figure must be so that every token in view has a label; 1 if there are too many
// tokens for that.
function labelFactor({ n, m, queryCount, keyCount, cellWidth, cellHeight }, part) {
  let factor = 1;
  for (const { tokens, pixels } of [
    { tokens: (part.rows * queryCount) / n, pixels: part.rows * cellHeight },
    { tokens: (part.keys * keyCount) / m, pixels: part.keys * cellWidth },
  ]) {
    if (tokens <= MOST_LABELS) factor = Math.max(factor, ((LABEL_SIZE + 1) * tokens) / pixels);
  }
  return factor * Math.max(part.width, part.height) <= LARGEST_SIDE ? factor : 1;
}

// The geometry of the same part of the map, with larger cells.
function enlarged(geometry, factor) {
  return {
    ...geometry,
    width: geometry.width * factor, height: geometry.height * factor,
    cellWidth: geometry.cellWidth * factor, cellHeight: geometry.cellHeight * factor,
    x: (key) => LEFT + (geometry.x(key) - LEFT) * factor,
    y: (row) => TOP + (geometry.y(row) - TOP) * factor,
  };
}

// What is on the screen, in pixels of the canvas and in cells.
function visiblePart({ n, m, x, y, width, height, cellWidth, cellHeight }) {
  const xStart = Math.max(LEFT, x(0));
  const yStart = Math.max(TOP, y(0));
  const firstKey = Math.max(0, Math.floor((LEFT - x(0)) / cellWidth));
  const firstRow = Math.max(0, Math.floor((TOP - y(0)) / cellHeight));
  const endKey = Math.min(m, Math.ceil((LEFT + width - x(0)) / cellWidth));
  const endRow = Math.min(n, Math.ceil((TOP + height - y(0)) / cellHeight));
  return {
    x: xStart, y: yStart, width: Math.min(LEFT + width, x(m)) - xStart, height: Math.min(TOP + height, y(n)) - yStart,
    firstRow, endRow, firstKey, endKey, rows: endRow - firstRow, keys: endKey - firstKey,
  };
}

function fontOf(axis) {
  return axis.hasLabels ? TOKEN_FONT : TEXT_FONT;
}

const measure = document.createElement("canvas").getContext("2d");

function textWidth(text, font) {
  measure.font = `${FONT_SIZE}px ${font}`;
  return measure.measureText(text).width;
}

function widest(items, font) {
  return Math.ceil(Math.max(0, ...items.map(({ text }) => textWidth(text, font))));
}

function addLabels(svg, { queries, keys, part, left, top }) {
  for (const { text, pixel } of queries.items) {
    const attributes = { x: left - GAP, y: top + pixel - part.y + 4, "text-anchor": "end", "font-family": fontOf(queries) };
    svg.append(svgElement("text", { class: "query", ...attributes }, text));
  }
  for (const { text, pixel } of keys.items) {
    const x = left + pixel - part.x;
    const attributes = { class: "key", "font-family": fontOf(keys) };
    if (keys.hasLabels) Object.assign(attributes, { transform: `translate(${x + 4} ${top - GAP}) rotate(-90)` });
    else Object.assign(attributes, { x, y: top - GAP, "text-anchor": "middle" });
    svg.append(svgElement("text", attributes, text));
  }
  svg.append(svgElement("text", { x: left, y: MARGIN + LINE + FONT_SIZE }, "keys →"));
  const middle = top + part.height / 2;
  const turned = `translate(${MARGIN + FONT_SIZE} ${middle}) rotate(-90)`;
  svg.append(svgElement("text", { transform: turned, "text-anchor": "middle" }, "← queries"));
}

function addScale(svg, map, geometry, { left, y, scaleText, maximumText }) {
  const maximum = map.source.colourMaximum(geometry.level);
  const scale = svgElement("g", { class: "scale" });
  const step = SCALE_WIDTH / SCALE_STEPS;
  for (let k = 0; k < SCALE_STEPS; k++) {
    const weight = maximum * ((k + 0.5) / SCALE_STEPS) ** 2;
    const fill = cssColour(weightColour(weight, maximum));
    scale.append(svgElement("rect", { x: left + k * step, y, width: step + 0.2, height: 9, fill }));
  }
  scale.append(
    svgElement("text", { x: left, y: y + 9 + FONT_SIZE }, "0"),
    svgElement("text", { x: left + SCALE_WIDTH, y: y + 9 + FONT_SIZE, "text-anchor": "end" }, `≥ ${maximumText}`),
    svgElement("text", { x: left + SCALE_WIDTH + GAP, y: y + 9 }, scaleText),
  );
  svg.append(scale);
}

function cssColour(pixel) {
  return `rgb(${pixel & 255},${(pixel >> 8) & 255},${(pixel >> 16) & 255})`;
}

// The cells in view, clipped to the plot: the first and the last ones may be visible in part.
function addPlot(parent, map, geometry, part) {
  const plot = svgElement("rect", { x: part.x, y: part.y, width: part.width, height: part.height });
  const clip = svgElement("clipPath", { id: "plot" }, plot);
  const group = svgElement("g", { "clip-path": "url(#plot)", "shape-rendering": "crispEdges" });
  if (part.rows * part.keys <= MOST_CELLS) addCells(group, map, geometry, part);
  else addCellImage(group, map, geometry, part);
  parent.append(svgElement("defs", {}, clip), group);
}

function addCells(group, map, { cellWidth, cellHeight, x, y }, part) {
  for (const { row, key, weight, colour } of cells(map, part)) {
    group.append(svgElement("rect", {
      x: x(key).toFixed(2), y: y(row).toFixed(2), width: cellWidth.toFixed(3), height: cellHeight.toFixed(3),
      fill: cssColour(colour),
    }, svgElement("title", {}, `${row} → ${key}: ${weight}`)));
  }
}

function addCellImage(group, map, { cellWidth, cellHeight, x, y }, part) {
  const canvas = document.createElement("canvas");
  const size = Math.max(1, Math.floor(IMAGE_SIDE / Math.max(part.rows, part.keys)));
  canvas.width = part.keys * size;
  canvas.height = part.rows * size;
  const context = canvas.getContext("2d");
  fillGround(context, map.canvas);
  for (const { row, key, colour } of cells(map, part)) {
    context.fillStyle = cssColour(colour);
    context.fillRect((key - part.firstKey) * size, (row - part.firstRow) * size, size, size);
  }
  const box = {
    x: x(part.firstKey), y: y(part.firstRow), width: part.keys * cellWidth, height: part.rows * cellHeight,
  };
  addImage(group, box, canvas);
}

// The cells in view that are loaded. The colour is the one on the screen, where sinks may be hidden.
function* cells(map, part) {
  const maximum = map.source.colourMaximum(0);
  for (let row = part.firstRow; row < part.endRow; row++) {
    for (let key = part.firstKey; key < part.endKey; key++) {
      const cell = map.read({ row, key });
      const tileX = key >> 8;
      const tileY = row >> 8;
      const tile = map.source.get(0, tileX, tileY);
      if (!cell || !tile) continue;
      const shownValues = map.source.withoutSinks?.(tile, 0, tileX, tileY);
      const shownWeight = shownValues?.[(row & 255) * tile.columns + (key & 255)] ?? cell.value;
      yield { row, key, weight: cell.value, colour: weightColour(shownWeight, maximum) };
    }
  }
}

function addImage(parent, { x, y, width, height }, pixels) {
  parent.append(svgElement("image", {
    x, y, width, height, href: pixels.toDataURL("image/png"), preserveAspectRatio: "none",
    style: "image-rendering: pixelated",
  }));
}

// A pooled map as it is on the screen.
function screenPixels(canvas, { pixelRatio }, part) {
  const copy = document.createElement("canvas");
  copy.width = Math.round(part.width * pixelRatio);
  copy.height = Math.round(part.height * pixelRatio);
  const context = copy.getContext("2d");
  fillGround(context, canvas);
  context.drawImage(canvas, -part.x * pixelRatio, -part.y * pixelRatio);
  return copy;
}

// A transparent image is unreadable on other backgrounds than the page's.
function fillGround(context, canvas) {
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--ground");
  context.fillRect(0, 0, context.canvas.width, context.canvas.height);
}
