// When heads took their types: a row a head, coloured by the kinds it is sure to be, from record to record.
import { KIND_COLOURS } from "../colour.js";
import { drawing, element } from "../dom.js";
import { SERIES } from "../plot.js";
import { axis, dragged, MARGIN, nearest, scale, sized } from "./time.js";

const SIDE_BY_SIDE = 3; // kinds of one head at one time, the surest first

export function lanes(kinds) {
  const order = Object.keys(KIND_COLOURS);
  return kinds.slice(0, SIDE_BY_SIDE).sort((a, b) => order.indexOf(a) - order.indexOf(b));
}

export function types(jump) {
  const svg = drawing("svg", { role: "img", "aria-label": "when heads took their types" });
  const box = element("div", { className: "types" }, svg);
  let [data, width, x, row, marked, at, head] = [null, 0, null, 14, null, 0, 0];

  function draw() {
    if (!data || !width) return;
    const many = data.heads.length;
    row = many > 40 ? 9 : many > 20 ? 11 : 15;
    const foot = many * row + 4;
    svg.setAttribute("width", width);
    svg.setAttribute("height", foot + 22);
    svg.replaceChildren();
    x = scale(data.steps, width);
    const shapes = drawing("g", {});
    for (let h = 0; h < many; h++) {
      const [top, tall] = [h * row + 2, row - 3];
      if (h === head) shapes.append(drawing("rect", { class: "picked", x: 0, width, y: top - 1, height: row }));
      const name = drawing("text", { x: MARGIN.left - 6, y: top + tall - (row > 12 ? 1 : 0), "text-anchor": "end" }, data.heads[h].label);
      name.classList.toggle("small", row < 12);
      shapes.append(name);
      for (const [begin, end, kinds] of stretches(h)) {
        const [left, right] = [x(data.steps[begin]), end < data.steps.length ? x(data.steps[end]) : width - MARGIN.right + 6];
        kinds.forEach((kind, k) => {
          const high = tall / kinds.length;
          shapes.append(drawing("rect", { x: left, width: Math.max(0.5, right - left), y: top + k * high, height: high, fill: KIND_COLOURS[kind] }));
        });
      }
      if (h && data.heads[h].layer !== data.heads[h - 1].layer) {
        shapes.append(drawing("line", { class: "rule", x1: 4, x2: width - MARGIN.right, y1: top - 1.5, y2: top - 1.5 }));
      }
    }
    for (const came of data.arrivals) {
      if (came.step === data.steps[0]) continue;
      const kinds = lanes(data.labels[data.steps.indexOf(came.step)]?.[came.at] ?? []);
      const lane = kinds.indexOf(came.kind);
      if (lane < 0) continue;
      const down = came.at * row + 2 + ((lane + 0.5) * (row - 3)) / kinds.length;
      shapes.append(drawing("circle", { cx: x(came.step), cy: down, r: Math.min(2.6, (row - 3) / kinds.length / 2.2) }));
    }
    marked = drawing("line", { class: "marker", y1: 0, y2: foot });
    svg.append(shapes, axis(data.steps, x, foot), marked);
    mark(at);
  }

  // Runs of records with the same kinds, as one rectangle.
  function stretches(h) {
    const found = [];
    for (let s = 0; s < data.steps.length; s++) {
      const kinds = lanes(data.labels[s][h]);
      const before = found.at(-1);
      if (before && before[2].join() === kinds.join()) before[1] = s + 1;
      else found.push([s, s + 1, kinds]);
    }
    return found;
  }

  function mark(record) {
    at = record;
    if (!marked) return;
    marked.setAttribute("x1", x(data.steps[at] ?? 0));
    marked.setAttribute("x2", x(data.steps[at] ?? 0));
  }

  dragged(svg, (across, event) => {
    const down = event.clientY - svg.getBoundingClientRect().top;
    const h = event.type === "pointerdown" ? Math.floor((down - 2) / row) : -1;
    jump(nearest(data.steps, x, across), h >= 0 && h < data.heads.length ? h : null);
  });
  const stop = sized(box, (now) => { width = now; draw(); });
  return { box, stop, mark, draw(next, picked) { [data, head] = [next, picked]; draw(); } };
}

// A head's colour where it is drawn as a line or a dot: its surest kind's at a record; in runs where no head ever took a
// kind, one of its own.
export function colourOf(data, head, record) {
  const kind = data.labels[record]?.[head]?.[0];
  if (kind) return KIND_COLOURS[kind];
  return data.labels.some((step) => step.some((kinds) => kinds.length)) ? "var(--quiet)" : SERIES[data.heads[head].head % SERIES.length];
}

// The kinds with how many heads are of each at a record.
export function legend(data, at) {
  const counts = {};
  for (const kinds of data.labels[at] ?? []) for (const kind of kinds) counts[kind] = (counts[kind] ?? 0) + 1;
  const ever = new Set(data.labels.flat(2));
  return Object.keys(KIND_COLOURS).filter((kind) => ever.has(kind)).map((kind) =>
    element("span", { className: counts[kind] ? "kind" : "kind none" },
      element("i", { style: `background:${KIND_COLOURS[kind]}` }), `${kind} ${counts[kind] ?? 0}`));
}

// What arose, in words; each is a button that goes there.
export function story(data, jump) {
  const came = data.arrivals.filter((one) => one.step > (data.steps[0] ?? 0));
  if (!came.length) return [element("p", { className: "quiet", text: "No head has taken a type that it had not from the start." })];
  return came.map((one) => element("button", {
    type: "button", className: "came", title: `head ${data.heads[one.at].label} is ${one.kind} since step ${one.step}, confidence ${one.confidence.toFixed(2)}`,
    on: { click: () => jump(data.steps.indexOf(one.step), one.at) },
  }, element("i", { style: `background:${KIND_COLOURS[one.kind]}` }), element("b", { text: one.step.toLocaleString("en") }), ` ${data.heads[one.at].label} ${one.kind}`));
}
