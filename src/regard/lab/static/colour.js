// Colours of weights, and maps that are painted with them.
import { interpolateColours, WEIGHT_COLOURS } from "./shared.js";
import { isDark } from "./theme.js";

// Negative values of differences, from the largest to 0.
const NEGATIVE = {
  light: ["#6b1d0a", "#b5461f", "#e08a5f", "#f2cbb5", "#f4f6fa"],
  dark: ["#ffb184", "#f08c55", "#c4602f", "#6b3018", "#171b24"],
};
// Head types. Colour-blind people can tell the colours apart, and the name always stands beside the colour.
export const HEAD_TYPE_COLOURS = {
  sink: "#7f7f7f", previous: "#0072b2", positional: "#56b4e9", convolution: "#009e73",
  averaging: "#b0a030", induction: "#d55e00", duplicate: "#e69f00", content: "#cc79a7",
};
const tables = {}; // by theme

function colourTable() {
  const name = isDark() ? "dark" : "light";
  tables[name] ??= interpolateColours(WEIGHT_COLOURS[name]);
  return tables[name];
}

function signedColourTables() {
  const name = isDark() ? "dark" : "light";
  tables[`${name} negative`] ??= interpolateColours(NEGATIVE[name]);
  return [tables[`${name} negative`], colourTable()];
}

// The index of a weight in a table of colours. It follows the square root of the weight's share of `maximum`: most
// weights of a head are far below its peak, and would look alike on a linear scale.
function colourIndex(weight, maximum) {
  const share = maximum > 0 ? Math.min(1, Math.max(0, weight) / maximum) : 0;
  return Math.round(255 * Math.sqrt(share));
}

// The colour that `paint` gives a weight, as a pixel.
export function weightColour(weight, maximum) {
  return colourTable()[colourIndex(weight, maximum)];
}

// Paint one pixel per value. NaN stays transparent.
function paintPixels(canvas, values, width, height, colourOf) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  for (let i = 0; i < values.length; i++) {
    if (!Number.isNaN(values[i])) pixels[i] = colourOf(values[i]);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

export function paint(canvas, values, width, height, maximum) {
  const table = colourTable();
  return paintPixels(canvas, values, width, height, (weight) => table[colourIndex(weight, maximum)]);
}

// Paint signed values on a linear scale: blue above 0, orange below.
export function paintSigned(canvas, values, width, height, largest) {
  const [negative, positive] = signedColourTables();
  const factor = largest > 0 ? 1 / largest : 0;
  return paintPixels(canvas, values, width, height, (value) => {
    const share = Math.max(-1, Math.min(1, value * factor));
    if (share < 0) return negative[Math.round(255 * (1 + share))];
    return positive[Math.round(255 * share)];
  });
}

// The value that 99.5% of the cells stay below: one outlier should not make all other cells pale.
export function colourMaximum(values) {
  const sample = [];
  const step = Math.max(1, Math.floor(values.length / 20000));
  for (let i = 0; i < values.length; i += step) if (!Number.isNaN(values[i])) sample.push(values[i]);
  sample.sort((a, b) => a - b);
  if (!sample.length) return 1;
  return Math.max(sample[Math.floor(0.995 * (sample.length - 1))], sample.at(-1) * 0.05);
}
