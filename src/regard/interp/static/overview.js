// All heads side by side: one row per layer and one column per head, or one flow sorted by a number.

const MOST_EAGER = 400; // if there are more heads, a map is drawn when it comes into view
// One item per head: {layer, head: its index in the layer, number: its number in the model, button, canvas, caption,
// numbers, label, title, drawn}.
const heads = [];
const headNumbers = [...new Set(data.places.flatMap((layer) => layer.heads))].sort((a, b) => a - b);
const TYPE_SORT = "type: "; // before the name of a type in the menu of orders
const view = { hideSinks: false, sort: "", descending: true, find: "", show: "maps" };
const byId = (id) => document.getElementById(id);

const visibility = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) drawThumbnail(heads[Number(entry.target.dataset.number)]);
  }
}, { rootMargin: "200px" });

function makeOverview(select) {
  for (const layer of data.places) {
    for (const [head, number] of layer.heads.entries()) {
      const item = { layer, head, number, numbers: layer.numbers[head], types: layer.types?.[head] ?? null, drawn: false };
      item.groups = layer.groups?.[head] ?? [];
      item.label = `${layer.name || layer.path} · ${number}`;
      item.title = `${layer.path || "the model"}, head ${number}`;
      item.button = element("button", "head");
      item.button.type = "button";
      item.button.tabIndex = -1;
      item.button.dataset.number = heads.length;
      item.button.setAttribute("aria-label", `${item.title}: ${numbersOf(item)}${typesText(item, " · types: ")}`);
      item.canvas = element("canvas", layer.map ? "" : "no-map");
      item.caption = element("span", "caption");
      item.button.append(item.canvas, item.caption);
      item.button.addEventListener("click", () => select(item));
      item.button.addEventListener("mouseenter", () => showHint(item));
      item.button.addEventListener("focus", () => { makeReachable(item); showHint(item); });
      heads.push(item);
    }
  }
  byId("heads").addEventListener("keydown", (event) => {
    const from = event.target.closest(".head");
    if (from) moveFocus(event, from, heads.map((item) => item.button));
  });
  byId("heads").addEventListener("mouseleave", () => showHint(null));
  byId("find").addEventListener("input", () => { view.find = byId("find").value.trim().toLowerCase(); arrange(); });
  byId("sort").addEventListener("change", () => { view.sort = byId("sort").value; arrange(); });
  byId("order").addEventListener("click", () => { view.descending = !view.descending; arrange(); });
  for (const name of columns) {
    const option = element("option", "", name);
    option.value = name;
    option.title = data.places[0].meanings[name] ?? data.columns[name];
    byId("sort").append(option);
  }
  makeGroupChoices();
  for (const [name, count] of typeCounts()) {
    const option = element("option", "", `type: ${name} (${count})`);
    option.value = TYPE_SORT + name;
    option.title = "confidence that a head is of this type, from probes";
    byId("sort").append(option);
  }
  byId("controls").addEventListener("submit", (event) => event.preventDefault());
  arrange();
  drawThumbnails();
}

function numbersOf(item) {
  return columns.map((name, c) => `${name} ${formatNumber(item.numbers[c])}`).join(" · ");
}

// The types of a head with their confidences; empty if types are not known.
function typesText(item, before) {
  if (!item.types) return "";
  if (!item.types.labels.length) return `${before}none`;
  const parts = item.types.labels.map((name) => `${name} ${Math.round(100 * item.types.confidences[name])} %`);
  return before + parts.join(", ");
}

// [type, number of heads], the most frequent first. A head with several types counts for each of them.
function typeCounts() {
  const counts = new Map();
  for (const item of heads) {
    for (const name of item.types?.labels ?? []) counts.set(name, (counts.get(name) ?? 0) + 1);
  }
  return [...counts].sort((a, b) => b[1] - a[1]);
}

