// Pictures of heads: all heads at one step, and one head at all steps.
import { darkestOf, KIND_COLOURS, paint } from "../colour.js";
import { element } from "../dom.js";
import { lanes } from "./types.js";

// A stripe in the colours of a head's kinds.
function stripe(kinds) {
  const shown = lanes(kinds).map((kind) => KIND_COLOURS[kind]);
  if (!shown.length) return "var(--rule)";
  const part = 100 / shown.length;
  return `linear-gradient(90deg, ${shown.map((colour, k) => `${colour} ${k * part}% ${(k + 1) * part}%`).join(", ")})`;
}

function draw(canvas, values, [rows, columns]) {
  paint(canvas, values, columns, rows, darkestOf(values));
}

// One stop for the tab key; arrows go from one to the next. `across`: how many stand in a row.
function roving(box, across, pick) {
  box.addEventListener("keydown", (event) => {
    const all = [...box.querySelectorAll("button")];
    const at = all.indexOf(event.target);
    const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -across(), ArrowDown: across(), Home: -at, End: all.length - 1 - at }[event.key];
    if (by === undefined || at < 0 || !all[at + by]) return;
    event.preventDefault();
    event.stopPropagation();
    all[at + by].focus();
    pick(at + by);
  });
}

// All heads, a row a layer.
export function heads(pick) {
  const box = element("div", { className: "heads", role: "group", "aria-label": "all heads at this step" });
  let [cells, across, kept] = [[], 1, null];
  roving(box, () => across, (at) => pick(at));

  function build(data) {
    across = Math.max(1, ...countByLayer(data.heads).values());
    box.style.setProperty("--across", across);
    box.replaceChildren();
    cells = [];
    let layer = -1;
    for (const [at, head] of data.heads.entries()) {
      if (head.layer !== layer) {
        layer = head.layer;
        box.append(element("span", { className: "layer", title: head.path, text: String(layer) }));
      }
      const canvas = element("canvas", {});
      const name = element("span", { className: "name" });
      const cell = element("button", { type: "button", className: "head", on: { click: () => pick(at) } }, element("i", {}), canvas, name);
      cell.style.gridColumn = String(2 + data.heads.slice(0, at).filter((one) => one.layer === layer).length);
      cells.push({ cell, canvas, name });
      box.append(cell);
    }
  }

  return {
    box,
    // `pictures` of a record, its labels, and which head is picked.
    draw(data, record, pictures, of, picked) {
      if (cells.length !== data.heads.length || kept !== data) build((kept = data));
      for (const [at, { cell, canvas, name }] of cells.entries()) {
        const kinds = data.labels[record][at];
        draw(canvas, pictures[at], data.size(at, of));
        cell.firstChild.style.background = stripe(kinds);
        name.textContent = `${data.heads[at].label} ${kinds[0] ?? ""}`;
        cell.setAttribute("aria-label", `head ${data.heads[at].label}: ${kinds.join(", ") || "no type"}`);
        cell.setAttribute("aria-pressed", String(at === picked));
        cell.tabIndex = at === picked ? 0 : -1;
      }
    },
  };
}

function countByLayer(all) {
  const counts = new Map();
  for (const { layer } of all) counts.set(layer, (counts.get(layer) ?? 0) + 1);
  return counts;
}

// One head over time.
export function film(jump) {
  const box = element("div", { className: "film", role: "group", "aria-label": "the head at all recorded steps" });
  let [frames, key] = [[], ""];
  const across = () => {
    const tops = frames.map(({ frame }) => frame.offsetTop);
    return Math.max(1, tops.filter((top) => top === tops[0]).length);
  };
  roving(box, across, (at) => jump(at));

  return {
    box,
    draw(data, head, pictures, of, at, theme) {
      const now = `${data.id} ${head} ${of} ${theme}`;
      if (now !== key || frames.length > pictures.length) {
        box.replaceChildren();
        [frames, key] = [[], now];
      }
      for (let k = frames.length; k < pictures.length; k++) {
        const canvas = element("canvas", {});
        const step = data.steps[k];
        const frame = element("button", {
          type: "button", className: "frame", "aria-label": `step ${step}`, on: { click: () => jump(k) },
        }, element("i", {}), canvas, element("span", { className: "name", text: step.toLocaleString("en") }));
        draw(canvas, pictures[k], data.size(head, of));
        frame.firstChild.style.background = stripe(data.labels[k][head]);
        frames.push({ frame });
        box.append(frame);
      }
      this.mark(at);
    },
    mark(at) {
      for (const [k, { frame }] of frames.entries()) {
        frame.setAttribute("aria-pressed", String(k === at));
        frame.tabIndex = k === at ? 0 : -1;
      }
    },
  };
}

// One head, large.
export function large(canvas, data, head, pictures, of) {
  draw(canvas, pictures[head], data.size(head, of));
}
