// Kernels by name for any side, and a grid of inputs in which a kernel can be edited.
import { element } from "../dom.js";
import { signedColour } from "./value_maps.js";

export const SIDES = [1, 2, 3, 4, 5, 7];
export const NAMES = ["identity", "blur", "edge across", "edge down", "sharpen", "emboss", "random"];
const LARGEST_ENTRY = 1000;

export function isEntry(value) {
  return Number.isFinite(value) && Math.abs(value) <= LARGEST_ENTRY;
}

// A square matrix with the entries `entry(row, column)`.
function matrix(side, entry) {
  const rows = [];
  for (let i = 0; i < side; i++) rows.push(Array.from({ length: side }, (_, j) => entry(i, j)));
  return rows;
}

function binomialRow(side) {
  let row = [1];
  while (row.length < side) row = [...row, 0].map((value, i) => value + (row[i - 1] ?? 0));
  return row;
}

// The index of the tap at the pixel itself. An even kernel reaches further to the right and down.
function middleIndex(side) {
  return Math.floor((side - 1) / 2);
}

function gaussian() {
  return Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random());
}

export function namedKernel(name, side) {
  const smooth = binomialRow(side);
  const total = smooth.reduce((sum, value) => sum + value, 0);
  const slope = (i) => i - (side - 1) / 2;
  const steepness = smooth.reduce((sum, value, i) => sum + value * Math.abs(slope(i)), 0) || 1;
  const middle = middleIndex(side);

  const identity = (i, j) => Number(i === middle && j === middle);
  const blur = (i, j) => (smooth[i] * smooth[j]) / total ** 2;
  const edge = (i, j) => (smooth[i] / total) * ((smooth[j] * slope(j)) / steepness);
  const relief = (i, j) => (side > 1 ? (slope(i) + slope(j)) / side ** 2 : 0);
  const entries = {
    identity,
    blur,
    "edge across": edge,
    "edge down": (i, j) => edge(j, i),
    sharpen: (i, j) => 2 * identity(i, j) - blur(i, j),
    emboss: (i, j) => identity(i, j) + relief(i, j),
    random: () => gaussian() / side,
  };
  return matrix(side, (i, j) => Math.round(entries[name](i, j) * 1000) / 1000); // three digits fit into the grid
}

// The same taps around the middle, with another side. New taps are 0.
export function resizedKernel(kernel, side) {
  const shift = middleIndex(kernel.length) - middleIndex(side);
  return matrix(side, (i, j) => kernel[i + shift]?.[j + shift] ?? 0);
}

// `onChange(kernel)` is called when an entry is edited.
export function createKernelGrid(onChange) {
  const box = element("div", { className: "grid", role: "group", "aria-label": "kernel" });
  let kernel = [];

  function build(side) {
    box.style.setProperty("--side", side);
    box.replaceChildren();
    for (let row = 0; row < side; row++) {
      for (let column = 0; column < side; column++) box.append(createInput(row, column));
    }
  }

  function createInput(row, column) {
    const input = element("input", {
      type: "number", step: 0.1, min: -LARGEST_ENTRY, max: LARGEST_ENTRY,
      "aria-label": `kernel, row ${row + 1}, column ${column + 1}`,
    });
    input.addEventListener("input", () => {
      const value = Number(input.value);
      if (input.value === "" || !isEntry(value)) return;
      kernel = kernel.map((entries) => [...entries]); // the page may still hold the last kernel
      kernel[row][column] = value;
      colour();
      onChange(kernel);
    });
    return input;
  }

  function colour() {
    const entries = kernel.flat();
    const largest = Math.max(...entries.map(Math.abs), 1e-9);
    for (const [i, input] of [...box.children].entries()) {
      const colours = signedColour(entries[i] / largest);
      input.style.background = colours.background;
      input.style.color = colours.text;
    }
  }

  box.show = (newKernel) => {
    if (newKernel.length !== kernel.length) build(newKernel.length);
    kernel = newKernel.map((entries) => [...entries]);
    const entries = kernel.flat();
    for (const [i, input] of [...box.children].entries()) {
      if (input !== document.activeElement) input.value = entries[i]; // do not disturb the user's typing
    }
    colour();
  };
  box.colour = colour;
  return box;
}