// The head under the pointer, in a line that is always there, so that nothing moves.
function showHint(item) {
  const box = byId("hint");
  box.replaceChildren();
  if (!item) {
    const counts = typeCounts().map(([name, count]) => `${name} ${count}`).join(" · ");
    box.textContent = (data.pattern ? `Layers are * of ${data.pattern}. ` : "") + "Select a head.";
    if (counts) box.append(element("br"), `Types, from probes: ${counts}`);
    return;
  }
  box.append(element("strong", "", item.label), ` ${numbersOf(item)}`);
  const types = typesText(item, "types, from probes: ");
  if (types) box.append(element("br"), types);
}

function drawThumbnails() {
  for (const item of heads) {
    item.drawn = false;
    if (heads.length > MOST_EAGER) {
      visibility.unobserve(item.button); // so that it is reported again
      visibility.observe(item.button);
    } else {
      drawThumbnail(item);
    }
  }
}

function drawThumbnail(item) {
  if (item.drawn || !item.layer.map) return;
  paint(item.canvas, headMap(item.layer, item.head, view.hideSinks));
  // The cells of a short text are larger than a pixel; blurred edges would suggest weights in between.
  item.canvas.style.imageRendering = item.canvas.width < 40 ? "pixelated" : "auto";
  item.drawn = true;
}

function arrange() {
  const shown = heads.filter((item) => !view.find || matches(item, view.find));
  const type = view.sort.startsWith(TYPE_SORT) ? view.sort.slice(TYPE_SORT.length) : null;
  const column = columns.indexOf(view.sort);
  const group = groupOfSort(view.sort);
  const sorted = column >= 0 || type !== null || group !== null;
  const box = byId("heads");
  box.replaceChildren();
  byId("order").disabled = !sorted;
  byId("order").textContent = view.descending ? "largest first" : "smallest first";
  byId("none").hidden = shown.length > 0;
  box.className = sorted ? "flow" : "grid";
  box.style.setProperty("--across", headNumbers.length);
  const number = (item) => {
    if (type !== null) return item.types?.confidences[type] ?? null;
    return (group === null ? item.numbers[column] : item.groups[group]) ?? null;
  };
  if (sorted) {
    const sign = view.descending ? -1 : 1;
    // A missing number comes last in both orders.
    const key = (item) => number(item) ?? -sign * -Infinity;
    shown.sort((a, b) => (key(a) === key(b) ? 0 : sign * (key(a) - key(b))));
  }
  const showsGroups = view.show === "groups";
  box.hidden = showsGroups;
  byId("groups").hidden = !showsGroups;
  if (showsGroups) {
    byId("groups").replaceChildren(groupTable(shown, view));
  } else if (!sorted) {
    arrangeGrid(box, shown);
  } else {
    for (const item of shown) {
      item.caption.replaceChildren(element("b", "", item.label), ` ${formatNumber(number(item))}`);
      item.button.style.gridColumn = "";
      box.append(item.button);
    }
  }
  resetReachable(shown);
}

function matches(item, text) {
  if (item.types?.labels.includes(text)) return true;
  return item.title.toLowerCase().includes(text) || item.label.replaceAll(" · ", ".").toLowerCase().includes(text);
}

function arrangeGrid(box, shown) {
  const top = element("div", "row across");
  top.append(element("span", "layer", ""), ...headNumbers.map((number) => element("span", "number", String(number))));
  top.setAttribute("aria-hidden", "true");
  box.append(top);
  for (const layer of data.places) {
    const ofLayer = shown.filter((item) => item.layer === layer);
    if (!ofLayer.length) continue;
    const row = element("div", "row");
    const name = element("span", "layer", layer.name || layer.path || "(the model)");
    name.title = layer.path;
    row.append(name);
    for (const item of ofLayer) {
      item.caption.replaceChildren();
      item.button.style.gridColumn = headNumbers.indexOf(item.number) + 2;
      row.append(item.button);
    }
    box.append(row);
  }
}

// Tab reaches one head, and the arrow keys reach the others from there.
function resetReachable(shown) {
  makeReachable(shown.find((item) => item.button.getAttribute("aria-pressed") === "true") ?? shown[0]);
}

function makeReachable(reached) {
  for (const item of heads) item.button.tabIndex = item === reached ? 0 : -1;
}
