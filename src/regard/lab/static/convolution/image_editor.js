// An image that can be drawn on. A stroke paints, or erases if it starts on a painted pixel.
import { element } from "../dom.js";
import { cellByKey, cellUnder, cssColour, drawValues } from "./value_maps.js";

const LARGEST_SIDE = 28;
const LEVELS = 15;

// "12x12:0f…": one level from 0 to 15 per pixel.
export function imageToText(pixels) {
  const digits = pixels.flat().map((value) => Math.round(value * LEVELS).toString(16));
  return `${pixels.length}x${pixels[0].length}:${digits.join("")}`;
}

// Returns null if the text is not an image.
export function imageFromText(text) {
  const match = /^(\d{1,2})x(\d{1,2}):([0-9a-f]+)$/.exec(text);
  if (!match) return null;
  const height = Number(match[1]);
  const width = Number(match[2]);
  const digits = match[3];
  if (!height || !width || height > LARGEST_SIDE || width > LARGEST_SIDE) return null;
  if (digits.length !== height * width) return null;
  const rows = [];
  for (let i = 0; i < height; i++) {
    const row = [...digits.slice(i * width, (i + 1) * width)];
    rows.push(row.map((digit) => parseInt(digit, 16) / LEVELS));
  }
  return rows;
}

// `onChange(pixels)` is called after each pixel that is drawn.
export function createImageEditor(onChange) {
  const canvas = element("canvas", {
    className: "drawn", tabindex: 0, role: "img",
    "aria-label": "the image: draw with the pointer, or move with the arrow keys and press the space bar",
  });
  let pixels = [[0]];
  let selected = null; // the pixel that the keyboard changes
  let pen = null; // the value that the stroke draws

  const size = () => [pixels.length, pixels[0].length];

  function redraw() {
    const marks = [];
    if (selected && document.activeElement === canvas) {
      marks.push({ row: selected[0], column: selected[1], colour: cssColour("--asked"), width: 1.5 });
    }
    drawValues(canvas, pixels.flat(), ...size(), { largest: 1, marks, pixels: 360 });
  }

  function setPixel([row, column], value) {
    if (pixels[row][column] === value) return;
    pixels = pixels.map((line) => [...line]); // the page may still hold the last image
    pixels[row][column] = value;
    redraw();
    onChange(pixels);
  }

  function invertedValue([row, column]) {
    return pixels[row][column] > 0.5 ? 0 : 1;
  }

  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    selected = cellUnder(event, canvas, ...size());
    pen = invertedValue(selected);
    setPixel(selected, pen);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (pen !== null) setPixel(cellUnder(event, canvas, ...size()), pen);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => {
      pen = null;
    });
  }
  canvas.addEventListener("keydown", (event) => {
    const start = selected ?? [0, 0];
    const next = cellByKey(event, start, ...size());
    if (!next && event.key !== " ") return;
    event.preventDefault();
    selected = next ?? start;
    if (next) redraw();
    else setPixel(selected, invertedValue(selected));
  });
  canvas.addEventListener("focus", redraw);
  canvas.addEventListener("blur", redraw);

  function show(newPixels) {
    pixels = newPixels;
    selected = null;
    redraw();
  }

  return { canvas, redraw, show };
}
