// Colours of contributions: blue for the prediction, orange against it, stronger for larger numbers.
import { paintSigned } from "../colour.js";

const canvas = document.createElement("canvas");
const context = canvas.getContext("2d", { willReadFrequently: true });

// The background and the text colour of a value, for `style`. The text is light on strong colours of the light theme, and
// dark on strong colours of the dark theme.
export function shadeOf(value, largest) {
  paintSigned(canvas, [value], 1, 1, largest);
  const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
  const luminance = [red, green, blue].map(linear);
  const light = 0.2126 * luminance[0] + 0.7152 * luminance[1] + 0.0722 * luminance[2];
  return { background: `rgb(${red}, ${green}, ${blue})`, color: light > 0.18 ? "#11141a" : "#ffffff" };
}

function linear(channel) {
  const share = channel / 255;
  return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
}

export function largestSize(values) {
  let largest = 0;
  for (const value of values) largest = Math.max(largest, Math.abs(value));
  return largest;
}

// A number with its sign: +0.31, −1.2.
export function signedNumber(value, format) {
  return `${value < 0 ? "−" : "+"}${format(Math.abs(value))}`;
}
