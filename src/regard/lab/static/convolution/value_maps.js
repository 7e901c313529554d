// Small maps of numbers with outlines over their cells. A pixel is selected with the pointer or with arrow keys.
import { paint, paintSigned } from "../colour.js";
import { element } from "../dom.js";

const PIXELS = 560; // of the larger side of a canvas
const ARROWS = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
const scratch = document.createElement("canvas"); // one pixel per cell
const colourSample = document.createElement("canvas");
colourSample.getContext("2d", { willReadFrequently: true });

// The colour of a number from −1 to 1, and a text colour that is readable on it.
export function signedColour(share) {
  paintSigned(colourSample, [share], 1, 1, 1);
  const [red, green, blue] = colourSample.getContext("2d").getImageData(0, 0, 1, 1).data;
  const brightness = 0.3 * red + 0.59 * green + 0.11 * blue;
  return { background: `rgb(${red}, ${green}, ${blue})`, text: brightness > 140 ? "#10131a" : "#ffffff" };
}

export function cssColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// The row and column under the pointer, on a canvas of `rows` by `columns` cells.
export function cellUnder(event, canvas, rows, columns) {
  const box = canvas.getBoundingClientRect();
  const row = Math.floor(((event.clientY - box.top) / box.height) * rows);
  const column = Math.floor(((event.clientX - box.left) / box.width) * columns);
  return clampCell(row, column, rows, columns);
}

function clampCell(row, column, rows, columns) {
  return [Math.max(0, Math.min(rows - 1, row)), Math.max(0, Math.min(columns - 1, column))];
}

// The cell that an arrow key leads to; null for other keys.
export function cellByKey(event, [row, column], rows, columns) {
  const step = ARROWS[event.key];
  if (!step) return null;
  return clampCell(row + step[0], column + step[1], rows, columns);
}

// Draw cells and marks over them: { row, column, rows = 1, columns = 1, colour, width, dash, halo }.
export function drawValues(canvas, values, height, width, { largest, signed = true, marks = [], pixels = PIXELS }) {
  if (signed) paintSigned(scratch, values, width, height, largest);
  else paint(scratch, values, width, height, largest);
  const cellSize = Math.max(2, Math.floor(pixels / Math.max(height, width)));
  canvas.width = cellSize * width;
  canvas.height = cellSize * height;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(scratch, 0, 0, canvas.width, canvas.height);
  for (const mark of marks) drawMark(context, mark, cellSize, pixels);
}

function drawMark(context, { row, column, rows = 1, columns = 1, colour, width = 1, dash, halo }, cellSize, pixels) {
  const lineWidth = Math.max(1, Math.round(width * (pixels / 280)));
  const drawOutline = (inset, lineColour) => {
    context.lineWidth = lineWidth;
    context.strokeStyle = lineColour;
    context.strokeRect(
      column * cellSize + inset, row * cellSize + inset, columns * cellSize - 2 * inset, rows * cellSize - 2 * inset);
  };
  context.setLineDash(dash ? [3 * lineWidth, 2 * lineWidth] : []);
  if (halo) drawOutline(1.5 * lineWidth, halo); // makes the mark visible on light and dark cells
  drawOutline(lineWidth / 2, colour);
}

// A map with a title. `onSelect(row, column, lock)` is called when the pointer previews a pixel, and with `lock` when a
// click or an arrow key selects it; `onSelect(null)` when the pointer leaves.
export function createValueMap(title, { name, onSelect = null }) {
  const canvas = element("canvas", { tabindex: onSelect ? 0 : null, role: "img", "aria-label": title });
  const caption = element("small");
  const box = element("figure", { className: "map", dataset: { map: name } },
    element("figcaption", { text: title }), canvas, caption);
  let content = null;
  let marks = [];
  let selected = [0, 0];

  const size = () => [content.rows.length, content.rows[0].length];

  function redraw() {
    if (!content) return;
    const { rows, largest } = content;
    drawValues(canvas, rows.flat(), ...size(), { largest, marks });
  }

  box.show = (rows, largest) => {
    content = { rows, largest };
    redraw();
  };
  box.mark = (newMarks, newSelected = selected) => {
    marks = newMarks;
    selected = newSelected;
    redraw();
  };
  box.setCaption = (text) => {
    caption.textContent = text;
  };
  box.redraw = redraw;
  if (!onSelect) return box;

  canvas.addEventListener("pointermove", (event) => {
    if (content && event.pointerType === "mouse") onSelect(...cellUnder(event, canvas, ...size()), false);
  });
  canvas.addEventListener("pointerleave", (event) => {
    if (event.pointerType === "mouse") onSelect(null);
  });
  canvas.addEventListener("click", (event) => {
    if (content) onSelect(...cellUnder(event, canvas, ...size()), true);
  });
  canvas.addEventListener("keydown", (event) => {
    const cell = content && cellByKey(event, selected, ...size());
    if (!cell) return;
    event.preventDefault();
    onSelect(...cell, true);
  });
  return box;
}
