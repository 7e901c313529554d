// All heads as small maps: one row per layer, or sorted by a number. The frame of a map has the colour of a head type.
import { paint } from "../colour.js";
import { checkbox, element, formatNumber, select } from "../dom.js";
import { headMap } from "../packed.js";
import { moveFocus } from "../shared.js";
import { onTheme } from "../theme.js";
import { countTypes, HEAD_TYPES, headFrameColour, MEANINGS, typeColour, typesOf } from "./head_types.js";
import { headName, layerName } from "./token_labels.js";
import { headIndex, scoresChanged, toggleAblation } from "./view_state.js";

const MANY_HEADS = 8; // layers with more heads get smaller maps
const LAZY_HEADS = 300; // if there are more heads, a map is drawn when it comes into view

export function createHeadGrid(root, view) {
  const legend = element("div", { className: "legend", role: "group", "aria-label": "show only heads of one type" });
  const tools = element("div", { className: "bar" });
  const box = element("div", { className: "heads", role: "group", "aria-label": "heads" });
  const hint = element("p", { className: "hint quiet" });
  const order = element("button", {
    type: "button", className: "order", on: { click: () => view.change({ ascending: !view.ascending }) },
  });
  const source = element("p", { className: "hint quiet", hidden: true });
  root.append(tools, legend, source, box, hint);
  let items = []; // one per head
  const visibility = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) draw(items[Number(entry.target.dataset.number)]);
    }
  }, { rootMargin: "200px" });

  function build() {
    visibility.disconnect();
    items = [];
    for (const layer of view.description.places) {
      for (const [index, head] of layer.heads.entries()) items.push(createItem(layer, index, head));
    }
    showTypes();
  }

  function createItem(layer, index, head) {
    const item = { layer, index, head, id: `${layer.place}.${head}`, name: headName(layer, head), types: null };
    item.drawn = ""; // the settings that the map was last drawn with
    item.canvas = element("canvas", { className: layer.map ? "" : "none", "aria-hidden": "true" });
    item.caption = element("span", { className: "caption" });
    item.button = element("button", {
      type: "button", className: "head", tabindex: -1,
      dataset: { number: items.length, place: layer.place, head },
      on: {
        click: () => view.change({ layerIndex: layer.place, head, batch: 0, hover: null }, true),
        mouseenter: () => showHint(item),
        focus() {
          makeTabStop(item);
          showHint(item);
        },
      },
    }, item.canvas, item.caption);
    item.tick = element("input", {
      type: "checkbox", tabindex: -1, "aria-label": `ablate ${item.name}`, title: "select this head for ablation (x)",
      on: { change: () => toggleAblation(view, item.id) },
    });
    item.cell = element("div", { className: "cell" }, item.button, item.tick);
    return item;
  }

  // A number of a head: an observable, the confidence of a head type ("kind …"), or a score of a probe ("score …").
  function numberOf(item, name) {
    const column = Object.keys(view.description.columns).indexOf(name);
    if (column >= 0) return item.layer.numbers[item.index]?.[column] ?? null;
    if (name.startsWith("kind ")) return item.types?.confidence[name.slice(5)] ?? null;
    return item.types?.columns?.[name.slice(6)] ?? null;
  }

  // Head types may arrive later than the heads.
  function showTypes() {
    const { description } = view;
    for (const item of items) {
      item.types = typesOf(description, item.layer.path, item.head);

      const numbers = Object.keys(description.columns).map((name) => `${name} ${formatNumber(numberOf(item, name))}`);
      item.summary = `on this ${description.image ? "image" : "text"}: ${numbers.join(" · ")}`;
      if (item.types?.labels.length) item.summary = `type, from probes: ${item.types.labels.join(", ")}; ${item.summary}`;
      else if (description.kinds) item.summary = `no clear head type on probes; ${item.summary}`;
      item.button.setAttribute("aria-label", `${item.name}: ${item.summary}`);
    }
    // The heads of this recording, which need not be all heads of the model.
    const labels = items.map((item) => item.types?.labels ?? []);
    const counts = countTypes(labels);
    legend.replaceChildren();
    for (const type of HEAD_TYPES) legend.append(legendButton(type, counts[type]));
    legend.hidden = !description.kinds;
    const unlabelled = labels.filter((list) => !list.length).length;
    if (description.kinds) {
      source.textContent = `Types from ${description.kind_source}, not from this ${description.image ? "image" : "text"}. `
        + `A head may have several types; ${unlabelled} of ${items.length} heads have no clear type.`;
    } else {
      source.textContent = `The types of these heads are not known. ${description.no_model}`;
    }
    source.hidden = !description.kinds && !description.no_model;
    colourHeads();
    showTools();
    arrange();
  }

  function colourHeads() {
    for (const item of items) item.cell.style.setProperty("--kind", headFrameColour(item.types, view.colourBy));
  }

  function legendButton(type, count) {
    const swatch = element("i", { style: `background: ${typeColour(type)}` });
    return element("button", {
      type: "button", title: MEANINGS[type], disabled: !count && view.headType !== type, dataset: { kind: type },
      on: { click: () => view.change({ headType: view.headType === type ? "" : type }) },
    }, swatch, ` ${type}`, element("small", { text: count ? ` ${count}` : "" }));
  }

  function showTools() {
    const { description } = view;
    const options = [["", "by layer"]];
    for (const name of Object.keys(description.columns)) options.push([name, name]);
    if (description.kinds) {
      for (const type of HEAD_TYPES) {
        const isKnown = items.some((item) => item.types?.confidence[type] !== undefined);
        if (isKnown) options.push([`kind ${type}`, `confidence: ${type}`]);
      }
      for (const name of Object.keys(description.kind_columns ?? {})) {
        const isKnown = items.some((item) => typeof item.types?.columns?.[name] === "number");
        if (isKnown) options.push([`score ${name}`, `score: ${name}`]);
      }
    }
    if (!options.some(([name]) => name === view.sort)) options.push([view.sort, view.sort]);
    tools.replaceChildren(
      select("sort", options, view.sort, (sort) => view.change({ sort })),
      order,
      ...colourMenu(),
      checkbox("hide sinks", view.hideSinks, (hideSinks) => view.change({ hideSinks })));
  }

  function colourMenu() {
    if (!view.description.kinds) return [];
    const options = [["", "most confident type"]];
    for (const type of HEAD_TYPES) options.push([type, `confidence: ${type}`]);
    if (!options.some(([name]) => name === view.colourBy)) view.change({ colourBy: "" });
    return [select("colour by", options, view.colourBy, (colourBy) => view.change({ colourBy }))];
  }

  function arrange() {
    order.disabled = !view.sort;
    order.textContent = view.ascending ? "smallest first" : "largest first";
    for (const button of legend.children) {
      button.setAttribute("aria-pressed", String(button.dataset.kind === view.headType));
    }
    const shown = items.filter((item) => !view.headType || item.types?.labels.includes(view.headType));
    box.replaceChildren();
    box.className = `heads ${view.sort ? "flow" : "grid"}`;
    if (!shown.length) box.append(element("p", { className: "quiet", text: "No head is clearly of this type." }));
    else if (view.sort) arrangeSorted(shown);
    else arrangeByLayer(shown);
    showSelected();
    drawAll();
  }

  function arrangeSorted(shown) {
    const sign = view.ascending ? 1 : -1;
    const value = (item) => numberOf(item, view.sort) ?? sign * Infinity; // heads without the number come last
    shown.sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) - value(b))));
    for (const item of shown) {
      item.caption.replaceChildren(element("b", { text: item.id }), ` ${formatNumber(numberOf(item, view.sort))}`);
      item.cell.style.gridColumn = "";
      box.append(item.cell);
    }
  }

  function arrangeByLayer(shown) {
    // Layers need not have the same heads: each head number has its own column.
    const layers = view.description.places;
    const columns = [...new Set(layers.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
    box.style.setProperty("--across", columns.length);
    box.classList.toggle("many", columns.length > MANY_HEADS);
    box.append(element("span", { className: "place" }));
    for (const head of columns) box.append(element("span", { className: "number", text: head }));
    for (const layer of layers) {
      const layerItems = shown.filter((item) => item.layer === layer);
      if (!layerItems.length) continue;
      const breakable = layerName(layer).replaceAll(".", ".\u200b");
      box.append(element("span", { className: "place", title: layer.path, text: breakable }));
      for (const item of layerItems) {
        item.caption.replaceChildren();
        item.cell.style.gridColumn = columns.indexOf(item.head) + 2;
        box.append(item.cell);
      }
    }
  }

  function drawAll() {
    if (items.length <= LAZY_HEADS) {
      for (const item of items) draw(item);
      return;
    }
    visibility.disconnect(); // an observer reports visible elements only when it starts to observe them
    for (const item of items) visibility.observe(item.button);
  }

  function draw(item) {
    const settings = `${view.hideSinks} ${document.documentElement.dataset.theme}`;
    if (item.drawn === settings || !item.layer.map) return;
    const { perKey, width, rows, darkest } = headMap(item.layer, item.index, view.hideSinks);
    paint(item.canvas, perKey, width, rows, darkest);
    item.drawn = settings;
  }

  function showSelected() {
    let selected = null;
    for (const item of items) {
      const isSelected = item.layer.place === view.layerIndex && item.head === view.head;
      item.button.setAttribute("aria-pressed", String(isSelected));
      item.tick.checked = view.ablated.includes(item.id);
      if (isSelected && item.cell.isConnected) selected = item;
    }
    makeTabStop(selected ?? items.find((item) => item.cell.isConnected));
    showHint(selected);
  }

  // The Tab key reaches one head; the arrow keys reach the others from there.
  function makeTabStop(tabStop) {
    for (const item of items) item.button.tabIndex = item === tabStop ? 0 : -1;
  }

  function showHint(item) {
    hint.replaceChildren();
    if (item) hint.append(element("b", { text: item.name }), ` ${item.summary}`);
    else hint.append("Select a head.");
    if (scoresChanged(view)) hint.append(" (All heads here are as trained; the changed scores are those of the map.)");
  }

  // Arrow keys go to another head; x selects a head for ablation.
  function handleKey(event) {
    const button = event.target.closest(".head");
    if (!button || event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "x") toggleAblation(view, items[Number(button.dataset.number)].id);
    moveFocus(event, button, items.map((item) => item.button));
  }

  function whenLoaded(call) {
    return () => {
      if (view.description) call();
    };
  }

  box.addEventListener("keydown", handleKey);
  box.addEventListener("mouseleave", () => {
    showHint(items.find((item) => item.button.getAttribute("aria-pressed") === "true"));
  });
  view.on("description", whenLoaded(build));
  view.on("headTypes", whenLoaded(showTypes));
  view.on("sort ascending headType", whenLoaded(arrange));
  view.on("colourBy", whenLoaded(colourHeads));
  view.on("hideSinks", whenLoaded(drawAll));
  view.on("layerIndex head ablated beta mask position", whenLoaded(showSelected));
  const stopTheme = onTheme(drawAll);
  if (view.description) build();
  return () => {
    stopTheme();
    visibility.disconnect();
  };
}

// The head that is shown first: the clearest induction head, or else one with a large peak that is not a sink.
export function defaultHead(description) {
  const columns = Object.keys(description.columns);
  const best = { score: -Infinity, layerIndex: null, head: null };
  for (const layer of description.places) {
    for (const head of layer.heads) {
      const numbers = layer.numbers[headIndex(layer, head)] ?? [];
      const peak = numbers[columns.indexOf("peak")] ?? 0;
      const sink = numbers[columns.indexOf("sink")] ?? 0;
      const induction = typesOf(description, layer.path, head)?.confidence.induction ?? 0;
      const score = 2 * induction + peak - sink;
      if (score > best.score) Object.assign(best, { score, layerIndex: layer.place, head });
    }
  }
  return { layerIndex: best.layerIndex, head: best.head };
}
