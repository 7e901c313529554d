// When heads took their types: one row per head, coloured by its types at every record.
import { HEAD_TYPE_COLOURS } from "../colour.js";
import { element, svgElement } from "../dom.js";
import { SERIES } from "../plot.js";
import { MARGIN, gapMarks, nearestStep, observeWidth, onDrag, placeMarker, stepAxis, stepScale } from "./step_axis.js";

const MOST_TYPES = 3; // of one head at one record
const TYPE_ORDER = Object.keys(HEAD_TYPE_COLOURS);

// The types of a head that are shown: the most confident ones, always in the same order.
export function shownTypes(types) {
  const confident = types.slice(0, MOST_TYPES);
  return confident.sort((a, b) => TYPE_ORDER.indexOf(a) - TYPE_ORDER.indexOf(b));
}

function rowHeight(headCount) {
  if (headCount > 40) return 9;
  return headCount > 20 ? 11 : 15;
}

// `select(record, head)` is called when the chart is pressed; `head` is null if the press was below the rows.
export function createTypeTimeline(select) {
  const svg = svgElement("svg", { role: "img", "aria-label": "when heads took their types" });
  const box = element("div", { className: "types" }, svg);
  let data = null;
  let x = null; // the scale
  let row = 14; // pixels per head
  let marker = null;
  let markedRecord = 0;
  let selectedHead = 0;

  function draw() {
    const { width } = size;
    if (!data || !width) return;
    const headCount = data.heads.length;
    row = rowHeight(headCount);
    const bottom = headCount * row + 4;
    svg.setAttribute("width", width);
    svg.setAttribute("height", bottom + 22);
    x = stepScale(data.steps, width);
    const shapes = svgElement("g", {});
    for (let head = 0; head < headCount; head++) addHead(shapes, head);
    for (const arrival of data.arrivals) addArrival(shapes, arrival);
    marker = svgElement("line", { class: "marker", y1: 0, y2: bottom });
    svg.replaceChildren(shapes, gapMarks(data.gaps, x, 0, bottom), stepAxis(data.steps, x, bottom), marker);
    mark(markedRecord);
  }

  function addHead(shapes, head) {
    const { width } = size;
    const top = head * row + 2;
    const height = row - 3;
    if (head === selectedHead) {
      shapes.append(svgElement("rect", { class: "picked", x: 0, width, y: top - 1, height: row }));
    }
    const baseline = top + height - (row > 12 ? 1 : 0);
    const name = svgElement("text", { x: MARGIN.left - 6, y: baseline, "text-anchor": "end" }, data.heads[head].label);
    name.classList.toggle("small", row < 12);
    shapes.append(name);
    for (const { start, end, types } of intervals(head)) {
      const left = x(data.steps[start]);
      // The types of the last record are drawn a little beyond it, or they would be invisible.
      const right = end < data.steps.length ? x(data.steps[end]) : width - MARGIN.right + 6;
      const typeHeight = height / types.length;
      for (const [i, type] of types.entries()) {
        shapes.append(svgElement("rect", {
          x: left, width: Math.max(0.5, right - left), y: top + i * typeHeight, height: typeHeight,
          fill: HEAD_TYPE_COLOURS[type],
        }));
      }
    }
    const startsLayer = head > 0 && data.heads[head].layer !== data.heads[head - 1].layer;
    if (startsLayer) {
      shapes.append(svgElement("line", { class: "rule", x1: 4, x2: width - MARGIN.right, y1: top - 1.5, y2: top - 1.5 }));
    }
  }

  // A dot where a head took a type during training.
  function addArrival(shapes, arrival) {
    if (arrival.after === null) return;
    const record = data.steps.indexOf(arrival.step);
    const types = shownTypes(data.labels[record]?.[arrival.at] ?? []);
    const index = types.indexOf(arrival.kind);
    if (index < 0) return;
    const typeHeight = (row - 3) / types.length;
    const y = arrival.at * row + 2 + (index + 0.5) * typeHeight;
    shapes.append(svgElement("circle", { cx: x(arrival.step), cy: y, r: Math.min(2.6, typeHeight / 2.2) }));
  }

  // Records in a row with the same types are one interval.
  function intervals(head) {
    const list = [];
    for (let record = 0; record < data.steps.length; record++) {
      const types = shownTypes(data.labels[record][head]);
      const last = list.at(-1);
      if (last && last.types.join() === types.join()) last.end = record + 1;
      else list.push({ start: record, end: record + 1, types });
    }
    return list;
  }

  function mark(record) {
    markedRecord = record;
    if (!marker) return;
    placeMarker(marker, x(data.steps[record] ?? 0));
  }

  onDrag(svg, (pixel, event) => {
    // Only the press selects a head; a drag changes the step alone.
    let head = null;
    if (event.type === "pointerdown") {
      const pressed = Math.floor((event.clientY - svg.getBoundingClientRect().top - 2) / row);
      if (pressed >= 0 && pressed < data.heads.length) head = pressed;
    }
    select(nearestStep(data.steps, x, pixel), head);
  });
  const size = observeWidth(box, draw);
  return {
    box,
    stop: size.stop,
    mark,
    draw(newData, head) {
      data = newData;
      selectedHead = head;
      draw();
    },
  };
}

