// Lines over the steps of a run, with a marker at the selected step. Not drawn by Plotly: the marker must follow the step
// slider at once, and all charts of the page share one axis.
import { element, formatNumber, svgElement } from "../dom.js";
import { MARGIN, gapMarks, nearestStep, observeWidth, onDrag, placeMarker, stepAxis, stepScale } from "./step_axis.js";

const NEAR = 24; // pixels from a line within which the pointer selects it

// `label` names the chart for screen readers; `select(record)` is called when the chart is pressed.
export function createLineChart(label, height, select) {
  const tip = element("div", { className: "tip", hidden: true });
  const svg = svgElement("svg", { height, role: "img", "aria-label": label });
  const box = element("div", { className: "lines" }, svg, tip);
  const bottom = height - 22;
  let content = null; // { steps, axisSteps, record, lines, gaps }
  let x = null; // scales
  let y = null;
  let marker = null;

  function draw() {
    const { width } = size;
    if (!content || !width) return;
    svg.setAttribute("width", width);
    svg.replaceChildren();
    x = stepScale(content.axisSteps, width);
    const ticks = setVerticalScale();
    const axis = svgElement("g", { class: "axis" });
    for (const tick of ticks) {
      axis.append(
        svgElement("line", { class: "rule", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        svgElement("text", { x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, tickLabel(tick, ticks)));
    }
    svg.append(axis, gapMarks(content.gaps, x, 4, bottom), stepAxis(content.axisSteps, x, bottom));
    for (const line of content.lines) {
      line.path = svgElement("path", { d: pathOf(line.points), class: line.class ?? "", stroke: line.colour });
      svg.append(line.path);
      // A path of one point is invisible.
      const [step, value] = line.points[0] ?? [0, NaN];
      if (line.points.length === 1 && Number.isFinite(value)) {
        svg.append(svgElement("circle", { cx: x(step), cy: y(value), r: 2.5, fill: line.colour }));
      }
    }
    marker = svgElement("line", { class: "marker", y1: 4, y2: bottom });
    svg.append(marker);
    mark(content.record);
  }

  // Set `y` so that all values and the outer ticks fit. Returns the ticks.
  function setVerticalScale() {
    let low = Infinity;
    let high = -Infinity;
    for (const { points } of content.lines) {
      for (const [, value] of points) {
        if (!Number.isFinite(value)) continue;
        low = Math.min(low, value);
        high = Math.max(high, value);
      }
    }
    if (low > high) {
      low = 0; // there are no values
      high = 1;
    }
    if (high - low < 1e-9) {
      low -= 0.5;
      high += 0.5;
    }
    const ticks = roundTicks(low, high);
    low = Math.min(low, ticks[0]);
    high = Math.max(high, ticks.at(-1));
    y = (value) => bottom - ((value - low) / (high - low)) * (bottom - 8);
    return ticks;
  }

  // The path is interrupted where a value is missing.
  function pathOf(points) {
    let path = "";
    let command = "M";
    for (const [step, value] of points) {
      if (Number.isFinite(value)) {
        path += `${command}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
        command = "L";
      } else {
        command = "M";
      }
    }
    return path;
  }

  function mark(record) {
    if (!content || !marker) return;
    content.record = record;
    placeMarker(marker, x(content.steps[record] ?? 0));
  }

  // Show the value of the line under the pointer.
  function hover(event) {
    if (!x || !content.lines.length) return;
    const bounds = svg.getBoundingClientRect();
    const pointerX = event.clientX - bounds.left;
    const pointerY = event.clientY - bounds.top;
    let nearest = null;
    let nearestDistance = NEAR;
    for (const line of content.lines) {
      if (!line.points.length) continue;
      const index = nearestStep(line.points.map((point) => point[0]), x, pointerX);
      const distance = Math.abs(y(line.points[index][1]) - pointerY);
      if (distance < nearestDistance) {
        nearestDistance = distance;
        nearest = { line, index };
      }
    }
    for (const line of content.lines) line.path.classList.toggle("hovered", line === nearest?.line);
    tip.hidden = !nearest;
    if (!nearest) return;
    const [step, value] = nearest.line.points[nearest.index];
    tip.textContent = `${nearest.line.label}: ${formatNumber(value)} at step ${step.toLocaleString("en")}`;
    tip.style.left = `${Math.max(0, Math.min(x(step) + 8, size.width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${Math.max(0, y(value) - 30)}px`;
  }

  svg.addEventListener("pointermove", hover);
  svg.addEventListener("pointerleave", () => {
    tip.hidden = true;
    for (const line of content?.lines ?? []) line.path?.classList.remove("hovered");
  });
  onDrag(svg, (pixel) => {
    if (x) select(nearestStep(content.steps, x, pixel));
  });
  const size = observeWidth(box, draw);
  return {
    box,
    stop: size.stop,
    mark,
    // `steps` are the recorded ones; `lines` are [{ label, colour, class, points: [[step, value]] }]; `gaps` are pairs
    // of steps without records between them. The axis ends at `lastStep` if that is after the last record.
    draw({ steps, record, lines, gaps = [], lastStep = 0 }) {
      const axisSteps = lastStep > (steps.at(-1) ?? 0) ? [...steps, lastStep] : steps;
      content = { steps, axisSteps, record, lines, gaps };
      draw();
    },
  };
}

// About five ticks at 1, 2 or 5 times a power of ten.
function roundTicks(low, high) {
  const roughDistance = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(roughDistance));
  const distance = unit * [1, 2, 5, 10].find((factor) => factor * unit >= roughDistance);
  const ticks = [];
  for (let i = Math.ceil(low / distance - 1e-9); i * distance <= high + 1e-9 * distance; i++) ticks.push(i * distance);
  return ticks;
}

function tickLabel(tick, ticks) {
  const distance = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  const digits = Math.min(6, Math.max(0, -Math.floor(Math.log10(distance) + 1e-9)));
  return tick.toFixed(digits).replace("-", "−");
}
