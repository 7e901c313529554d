// Time as all charts of this room share it: by the logarithm of the step, 0 before 1; or evenly.
import { drawing } from "../dom.js";

export const MARGIN = { left: 46, right: 10 };
const BEFORE = 0.3; // decades between 0 and 1
let even = false;

export function setEven(on) {
  even = on;
}

export function place(step) {
  if (even) return step;
  return step < 1 ? BEFORE * (step - 1) : Math.log10(step);
}

export function scale(steps, width) {
  const [first, last] = [place(steps[0] ?? 0), place(Math.max(steps.at(-1) ?? 1, 1))];
  const over = (width - MARGIN.left - MARGIN.right) / Math.max(last - first, 1e-9);
  return (step) => MARGIN.left + (place(step) - first) * over;
}

// The record whose step stands nearest to a place on the screen.
export function nearest(steps, x, at) {
  let best = 0;
  for (let i = 1; i < steps.length; i++) if (Math.abs(x(steps[i]) - at) < Math.abs(x(steps[best]) - at)) best = i;
  return best;
}

export function ticks(steps) {
  const last = Math.max(steps.at(-1) ?? 1, 1);
  if (even) {
    const unit = 10 ** Math.floor(Math.log10(last / 4));
    const by = Math.max(1, unit * [1, 2, 5, 10].find((times) => times * unit >= last / 4.5));
    return Array.from({ length: 1 + Math.floor(last / by) }, (_, k) => k * by);
  }
  const all = [0, ...Array.from({ length: 1 + Math.floor(Math.log10(last)) }, (_, k) => 10 ** k)];
  return [...all.filter((tick) => tick >= (steps[0] ?? 0) && tick <= last / 2), last];
}

// The axis at the foot of a chart.
export function axis(steps, x, y) {
  const group = drawing("g", { class: "axis" });
  for (const tick of ticks(steps)) {
    group.append(
      drawing("line", { x1: x(tick), x2: x(tick), y1: y, y2: y + 4 }),
      drawing("text", { x: x(tick), y: y + 15, "text-anchor": tick === steps.at(-1) ? "end" : "middle" }, tick.toLocaleString("en")),
    );
  }
  return group;
}

// Calls `draw(width)` now and whenever the box has another width.
export function sized(box, draw) {
  let before = 0;
  const watch = new ResizeObserver(() => {
    const width = Math.floor(box.clientWidth);
    if (width && width !== before) draw((before = width));
  });
  watch.observe(box);
  return () => watch.disconnect();
}

// Press and drag over a drawing: `jump(x)` in its own pixels.
export function dragged(svg, jump) {
  const told = (event) => jump(event.clientX - svg.getBoundingClientRect().left, event);
  svg.addEventListener("pointerdown", (event) => {
    if (event.button) return;
    svg.setPointerCapture(event.pointerId);
    told(event);
  });
  svg.addEventListener("pointermove", (event) => { if (event.buttons & 1 && svg.hasPointerCapture(event.pointerId)) told(event); });
}