// The colour of a head in charts: that of its most confident type at a record, or of the type that the user has chosen
// (`data.colourBy`), the paler the lower its confidence. In a run without head types every head has its own colour.
export function headColour(data, head, record) {
  if (data.colourBy) {
    const confidence = data.values.get(confidenceName(data.colourBy))?.rows[record]?.[head] ?? 0;
    return `color-mix(in srgb, ${HEAD_TYPE_COLOURS[data.colourBy]} ${Math.round(100 * confidence)}%, var(--rule))`;
  }
  const type = data.labels[record]?.[head]?.[0];
  if (type) return HEAD_TYPE_COLOURS[type];
  return data.hasTypes ? "var(--quiet)" : SERIES[data.heads[head].head % SERIES.length];
}

// The name of the measure that says how sure a type is.
export function confidenceName(type) {
  return `${type} confidence`;
}

// What the colours of heads may show, as options of a menu.
export function colourOptions() {
  return [["", "most confident type"], ...TYPE_ORDER.map((type) => [type, `confidence: ${type}`])];
}

// A coloured square and a label.
export function legendEntry(colour, label, className = "kind") {
  return element("span", { className }, element("i", { style: `background:${colour}` }), label);
}

// The head types that occur in the run, with the number of heads of each type at a record. A head with several types
// counts for each of them.
export function typeLegend(data, record) {
  const counts = {};
  let unlabelled = 0;
  for (const types of data.labels[record] ?? []) {
    if (!types.length) unlabelled += 1;
    for (const type of types) counts[type] = (counts[type] ?? 0) + 1;
  }
  const occurring = new Set(data.labels.flat(2));
  const entries = [];
  for (const type of TYPE_ORDER) {
    if (!occurring.has(type)) continue;
    const count = counts[type] ?? 0;
    entries.push(legendEntry(HEAD_TYPE_COLOURS[type], `${type} ${count}`, count ? "kind" : "kind none"));
  }
  if (entries.length) {
    const step = data.steps[record];
    const { model_step: modelStep } = data.run;
    const isOther = typeof modelStep === "number" && modelStep !== step;
    const other = isOther ? ` (the model is of step ${modelStep.toLocaleString("en")})` : "";
    const source = `from the record of step ${step.toLocaleString("en")}${other}`;
    const text = `no clear type ${unlabelled} · ${source}; a head may have several types`;
    entries.push(element("span", { className: "quiet", text }));
  }
  return entries;
}

// What the records do not show, then one button per arrival, which goes to its step and head.
export function arrivalButtons(data, select) {
  const nodes = [];
  if (data.run.unknown) nodes.push(element("p", { className: "quiet unknown", text: data.run.unknown }));
  for (const { after, step, at: head, kind: type, confidence, confirmed, text } of data.arrivals) {
    if (after === null) continue;
    const { label } = data.heads[head];
    const title = `head ${label} took the type ${type} ${text}; confidence ${confidence.toFixed(2)}`;
    const steps = after + 1 === step ? [step] : [after, step];
    const range = steps.map((value) => value.toLocaleString("en")).join("–");
    const button = element("button", { type: "button", className: confirmed ? "came" : "came unconfirmed", title },
      element("i", { style: `background:${HEAD_TYPE_COLOURS[type]}` }),
      element("b", { text: confirmed ? range : `${range}?` }),
      ` ${label} ${type}`);
    button.addEventListener("click", () => select(data.steps.indexOf(step), head));
    nodes.push(button);
  }
  return nodes;
}
