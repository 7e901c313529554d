// Colours of weights, and maps painted with them.
import { isDark } from "./theme.js";

// From no weight to the largest, in equal steps of lightness against either ground; one hue, safe for the colour-blind.
const STOPS = {
  light: ["#f4f6fa", "#c9d9f0", "#86aee0", "#3d74c4", "#1b4290", "#0b1f4d"],
  dark: ["#171b24", "#1d3560", "#2a5aa6", "#4a8ce0", "#97c4f7", "#f0f7ff"],
};
// Below 0, for differences: from the strongest minus to nothing.
const MINUS = {
  light: ["#6b1d0a", "#b5461f", "#e08a5f", "#f2cbb5", "#f4f6fa"],
  dark: ["#ffb184", "#f08c55", "#c4602f", "#6b3018", "#171b24"],
};
// Kinds of head; told apart by the colour-blind too, and always named beside the colour.
export const KIND_COLOURS = {
  sink: "#7f7f7f", previous: "#0072b2", positional: "#56b4e9", convolution: "#009e73",
  averaging: "#b0a030", induction: "#d55e00", duplicate: "#e69f00", content: "#cc79a7",
};
const made = {};

function ramp(stops) {
  const numbers = stops.map((text) => parseInt(text.slice(1), 16));
  const bytes = new Uint8ClampedArray(256 * 4).fill(255);
  for (let i = 0; i < 256; i++) {
    const at = Math.min((i / 255) * (numbers.length - 1), numbers.length - 1.000001);
    const [a, b, t] = [numbers[Math.floor(at)], numbers[Math.floor(at) + 1], at % 1];
    for (const [c, shift] of [16, 8, 0].entries()) {
      bytes[4 * i + c] = ((a >> shift) & 255) * (1 - t) + ((b >> shift) & 255) * t;
    }
  }
  return new Uint32Array(bytes.buffer);
}

export function colours() {
  const name = isDark() ? "dark" : "light";
  made[name] ??= ramp(STOPS[name]);
  return made[name];
}

function signedColours() {
  const name = isDark() ? "dark" : "light";
  made[`${name} minus`] ??= ramp(MINUS[name]);
  return [made[`${name} minus`], colours()];
}

// Values as square roots of the darkest: most cells of a head are far below its peak, and would all look alike.
// NaN stays transparent: nothing is there.
export function paint(canvas, values, width, height, darkest) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  paintInto(new Uint32Array(image.data.buffer), values, darkest);
  context.putImageData(image, 0, 0);
  return canvas;
}

export function paintInto(pixels, values, darkest) {
  const table = colours();
  const over = darkest > 0 ? 1 / darkest : 0;
  for (let i = 0; i < values.length; i++) {
    const value = values[i];
    if (value === value) pixels[i] = table[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, value) * over)))];
  }
}

// Signed values, linearly: blue above 0, orange below.
export function paintSigned(canvas, values, width, height, largest) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  const [minus, plus] = signedColours();
  const over = largest > 0 ? 1 / largest : 0;
  for (let i = 0; i < values.length; i++) {
    const share = Math.max(-1, Math.min(1, values[i] * over));
    if (share === share) pixels[i] = share < 0 ? minus[Math.round(255 * (1 + share))] : plus[Math.round(255 * share)];
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

// What 99.5% of the cells stay below: one cell that stands out should not leave all others pale.
export function darkestOf(values) {
  const sample = [];
  const step = Math.max(1, Math.floor(values.length / 20000));
  for (let i = 0; i < values.length; i += step) if (values[i] === values[i]) sample.push(values[i]);
  sample.sort((a, b) => a - b);
  return sample.length ? Math.max(sample[Math.floor(0.995 * (sample.length - 1))], sample.at(-1) * 0.05) : 1;
}
