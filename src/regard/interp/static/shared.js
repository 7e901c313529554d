// Helpers that do not depend on a page. The offline page contains this file, and the lab imports it.

// From no weight to the largest, in equal steps of lightness; one hue, so that colour-blind people can read it.
export const WEIGHT_COLOURS = {
  light: ["#f4f6fa", "#c9d9f0", "#86aee0", "#3d74c4", "#1b4290", "#0b1f4d"],
  dark: ["#171b24", "#1d3560", "#2a5aa6", "#4a8ce0", "#97c4f7", "#f0f7ff"],
};

// A table of 256 colours between the given ones, as pixels of an image.
export function interpolateColours(colours) {
  const stops = colours.map((text) => parseInt(text.slice(1), 16));
  const bytes = new Uint8ClampedArray(256 * 4).fill(255);
  for (let i = 0; i < 256; i++) {
    const position = Math.min((i / 255) * (stops.length - 1), stops.length - 1.000001);
    const [a, b, t] = [stops[Math.floor(position)], stops[Math.floor(position) + 1], position % 1];
    for (const [c, shift] of [16, 8, 0].entries()) {
      bytes[4 * i + c] = ((a >> shift) & 255) * (1 - t) + ((b >> shift) & 255) * t;
    }
  }
  return new Uint32Array(bytes.buffer);
}

export function svgElement(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// A number with three digits. It has a true minus sign, so that columns line up.
export function formatNumber(x) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (!Number.isFinite(x)) return x > 0 ? "∞" : "−∞";
  const size = Math.abs(x);
  let digits = 3;
  if (size >= 100) digits = 0;
  else if (size >= 10) digits = 1;
  else if (size >= 1) digits = 2;
  const text = size === 0 || size >= 0.001 ? x.toFixed(digits) : x.toPrecision(2);
  return text.replaceAll("-", "−");
}

// The smallest round step (1, 2 or 5 times a power of ten) that is not below `smallest`.
export function roundStep(smallest) {
  let step = 1;
  for (let k = 0; step < smallest; k++) step = [2, 5, 10][k % 3] * 10 ** Math.floor(k / 3);
  return step;
}

// Make line breaks and tabs visible.
export function visibleText(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

// A character with parts in several tokens: "日·1/3". ASCII characters have no parts.
const PART_MARK = /(⟨[^⟩]+⟩|◌\p{M}|[^\x00-\x7f])·(\d+)\/(\d+)/gu;

// The nodes of a token in running text. A character with parts in several tokens is written once, in the first of them,
// and each part has its number in small digits.
export function labelNodes(label) {
  const nodes = [];
  let end = 0;
  for (const match of label.matchAll(PART_MARK)) {
    const [whole, character, number, count] = match;
    const mark = document.createElement("small");
    mark.className = "part";
    mark.textContent = `${number}/${count}`;
    nodes.push(label.slice(end, match.index) + (number === "1" ? character : ""), mark);
    end = match.index + whole.length;
  }
  nodes.push(label.slice(end));
  return nodes;
}

// Whether a label looks like a special token, <s> or [CLS]: it stands apart from the words beside it.
export function isSpecialLabel(label) {
  return /^(<[^<>\s]+>|\[[A-Z0-9_]+\])$/.test(label);
}

const ARROW_DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// An arrow key moves the focus to the nearest of these buttons in its direction on the screen, in every arrangement.
export function moveFocus(event, from, buttons) {
  const direction = ARROW_DIRECTIONS[event.key];
  if (!direction) return;
  event.preventDefault();
  const start = from.getBoundingClientRect();
  let nearest = null;
  let nearestDistance = Infinity;
  for (const button of buttons) {
    if (!button.isConnected || button === from) continue;
    const target = button.getBoundingClientRect();
    const dx = target.left - start.left;
    const dy = target.top - start.top;
    const distance = dx * direction[0] + dy * direction[1];
    const sideways = Math.abs(dx * direction[1]) + Math.abs(dy * direction[0]);
    if (distance < 1 || sideways > start.width / 2 || distance >= nearestDistance) continue;
    nearestDistance = distance;
    nearest = button;
  }
  nearest?.focus();
}
