// Files: the map as it is seen (PNG, SVG), the heads' numbers (CSV), everything as one offline page (HTML).
import { address } from "../api.js";
import { colours } from "../colour.js";
import { download, drawing, element, note } from "../dom.js";
import { LEFT, TOP, step } from "./axes.js";

const CELLS = 4096; // so many cells are drawn one by one in an SVG; more as a picture

export function exportMenu(view, map) {
  const items = element("div", { className: "items" });
  const menu = element("details", { className: "menu" }, element("summary", { text: "export" }), items);
  const act = (text, title, call) => items.append(element("button", {
    type: "button", text, title, on: { click: async () => { menu.open = false; await call(); } },
  }));
  const link = (text, title, format) => {
    const made = element("a", { text, title, download: "", href: "#" });
    made.addEventListener("click", () => {
      made.href = address("/api/look/export", { recording: view.recording, format });
      menu.open = false;
    });
    items.append(made);
  };
  const name = () => `${view.found.title}-${view.place}.${view.head}`.replace(/[^A-Za-z0-9._-]+/g, "-");
  const shown = (call) => () => (map.source ? call() : note("There is no map to save yet."));
  act("map as PNG", "the map as it is shown now", shown(() => png(map, name())));
  act("map as SVG", "the map as it is shown now, with its axes as text", shown(() => svg(map, name())));
  link("heads as CSV", "every head's numbers", "csv");
  link("heads as JSON", "every head's numbers", "json");
  link("offline page (HTML)", "all heads in one file that opens anywhere", "html");
  menu.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !menu.open) return;
    event.stopPropagation();
    menu.open = false;
    menu.querySelector("summary").focus();
  });
  menu.addEventListener("focusout", (event) => { if (!menu.contains(event.relatedTarget)) menu.open = false; });
  return menu;
}

// The canvas on the page's ground: a map without one would be unreadable elsewhere.
function onGround(canvas, crop) {
  const made = document.createElement("canvas");
  [made.width, made.height] = [crop.width, crop.height];
  const context = made.getContext("2d");
  context.fillStyle = getComputedStyle(canvas).getPropertyValue("--ground");
  context.fillRect(0, 0, made.width, made.height);
  context.drawImage(canvas, -crop.x, -crop.y);
  return made;
}

function png(map, name) {
  map.draw();
  const { canvas } = map;
  onGround(canvas, { x: 0, y: 0, width: canvas.width, height: canvas.height }).toBlob((blob) => download(`${name}.png`, blob), "image/png");
}

function svg(map, name) {
  const marks = map.marks;
  map.marks = {};
  map.draw();
  const g = map.geometry();
  const { canvas } = map;
  const style = getComputedStyle(canvas);
  const made = drawing("svg", {
    xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${canvas.clientWidth} ${canvas.clientHeight}`,
    width: canvas.clientWidth, height: canvas.clientHeight, "font-family": "system-ui, sans-serif", "font-size": 11,
  });
  made.append(drawing("rect", { width: "100%", height: "100%", fill: style.getPropertyValue("--ground") }));
  const first = (start, edge, size) => Math.max(0, Math.floor((edge - start) / size));
  const [i0, j0] = [first(g.y(0), TOP, g.sy), first(g.x(0), LEFT, g.sx)];
  const [i1, j1] = [Math.min(g.n, i0 + Math.ceil(g.height / g.sy) + 1), Math.min(g.m, j0 + Math.ceil(g.width / g.sx) + 1)];
  if (g.level === 0 && (i1 - i0) * (j1 - j0) <= CELLS) cells(made, map, g, [i0, i1], [j0, j1]);
  else picture(made, canvas, g);
  axis(made, g, map, style);
  map.marks = marks;
  map.redraw();
  const text = new XMLSerializer().serializeToString(made);
  download(`${name}.svg`, new Blob([text], { type: "image/svg+xml" }));
}

// As `paint` colours a weight.
function colourOf(value, darkest) {
  const pixel = colours()[Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, value) / darkest)))];
  return `rgb(${pixel & 255},${(pixel >> 8) & 255},${(pixel >> 16) & 255})`;
}

function cells(made, map, g, [i0, i1], [j0, j1]) {
  const clip = drawing("clipPath", { id: "plot" }, drawing("rect", { x: LEFT, y: TOP, width: g.width, height: g.height }));
  const group = drawing("g", { "clip-path": "url(#plot)", "shape-rendering": "crispEdges" });
  for (let row = i0; row < i1; row++) {
    for (let key = j0; key < j1; key++) {
      const found = map.read({ row, key });
      const tile = map.source.get(0, key >> 8, row >> 8);
      if (!found || !tile) continue;
      const shown = map.source.rest?.(tile, 0, key >> 8, row >> 8)[(row & 255) * tile.cols + (key & 255)] ?? found.value;
      const rect = drawing("rect", {
        x: g.x(key).toFixed(2), y: g.y(row).toFixed(2), width: g.sx.toFixed(3), height: g.sy.toFixed(3),
        fill: colourOf(shown, map.source.darkest(0)),
      });
      const title = drawing("title");
      title.textContent = `${row} → ${key}: ${found.value}`;
      rect.append(title);
      group.append(rect);
    }
  }
  made.append(drawing("defs", {}, clip), group);
}

function picture(made, canvas, g) {
  const crop = { x: LEFT * g.ratio, y: TOP * g.ratio, width: Math.round(g.width * g.ratio), height: Math.round(g.height * g.ratio) };
  const href = onGround(canvas, crop).toDataURL("image/png");
  made.append(drawing("image", { x: LEFT, y: TOP, width: g.width, height: g.height, href, style: "image-rendering: pixelated" }));
}

function axis(made, g, map, style) {
  const write = (text, x, y, more) => {
    const label = drawing("text", { x, y, fill: style.getPropertyValue("--ink"), ...more });
    label.textContent = text;
    made.append(label);
  };
  const by = (size) => (size >= 11 ? 1 : step(size, 40));
  for (let i = 0; i < g.n; i += by(g.sy)) {
    const y = g.y(i + 0.5);
    if (y < TOP || y > TOP + g.height) continue;
    write((g.sy >= 11 && map.label("queries", i)) || i, Math.max(LEFT, g.x(0)) - 5, y + 4, { "text-anchor": "end" });
  }
  for (let j = 0; j < g.m; j += by(g.sx)) {
    const [x, y] = [g.x(j + 0.5), Math.max(TOP, g.y(0)) - 6];
    if (x < LEFT || x > LEFT + g.width) continue;
    const turned = g.sx >= 11 ? { transform: `rotate(-60 ${x} ${y})` } : { "text-anchor": "middle" };
    write((g.sx >= 11 && map.label("keys", j)) || j, x, y, turned);
  }
}
