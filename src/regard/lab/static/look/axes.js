// The axes of a map: token indices, or token labels if there is space for every one.
import { roundStep } from "../shared.js";

export const LEFT = 70; // pixels for the labels of the queries
export const TOP = 50; // pixels for the labels of the keys
export const RIGHT = 30; // pixels for the end of the last label of a key, which is rotated
export const LABEL_SIZE = 11; // pixels that a label needs
const LONGEST = 64; // pixels
const INDEX_SPACE = { queries: 26, keys: 44 }; // pixels between two indices

// The labels of one side ("queries" or "keys") that are in view: { hasLabels, items: [{ index, text, pixel }] }. `index`
// is that of the token, also on a pooled map, whose cells cover several tokens. `label(side, index)` returns the label of
// a token, or nothing.
export function axisLabels(geometry, side, label) {
  const isQueries = side === "queries";
  const cells = isQueries ? geometry.n : geometry.m;
  const count = isQueries ? geometry.queryCount : geometry.keyCount;
  const pixelOf = isQueries ? geometry.y : geometry.x;
  const low = isQueries ? TOP : LEFT;
  const tokenSize = ((isQueries ? geometry.cellHeight : geometry.cellWidth) * cells) / count;
  const hasLabels = tokenSize >= LABEL_SIZE;
  const step = hasLabels ? 1 : roundStep(INDEX_SPACE[side] / tokenSize);
  const high = low + (isQueries ? geometry.height : geometry.width);

  const items = [];
  const first = Math.max(0, Math.floor((low - pixelOf(0)) / tokenSize / step) * step);
  for (let index = first; index < count; index += step) {
    const pixel = pixelOf(((index + 0.5) * cells) / count);
    if (pixel > high) break;
    if (pixel < low) continue;
    const text = (hasLabels && label(side, index)) || String(index);
    items.push({ index, pixel, text: text.length > 12 ? `${text.slice(0, 11)}…` : text });
  }
  return { hasLabels, items };
}

// `geometry` is that of the map; `marks` has the cells that are locked or under the pointer.
export function drawAxes(context, geometry, label, marks, style) {
  const { x, y } = geometry;
  const quiet = style.getPropertyValue("--quiet");
  context.textBaseline = "middle";

  function setStyle(hasLabels, isLocked, isHovered) {
    context.font = `${isHovered ? "bold " : ""}11px system-ui, sans-serif`;
    if (isLocked) context.fillStyle = style.getPropertyValue("--asked");
    else context.fillStyle = hasLabels || isHovered ? style.getPropertyValue("--ink") : quiet;
  }

  const queries = axisLabels(geometry, "queries", label);
  context.textAlign = "right";
  for (const { index, text, pixel } of queries.items) {
    setStyle(queries.hasLabels, index === marks.row, index === marks.hover?.row);
    context.fillText(text, Math.max(LEFT, x(0)) - 5, pixel, LONGEST);
  }

  // The labels of keys are rotated; their indices are not.
  const keys = axisLabels(geometry, "keys", label);
  context.textAlign = keys.hasLabels ? "left" : "center";
  for (const { index, text, pixel } of keys.items) {
    setStyle(keys.hasLabels, index === marks.key, index === marks.hover?.key);
    context.save();
    context.translate(pixel, Math.max(TOP, y(0)) - (keys.hasLabels ? 4 : 9));
    if (keys.hasLabels) context.rotate(-Math.PI / 3);
    context.fillText(text, 0, 0, keys.hasLabels ? TOP + 2 : LONGEST);
    context.restore();
  }

  setStyle(false, false, false);
  context.textAlign = "left";
  context.fillText("keys →", 2, 10);
  context.fillText("queries ↓", 2, 24);
}
