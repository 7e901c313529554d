// Heads as offsets: one head a tap, laid out as the kernel is; each shows where it looks from one output pixel.
import { element, said } from "../dom.js";
import { css, draw, signedColour } from "./maps.js";

// `point(head)`: the head under the pointer or with the focus, null for none.
export function heads(point) {
  const box = element("div", { className: "heads" });
  const words = element("p", { className: "quiet", role: "status" });
  let side = 0;
  let told = null;

  function built(count) {
    if (count === side) return;
    side = count;
    box.style.setProperty("--side", side);
    box.replaceChildren(...Array.from({ length: side * side }, (_, h) => element("button", {
      type: "button", className: "one", on: { pointerenter: () => see(h), focus: () => see(h), pointerleave: () => see(null), blur: () => see(null) },
    }, element("canvas"), element("small"))));
  }
  function see(h) {
    point(h);
    if (told) words.textContent = h === null ? told.words : describe(h);
  }
  function describe(h) {
    const { shifts, kernel, weights, shape, before, place } = told;
    const [dy, dx] = shifts[h];
    const own = weights[h * shape[1] * shape[2] + (place[0] + dy + before[0]) * shape[2] + place[1] + dx + before[1]];
    return `Head ${h + 1} looks ${arrow(dy, dx)} from its query: weight ${said(own)} there, ${said(1 - own)} beside it; its value counts ${said(kernel.flat()[h])} times.`;
  }

  // weights: all heads' maps on the padded picture, shape [K², height, width]; place: the query's own pixel.
  function show(given) {
    told = given;
    const { weights, shape, kernel, shifts, before, place, picture } = given;
    built(kernel.length);
    const [, height, width] = shape;
    const largest = weights.reduce((a, b) => Math.max(a, b), 0);
    const most = Math.max(...kernel.flat().map(Math.abs), 1e-9);
    [...box.children].forEach((one, h) => {
      const values = weights.subarray(h * height * width, (h + 1) * height * width);
      const marks = [{ row: before[0], column: before[1], rows: picture[0], columns: picture[1], colour: css("--quiet"), width: 2 },
        { row: place[0] + before[0], column: place[1] + before[1], colour: css("--asked"), width: 5 }];
      draw(one.firstChild, values, height, width, { largest, signed: false, marks, pixels: 220 });
      const [dy, dx] = shifts[h];
      one.lastChild.textContent = `${signed(dy)}, ${signed(dx)}`;
      one.setAttribute("aria-label", describe(h));
      one.style.setProperty("--tap", signedColour(kernel.flat()[h] / most)[0]);
    });
    words.textContent = told.words;
  }
  return { box, words, show, again: () => told && show(told) };
}

const signed = (x) => (x > 0 ? `+${x}` : x < 0 ? `−${-x}` : "0");

function arrow(dy, dx) {
  const parts = [];
  if (dy) parts.push(`${Math.abs(dy)} ${dy > 0 ? "down" : "up"}`);
  if (dx) parts.push(`${Math.abs(dx)} ${dx > 0 ? "right" : "left"}`);
  return parts.length ? parts.join(", ") : "at the pixel itself, 0";
}
