// Drawing: colours, maps on canvases, lines as SVG.

const darkness = matchMedia("(prefers-color-scheme: dark)");
// From no weight to the largest, in equal steps of lightness against either ground; one hue, safe for the colour-blind.
const STOPS = {
  light: ["#f4f6fa", "#c9d9f0", "#86aee0", "#3d74c4", "#1b4290", "#0b1f4d"],
  dark: ["#171b24", "#1d3560", "#2a5aa6", "#4a8ce0", "#97c4f7", "#f0f7ff"],
};
let colours = ramp();

function ramp() {
  const stops = STOPS[darkness.matches ? "dark" : "light"].map((text) => parseInt(text.slice(1), 16));
  const bytes = new Uint8ClampedArray(256 * 4).fill(255);
  for (let i = 0; i < 256; i++) {
    const at = Math.min((i / 255) * (stops.length - 1), stops.length - 1.000001);
    const [a, b, t] = [stops[Math.floor(at)], stops[Math.floor(at) + 1], at % 1];
    for (const [c, shift] of [16, 8, 0].entries()) {
      bytes[4 * i + c] = ((a >> shift) & 255) * (1 - t) + ((b >> shift) & 255) * t;
    }
  }
  return new Uint32Array(bytes.buffer);
}

// Weights as square roots of the darkest: most cells of a head are far below its peak, and would all look alike.
function paint(canvas, picture) {
  const { map, rows, width, darkest } = picture;
  canvas.width = width;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const over = darkest > 0 ? 1 / darkest : 0;
  for (let i = 0; i < map.length; i++) {
    // NaN stays transparent: the hatched ground says that nothing is there.
    if (map[i] === map[i]) pixels[i] = colours[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, map[i]) * over)))];
  }
  context.putImageData(image, 0, 0);
}

function paintScale(canvas) {
  paint(canvas, { map: Float32Array.from({ length: 256 }, (_, i) => (i / 255) ** 2), rows: 1, width: 256, darkest: 1 });
}

function element(kind, classes, text) {
  const made = document.createElement(kind);
  if (classes) made.className = classes;
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawing(kind, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, given] of Object.entries(attributes)) made.setAttribute(name, given);
  return made;
}

// A weight or mean to three digits; a true minus sign, so that columns of numbers line up.
function said(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  const size = Math.abs(x);
  const digits = size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3;
  const text = size === 0 || size >= 0.001 ? x.toFixed(digits) : x.toPrecision(2);
  return text.replaceAll("-", "−");
}

// Round steps (1, 2 or 5 times a power of ten) for at most `most` ticks over `total`.
function tickStep(total, most) {
  let step = 1;
  for (let k = 0; total / step > most; k++) step = [2, 5, 10][k % 3] * 10 ** Math.floor(k / 3);
  return step;
}

function ticks(box, total, side) {
  box.replaceChildren();
  if (total === null) return;
  const step = tickStep(total, 6);
  for (let i = 0; i < total; i += step) {
    const tick = element("span", "", String(i));
    tick.style[side] = `${(100 * (i + 0.5)) / total}%`;
    box.append(tick);
  }
}

const WIDE = 320; // an SVG's own units; it scales to the room there is
const HIGH = 70;

// A curve from `points` (null: a gap), from 0 up to its largest, with a word under the left, middle and right end.
function curve(points, under, fill) {
  const most = Math.max(...points.filter((y) => y !== null), 0);
  const svg = drawing("svg", { viewBox: `0 0 ${WIDE} ${HIGH + 16}`, role: "img" });
  const x = (i) => (points.length === 1 ? WIDE / 2 : (i / (points.length - 1)) * (WIDE - 2) + 1);
  const y = (value) => HIGH - (most > 0 ? value / most : 0) * (HIGH - 15);
  let path = "";
  let on = false;
  points.forEach((value, i) => {
    if (value !== null) path += `${on ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    on = value !== null;
  });
  svg.append(drawing("line", { x1: 0, x2: WIDE, y1: HIGH, y2: HIGH, class: "base" }));
  const closed = `${path}L${x(points.length - 1)} ${HIGH}L${x(0)} ${HIGH}Z`;
  if (fill && path) svg.append(drawing("path", { d: closed, class: "area" }));
  svg.append(drawing("path", { d: path, class: "curve" }));
  const words = [[0, "start"], [WIDE / 2, "middle"], [WIDE, "end"]];
  under.forEach((text, i) => {
    const label = drawing("text", { x: words[i][0], y: HIGH + 13, "text-anchor": words[i][1] });
    label.textContent = text;
    svg.append(label);
  });
  const top = drawing("text", { x: WIDE, y: 9, "text-anchor": "end" });
  top.textContent = said(most);
  svg.append(top);
  return svg;
}
