// The axis of training steps that all charts of the page share: logarithmic, with 0 before 1, or linear.
import { svgElement } from "../dom.js";

export const MARGIN = { left: 46, right: 10 };
const ZERO_WIDTH = 0.3; // decades between step 0 and step 1
let isLinear = false;

export function setLinearSteps(linear) {
  isLinear = linear;
}

function coordinate(step) {
  if (isLinear) return step;
  return step < 1 ? ZERO_WIDTH * (step - 1) : Math.log10(step);
}

// Returns a function that turns a step into pixels.
export function stepScale(steps, width) {
  const first = coordinate(steps[0] ?? 0);
  const last = coordinate(Math.max(steps.at(-1) ?? 1, 1));
  const factor = (width - MARGIN.left - MARGIN.right) / Math.max(last - first, 1e-9);
  return (step) => MARGIN.left + (coordinate(step) - first) * factor;
}

// The index of the step that is nearest to a pixel; `x` is a scale.
export function nearestStep(steps, x, pixel) {
  let nearest = 0;
  for (let i = 1; i < steps.length; i++) {
    if (Math.abs(x(steps[i]) - pixel) < Math.abs(x(steps[nearest]) - pixel)) nearest = i;
  }
  return nearest;
}

function tickSteps(steps) {
  const last = Math.max(steps.at(-1) ?? 1, 1);
  const ticks = [];
  if (isLinear) {
    const unit = 10 ** Math.floor(Math.log10(last / 4));
    const multiple = [1, 2, 5, 10].find((factor) => factor * unit >= last / 4.5);
    const distance = Math.max(1, unit * multiple);
    for (let tick = 0; tick <= last; tick += distance) ticks.push(tick);
    return ticks;
  }
  // Powers of ten, except those too near to the last step.
  const first = steps[0] ?? 0;
  if (first <= 0) ticks.push(0);
  for (let tick = 1; tick <= last / 2; tick *= 10) {
    if (tick >= first) ticks.push(tick);
  }
  ticks.push(last);
  return ticks;
}

// The axis at the height `y` of a chart.
export function stepAxis(steps, x, y) {
  const group = svgElement("g", { class: "axis" });
  for (const tick of tickSteps(steps)) {
    const anchor = tick === steps.at(-1) ? "end" : "middle";
    group.append(
      svgElement("line", { x1: x(tick), x2: x(tick), y1: y, y2: y + 4 }),
      svgElement("text", { x: x(tick), y: y + 15, "text-anchor": anchor }, tick.toLocaleString("en")));
  }
  return group;
}

// Hatched bands over the steps between two records that are far apart: what happened there is not known.
export function gapMarks(gaps, x, top, bottom) {
  const group = svgElement("g", { class: "gaps" });
  for (const [begin, end] of gaps) {
    const text = `no record between step ${begin.toLocaleString("en")} and ${end.toLocaleString("en")}`;
    const left = x(begin) + 1;
    const width = Math.max(1, x(end) - x(begin) - 2);
    const band = svgElement("rect", { x: left, width, y: top, height: bottom - top });
    band.append(svgElement("title", {}, text));
    group.append(band);
    // Slanted lines, 8 pixels apart, that end at the borders of the band.
    for (let start = left - (bottom - top); start < left + width; start += 8) {
      const from = Math.max(start, left);
      const to = Math.min(start + bottom - top, left + width);
      group.append(svgElement("line", { x1: from, y1: bottom - (from - start), x2: to, y2: bottom - (to - start) }));
    }
    if (width > 70) group.append(svgElement("text", { x: left + width / 2, y: top + 12, "text-anchor": "middle" }, "no records"));
  }
  return group;
}

// Call `draw()` at first and whenever the width of the box changes. Returns { width, stop() }.
export function observeWidth(box, draw) {
  const observer = new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (!width || width === size.width) return;
    size.width = width;
    draw();
  });
  const size = { width: 0, stop: () => observer.disconnect() };
  observer.observe(box);
  return size;
}

// Move the vertical line that marks a step to a pixel.
export function placeMarker(marker, pixel) {
  marker.setAttribute("x1", pixel);
  marker.setAttribute("x2", pixel);
}

// Call `move(x, event)` when a chart is pressed, and while the pointer is dragged; x is in pixels of the chart.
export function onDrag(svg, move) {
  const report = (event) => move(event.clientX - svg.getBoundingClientRect().left, event);
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    svg.setPointerCapture(event.pointerId);
    report(event);
  });
  svg.addEventListener("pointermove", (event) => {
    const isPressed = event.buttons & 1;
    if (isPressed && svg.hasPointerCapture(event.pointerId)) report(event);
  });
}
