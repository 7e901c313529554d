// Kernels by name, for any side, and the grid in which a kernel is written.
import { element } from "../dom.js";
import { signedColour } from "./maps.js";

export const SIDES = [1, 2, 3, 4, 5, 7];
export const NAMES = ["identity", "blur", "edge across", "edge down", "sharpen", "emboss", "random"];

const filled = (side, entry) => Array.from({ length: side }, (_, i) => Array.from({ length: side }, (_, j) => entry(i, j)));
const tidy = (x) => Math.round(x * 1000) / 1000;

function binomial(side) {
  let row = [1];
  while (row.length < side) row = [...row, 0].map((x, i) => x + (row[i - 1] ?? 0));
  return row;
}

// The tap at the pixel itself; an even kernel reaches further to the right and down.
const middle = (side) => Math.floor((side - 1) / 2);

export function named(name, side) {
  const smooth = binomial(side);
  const total = smooth.reduce((a, b) => a + b, 0);
  const slope = (i) => i - (side - 1) / 2;
  const here = (i, j) => Number(i === middle(side) && j === middle(side));
  const blur = (i, j) => (smooth[i] * smooth[j]) / total ** 2;
  const steep = smooth.reduce((sum, x, i) => sum + x * Math.abs(slope(i)), 0) || 1;
  const edge = (i, j) => (smooth[i] / total) * ((smooth[j] * slope(j)) / steep);
  const entries = {
    identity: here, blur, "edge across": edge, "edge down": (i, j) => edge(j, i), sharpen: (i, j) => 2 * here(i, j) - blur(i, j),
    emboss: (i, j) => here(i, j) + (side > 1 ? (slope(i) + slope(j)) / side ** 2 : 0),
    random: () => gauss() / side,
  };
  return filled(side, (i, j) => tidy(entries[name](i, j)));
}

function gauss() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

// Another side: the same taps around the middle, nothing where there were none.
export function resized(kernel, side) {
  const shift = middle(kernel.length) - middle(side);
  return filled(side, (i, j) => kernel[i + shift]?.[j + shift] ?? 0);
}

// A grid of numbers, coloured by what they are. `change(kernel)` at each.
export function grid(change) {
  const box = element("div", { className: "grid", role: "group", "aria-label": "kernel" });
  let kernel = [];
  const colour = () => {
    const largest = Math.max(...kernel.flat().map(Math.abs), 1e-9);
    for (const [at, input] of [...box.children].entries()) {
      const [back, ink] = signedColour(kernel[Math.floor(at / kernel.length)][at % kernel.length] / largest);
      input.style.background = back;
      input.style.color = ink;
    }
  };
  box.show = (given) => {
    if (given.length !== kernel.length) {
      box.style.setProperty("--side", given.length);
      box.replaceChildren(...given.flatMap((row, i) => row.map((_, j) => {
        const input = element("input", { type: "number", step: 0.1, min: -1000, max: 1000, "aria-label": `kernel, row ${i + 1}, column ${j + 1}` });
        input.addEventListener("input", () => {
          const value = Number(input.value);
          if (input.value === "" || !Number.isFinite(value) || Math.abs(value) > 1000) return;
          kernel = kernel.map((line, y) => line.map((x, z) => (y === i && z === j ? value : x)));
          colour();
          change(kernel);
        });
        return input;
      })));
    }
    kernel = given.map((row) => [...row]);
    [...box.children].forEach((input, at) => {
      if (input !== document.activeElement) input.value = kernel[Math.floor(at / kernel.length)][at % kernel.length];
    });
    colour();
  };
  box.colour = colour;
  return box;
}
