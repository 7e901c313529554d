// The maps of heads: all heads at one step, and one head at all steps.
import { colourMaximum, HEAD_TYPE_COLOURS, paint } from "../colour.js";
import { element } from "../dom.js";
import { shownTypes } from "./type_timeline.js";

// A stripe in the colours of a head's types.
function stripe(types) {
  const colours = shownTypes(types).map((type) => HEAD_TYPE_COLOURS[type]);
  if (!colours.length) return "var(--rule)";
  const share = 100 / colours.length;
  const stops = colours.map((colour, i) => `${colour} ${i * share}% ${(i + 1) * share}%`);
  return `linear-gradient(90deg, ${stops.join(", ")})`;
}

export function drawMap(canvas, values, [rows, columns]) {
  paint(canvas, values, columns, rows, colourMaximum(values));
}

// The Tab key reaches one button of the box; arrow keys reach the others. `columnCount()` is the buttons per row.
function addArrowKeys(box, columnCount, select) {
  box.addEventListener("keydown", (event) => {
    const buttons = [...box.querySelectorAll("button")];
    const index = buttons.indexOf(event.target);
    const targets = {
      ArrowLeft: index - 1,
      ArrowRight: index + 1,
      ArrowUp: index - columnCount(),
      ArrowDown: index + columnCount(),
      Home: 0,
      End: buttons.length - 1,
    };
    const target = targets[event.key];
    if (target === undefined || index < 0 || !buttons[target]) return;
    event.preventDefault();
    event.stopPropagation();
    buttons[target].focus();
    select(target);
  });
}

function markSelected(buttons, selected) {
  for (const [i, button] of buttons.entries()) {
    button.setAttribute("aria-pressed", String(i === selected));
    button.tabIndex = i === selected ? 0 : -1;
  }
}

// All heads at one step, one row per layer. `select(head)` is called when a head is clicked.
export function createHeadMaps(select) {
  const box = element("div", { className: "heads", role: "group", "aria-label": "all heads at this step" });
  let cells = [];
  let columnCount = 1;
  let builtFor = null;
  addArrowKeys(box, () => columnCount, select);

  function build(data) {
    builtFor = data;
    columnCount = 1;
    cells = [];
    box.replaceChildren();
    let layer = -1;
    let column = 0; // within the layer
    for (const [index, head] of data.heads.entries()) {
      if (head.layer !== layer) {
        layer = head.layer;
        column = 0;
        box.append(element("span", { className: "layer", title: head.path, text: String(layer) }));
      }
      const types = element("i", {});
      const canvas = element("canvas", {});
      const name = element("span", { className: "name" });
      const button = element("button", { type: "button", className: "head" }, types, canvas, name);
      button.addEventListener("click", () => select(index));
      button.style.gridColumn = String(2 + column);
      column += 1;
      columnCount = Math.max(columnCount, column);
      cells.push({ button, types, canvas, name });
      box.append(button);
    }
    box.style.setProperty("--across", columnCount);
  }

  // `maps` are those of all heads at the record.
  function draw(data, record, maps, content, selectedHead) {
    if (cells.length !== data.heads.length || builtFor !== data) build(data);
    for (const [head, { button, types, canvas, name }] of cells.entries()) {
      const labels = data.labels[record][head];
      const { label } = data.heads[head];
      drawMap(canvas, maps[head], data.mapShape(head, content));
      types.style.background = stripe(labels);
      const others = labels.length > 1 ? ` +${labels.length - 1}` : "";
      name.textContent = `${label} ${labels[0] ?? ""}${others}`;
      button.title = labels.join(", ");
      button.setAttribute("aria-label", `head ${label}: ${labels.join(", ") || "no type"}`);
    }
    markSelected(cells.map((cell) => cell.button), selectedHead);
  }

  return { box, draw };
}

// One head at all records. `select(record)` is called when a map is clicked.
export function createHeadHistory(select) {
  const box = element("div", { className: "film", role: "group", "aria-label": "the head at all recorded steps" });
  let frames = [];
  let builtFor = "";
  addArrowKeys(box, columnCount, select);

  function columnCount() {
    const firstTop = frames[0]?.offsetTop;
    const firstRow = frames.filter((frame) => frame.offsetTop === firstTop);
    return Math.max(1, firstRow.length);
  }

  // While a run trains, frames are added; they are built again only for another head, content or theme.
  function draw(data, head, maps, content, record, isDarkTheme) {
    const settings = `${data.id} ${data.generation} ${head} ${content} ${isDarkTheme}`;
    if (settings !== builtFor || frames.length > maps.length) {
      box.replaceChildren();
      frames = [];
      builtFor = settings;
    }
    for (let i = frames.length; i < maps.length; i++) {
      const types = element("i", {});
      const canvas = element("canvas", {});
      const step = data.steps[i];
      const name = element("span", { className: "name", text: step.toLocaleString("en") });
      const options = { type: "button", className: "frame", "aria-label": `step ${step}` };
      const frame = element("button", options, types, canvas, name);
      frame.addEventListener("click", () => select(i));
      drawMap(canvas, maps[i], data.mapShape(head, content));
      types.style.background = stripe(data.labels[i][head]);
      frames.push(frame);
      box.append(frame);
    }
    mark(record);
  }

  function mark(record) {
    markSelected(frames, record);
  }

  return { box, draw, mark };
}
