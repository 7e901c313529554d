// The picture: one by its name, or drawn over it. A stroke paints, or erases where it begins on ink.
import { element } from "../dom.js";
import { css, draw } from "./maps.js";

const LEVELS = 15;

// "12x12:0f…": a level from 0 to 15 for each pixel.
export function toText(pixels) {
  return `${pixels.length}x${pixels[0].length}:${pixels.flat().map((x) => Math.round(x * LEVELS).toString(16)).join("")}`;
}

export function fromText(text) {
  const found = /^(\d{1,2})x(\d{1,2}):([0-9a-f]+)$/.exec(text);
  if (!found) return null;
  const [height, width] = [Number(found[1]), Number(found[2])];
  if (!height || !width || height > 28 || width > 28 || found[3].length !== height * width) return null;
  const levels = [...found[3]].map((x) => parseInt(x, 16) / LEVELS);
  return Array.from({ length: height }, (_, i) => levels.slice(i * width, (i + 1) * width));
}

// `change(pixels)` after each pixel that was drawn.
export function editor(change) {
  const canvas = element("canvas", { className: "drawn", tabindex: 0, role: "img",
    "aria-label": "the picture: draw with the pointer, or move with arrow keys and press space" });
  let pixels = [[0]];
  let at = null;
  let pen = null;
  const again = () => {
    const marks = at && document.activeElement === canvas ? [{ row: at[0], column: at[1], colour: css("--asked"), width: 1.5 }] : [];
    draw(canvas, pixels.flat(), pixels.length, pixels[0].length, { largest: 1, marks, pixels: 360 });
  };
  const put = (row, column, value) => {
    if (pixels[row][column] === value) return;
    pixels = pixels.map((line, i) => (i === row ? line.map((x, j) => (j === column ? value : x)) : line));
    again();
    change(pixels);
  };
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    const clamp = (x, most) => Math.max(0, Math.min(most - 1, Math.floor(x * most)));
    return [clamp((event.clientY - box.top) / box.height, pixels.length), clamp((event.clientX - box.left) / box.width, pixels[0].length)];
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    at = place(event);
    pen = pixels[at[0]][at[1]] > 0.5 ? 0 : 1;
    put(...at, pen);
  });
  canvas.addEventListener("pointermove", (event) => { if (pen !== null) put(...place(event), pen); });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { pen = null; });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], " ": [0, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    at ??= [0, 0];
    if (event.key === " ") return put(...at, pixels[at[0]][at[1]] > 0.5 ? 0 : 1);
    const clamp = (x, most) => Math.max(0, Math.min(most - 1, x));
    at = [clamp(at[0] + step[0], pixels.length), clamp(at[1] + step[1], pixels[0].length)];
    return again();
  });
  canvas.addEventListener("focus", again);
  canvas.addEventListener("blur", again);
  return { canvas, again, show: (given) => { pixels = given; at = null; again(); } };
}
