// Small maps of numbers, a cell each, with outlines over them; a pixel is picked with pointer or arrow keys.
import { paint, paintSigned } from "../colour.js";
import { element } from "../dom.js";

const PIXELS = 560;
const swatch = document.createElement("canvas");
const read = document.createElement("canvas");
read.getContext("2d", { willReadFrequently: true });

// A colour for a number from −1 to 1, and one of ink that can be read on it.
export function signedColour(share) {
  paintSigned(read, [share], 1, 1, 1);
  const [r, g, b] = read.getContext("2d").getImageData(0, 0, 1, 1).data;
  return [`rgb(${r}, ${g}, ${b})`, 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#10131a" : "#ffffff"];
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

// Cells onto a canvas, and `marks` over them: { row, column, rows = 1, columns = 1, colour, width, dash, halo }.
export function draw(canvas, values, height, width, { largest, signed = true, marks = [], pixels = PIXELS }) {
  const cell = Math.max(2, Math.floor(pixels / Math.max(height, width)));
  const small = signed ? paintSigned(swatch, values, width, height, largest) : paint(swatch, values, width, height, largest);
  canvas.width = cell * width;
  canvas.height = cell * height;
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = false;
  context.drawImage(small, 0, 0, canvas.width, canvas.height);
  for (const mark of marks) {
    const line = Math.max(1, Math.round((mark.width ?? 1) * (pixels / 280)));
    const outline = (inset, width, colour) => {
      context.lineWidth = width;
      context.strokeStyle = colour;
      context.strokeRect(mark.column * cell + inset, mark.row * cell + inset,
        (mark.columns ?? 1) * cell - 2 * inset, (mark.rows ?? 1) * cell - 2 * inset);
    };
    context.setLineDash(mark.dash ? [3 * line, 2 * line] : []);
    if (mark.halo) outline(1.5 * line, line, mark.halo); // seen on light cells and on dark ones
    outline(line / 2, line, mark.colour);
  }
}

// A titled map. `pick(row, column, lock)`: hovering previews, a click or an arrow key locks; `pick(null)`: hovering ends.
export function map(title, { pick = null, name }) {
  const canvas = element("canvas", { tabindex: pick ? 0 : null, role: "img", "aria-label": title });
  const under = element("small");
  const box = element("figure", { className: "map", dataset: { map: name } }, element("figcaption", { text: title }), canvas, under);
  let shown = null;
  let marks = [];
  let at = [0, 0];
  const again = () => {
    if (shown) draw(canvas, shown.rows.flat(), shown.rows.length, shown.rows[0].length, { ...shown, marks });
  };
  box.show = (rows, options = {}) => { shown = { rows, ...options }; again(); };
  box.mark = (given, picked = at) => { marks = given; at = picked; again(); };
  box.say = (text) => { under.textContent = text; };
  box.again = again;
  if (!pick) return box;
  const place = (event) => {
    const { left, top, width, height } = canvas.getBoundingClientRect();
    const [rows, columns] = [shown.rows.length, shown.rows[0].length];
    const clamp = (x, most) => Math.max(0, Math.min(most - 1, Math.floor(x * most)));
    return [clamp((event.clientY - top) / height, rows), clamp((event.clientX - left) / width, columns)];
  };
  canvas.addEventListener("pointermove", (event) => { if (shown && event.pointerType === "mouse") pick(...place(event), false); });
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") pick(null); });
  canvas.addEventListener("click", (event) => { if (shown) pick(...place(event), true); });
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !shown) return;
    event.preventDefault();
    const clamp = (x, most) => Math.max(0, Math.min(most - 1, x));
    pick(clamp(at[0] + step[0], shown.rows.length), clamp(at[1] + step[1], shown.rows[0].length), true);
  });
  return box;
}
