// Lines over the steps of a run, with the marker of the step that is looked at. Drawn here and not by Plotly: the marker
// has to keep up with the scrubber, and all charts of the room share one axis.
import { drawing, element, said } from "../dom.js";
import { axis, dragged, MARGIN, nearest, scale, sized } from "./time.js";

const NEAR = 24; // pixels from a line at which it is named

// `jump(record)` is called when a place is clicked; `label` names the chart for screen readers.
export function chart(label, height, jump) {
  const tip = element("div", { className: "tip", hidden: true });
  const svg = drawing("svg", { height, role: "img", "aria-label": label });
  const box = element("div", { className: "lines" }, svg, tip);
  let [given, width, x, y, marked] = [null, 0, null, null, null];

  function draw() {
    if (!given || !width) return;
    svg.setAttribute("width", width);
    x = scale(given.steps, width);
    const all = given.lines.flatMap((line) => line.points.map((point) => point[1])).filter(Number.isFinite);
    let [low, high] = all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
    if (given.zero) low = Math.min(0, low);
    if (high - low < 1e-9) [low, high] = [low - 0.5, high + 0.5];
    const marks = round(low, high);
    [low, high] = [Math.min(low, marks[0]), Math.max(high, marks.at(-1))];
    const foot = height - 22;
    y = (value) => foot - ((value - low) / (high - low)) * (foot - 8);
    svg.replaceChildren();
    const grid = drawing("g", { class: "axis" });
    for (const mark of marks) {
      grid.append(
        drawing("line", { class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(mark), y2: y(mark) }),
        drawing("text", { x: MARGIN.left - 6, y: y(mark) + 4, "text-anchor": "end" }, tidy(mark, marks)),
      );
    }
    svg.append(grid, axis(given.steps, x, foot));
    for (const line of given.lines) {
      const path = drawing("path", { d: traced(line.points), class: line.class ?? "", stroke: line.colour });
      line.path = path;
      svg.append(path);
      if (line.points.length === 1 && Number.isFinite(line.points[0][1])) {
        svg.append(drawing("circle", { cx: x(line.points[0][0]), cy: y(line.points[0][1]), r: 2.5, fill: line.colour }));
      }
    }
    marked = drawing("line", { class: "marker", y1: 4, y2: foot });
    svg.append(marked);
    mark(given.at);
  }

  function traced(points) {
    let [path, pen] = ["", "M"];
    for (const [step, value] of points) {
      if (Number.isFinite(value)) {
        path += `${pen}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        pen = "L";
      } else pen = "M";
    }
    return path;
  }

  function mark(record) {
    if (!given || !marked) return;
    given.at = record;
    const at = x(given.steps[record] ?? 0);
    marked.setAttribute("x1", at);
    marked.setAttribute("x2", at);
  }

  function hover(event) {
    if (!x || !given.lines.length) return;
    const bounds = svg.getBoundingClientRect();
    const [across, down] = [event.clientX - bounds.left, event.clientY - bounds.top];
    let best = null;
    for (const line of given.lines) {
      if (!line.points.length) continue;
      const k = nearest(line.points.map((point) => point[0]), x, across);
      const away = Math.abs(y(line.points[k][1]) - down);
      if (away < (best?.away ?? NEAR)) best = { line, k, away };
    }
    for (const line of given.lines) line.path.classList.toggle("hovered", line === best?.line);
    tip.hidden = !best;
    if (!best) return;
    const [step, value] = best.line.points[best.k];
    tip.textContent = `${best.line.label}: ${said(value)} at step ${step.toLocaleString("en")}`;
    tip.style.left = `${Math.max(0, Math.min(x(step) + 8, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, y(value) - 30)}px`;
  }

  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    for (const line of given?.lines ?? []) line.path?.classList.remove("hovered");
  });
  dragged(svg, (at) => { if (x) jump(nearest(given.steps, x, at)); });
  const stop = sized(box, (now) => { width = now; draw(); });
  // `lines`: [{ label, colour, class, points: [[step, value]] }], over the recorded `steps`.
  return { box, stop, mark, draw(next) { given = { at: 0, ...next }; draw(); } };
}

function round(low, high) {
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find((times) => times * unit >= rough);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; k++) found.push(k * step);
  return found;
}

function tidy(mark, marks) {
  const step = marks.length > 1 ? marks[1] - marks[0] : 1;
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
  return mark.toFixed(digits).replace("-", "−");
}
