// Drawing: colours, maps on canvases, curves as SVG.

const darkScheme = matchMedia("(prefers-color-scheme: dark)");
let colourCodes = colourTable();

function colourTable() {
  return interpolateColours(WEIGHT_COLOURS[darkScheme.matches ? "dark" : "light"]);
}

// Colours follow the square root of a weight: most cells of a head are far below its peak, and would look the same.
function paint(canvas, picture) {
  const { perKey, rows, width, darkest } = picture;
  canvas.width = width;
  canvas.height = rows;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, rows);
  const pixels = new Uint32Array(image.data.buffer);
  const scale = darkest > 0 ? 1 / darkest : 0;
  for (let i = 0; i < perKey.length; i++) {
    // NaN stays transparent: the hatched background shows that there is nothing.
    if (Number.isNaN(perKey[i])) continue;
    const shade = Math.sqrt(Math.min(1, Math.max(0, perKey[i]) * scale));
    pixels[i] = colourCodes[Math.round(255 * shade)];
  }
  context.putImageData(image, 0, 0);
}

function paintScale(canvas) {
  const ramp = Float32Array.from({ length: 256 }, (_, i) => (i / 255) ** 2);
  paint(canvas, { perKey: ramp, rows: 1, width: 256, darkest: 1 });
}

function element(tag, classes, text) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text !== undefined) node.textContent = text;
  return node;
}

function ticks(box, total, side) {
  box.replaceChildren();
  if (total === null) return;
  const step = roundStep(total / 6); // at most six ticks
  for (let i = 0; i < total; i += step) {
    const tick = element("span", "", String(i));
    tick.style[side] = `${(100 * (i + 0.5)) / total}%`;
    box.append(tick);
  }
}

const CURVE_WIDTH = 320; // in the units of the SVG, which scales to the available space
const CURVE_HEIGHT = 70;

// A curve of `points` (null is a gap) from 0 to the largest, with labels under its left end, middle and right end.
function curve(points, labels, fill) {
  const largest = Math.max(...points.filter((y) => y !== null), 0);
  const svg = svgElement("svg", { viewBox: `0 0 ${CURVE_WIDTH} ${CURVE_HEIGHT + 16}`, role: "img" });
  const x = (i) => (points.length === 1 ? CURVE_WIDTH / 2 : (i / (points.length - 1)) * (CURVE_WIDTH - 2) + 1);
  const y = (value) => CURVE_HEIGHT - (largest > 0 ? value / largest : 0) * (CURVE_HEIGHT - 15);
  let path = "";
  let connected = false;
  points.forEach((value, i) => {
    if (value !== null) path += `${connected ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
    connected = value !== null;
  });
  svg.append(svgElement("line", { x1: 0, x2: CURVE_WIDTH, y1: CURVE_HEIGHT, y2: CURVE_HEIGHT, class: "base" }));
  const closed = `${path}L${x(points.length - 1)} ${CURVE_HEIGHT}L${x(0)} ${CURVE_HEIGHT}Z`;
  if (fill && path) svg.append(svgElement("path", { d: closed, class: "area" }));
  svg.append(svgElement("path", { d: path, class: "curve" }));
  const anchors = [[0, "start"], [CURVE_WIDTH / 2, "middle"], [CURVE_WIDTH, "end"]];
  labels.forEach((text, i) => {
    svg.append(svgElement("text", { x: anchors[i][0], y: CURVE_HEIGHT + 13, "text-anchor": anchors[i][1] }, text));
  });
  svg.append(svgElement("text", { x: CURVE_WIDTH, y: 9, "text-anchor": "end" }, formatNumber(largest)));
  return svg;
}
