// A map that is zoomed from the whole text to single weights: a canvas over tiles, drawn once a frame.
import { said } from "../dom.js";
import { onTheme } from "../theme.js";
import { drawAxes, LEFT, TOP } from "./axes.js";
import { gestures } from "./gestures.js";
import { SIZE } from "./tiles.js";

const LARGEST = 64; // pixels of a cell
const NUMBERS = 38; // from this cell size on weights are written into their cells
const SETTLED = 60; // ms that a view has to stay before finer tiles are asked for

// `tell`: {hover(cell or null), lock(cell), view({u, v, z})}; a cell is {row, key}. u and v are the middle of the window
// as shares of the keys and queries, z how much larger it is than the whole: what maps of any size can share.
export class ZoomMap {
  constructor(canvas, tell) {
    Object.assign(this, { canvas, tell, source: null, label: () => "", at: { u: 0.5, v: 0.5, z: 1 }, marks: {} });
    this.context = canvas.getContext("2d");
    this.asked = 0;
    this.watching = new ResizeObserver(() => this.redraw());
    this.watching.observe(canvas);
    this.stopTheme = onTheme(() => this.redraw());
    this.stopGestures = gestures(this);
  }

  // `label(which, i)`: the word of a token.
  show(source, label) {
    if (this.source && this.source !== source) this.source.close();
    this.source = source;
    this.label = label;
    if (source) {
      const tall = Math.min(1, Math.max(0.4, source.n / source.m)); // as the map, within reason
      this.canvas.style.aspectRatio = `600 / ${TOP + tall * (600 - LEFT)}`;
    }
    this.redraw();
  }

  look(at) {
    this.at = at;
    this.redraw();
  }

  mark(marks) {
    this.marks = marks;
    this.redraw();
  }

  redraw() {
    this.asked ||= requestAnimationFrame(() => {
      this.asked = 0;
      this.draw();
    });
  }

  close() {
    cancelAnimationFrame(this.asked);
    clearTimeout(this.timer);
    this.watching.disconnect();
    this.stopTheme();
    this.stopGestures();
    this.source?.close();
    this.source = null;
  }

  // Where things are: pixels of the plot and of a cell, the first cell, and the level that is shown.
  geometry() {
    const { n, m } = this.source;
    const width = Math.max(40, this.canvas.clientWidth - LEFT);
    const height = Math.max(40, this.canvas.clientHeight - TOP);
    let [sx, sy] = [width / m, height / n];
    if (n / m < 3 && m / n < 3) sx = sy = Math.min(sx, sy); // else cells are no squares, or one could see none
    const most = Math.max(1, LARGEST / Math.min(sx, sy));
    const z = Math.min(Math.max(1, this.at.z), most);
    const place = (share, total, size, room) => {
      const half = room / size / 2;
      return half * 2 >= total ? total / 2 : Math.min(Math.max(share * total, half), total - half);
    };
    const [cx, cy] = [place(this.at.u, m, sx * z, width), place(this.at.v, n, sy * z, height)];
    const ratio = devicePixelRatio || 1;
    const level = Math.max(0, Math.min(this.source.top, Math.ceil(Math.log2(1 / (Math.min(sx, sy) * z * ratio)) - 0.01)));
    return {
      n, m, width, height, sx: sx * z, sy: sy * z, z, most, level, ratio, cx, cy,
      x: (key) => LEFT + width / 2 + (key - cx) * sx * z,
      y: (row) => TOP + height / 2 + (row - cy) * sy * z,
    };
  }

  // The exact cell under a point of the canvas, or null beside the map.
  cellAt(px, py) {
    if (!this.source || px < LEFT || py < TOP) return null;
    const g = this.geometry();
    const key = Math.floor((px - g.x(0)) / g.sx);
    const row = Math.floor((py - g.y(0)) / g.sy);
    return key >= 0 && key < g.m && row >= 0 && row < g.n ? { row, key } : null;
  }

  // What is known of a cell: its value at the finest level that is shown and loaded.
  read({ row, key }) {
    const g = this.geometry();
    for (let level = g.level; level <= this.source.top; level++) {
      const [i, j] = [row >> level, key >> level];
      const tile = this.source.get(level, Math.floor(j / SIZE), Math.floor(i / SIZE));
      if (!tile) continue;
      const value = tile.values[(i % SIZE) * tile.cols + (j % SIZE)];
      const last = (at, total) => Math.min(total, (at + 1) << level) - 1;
      return { level, value, rows: [i << level, last(i, g.n)], keys: [j << level, last(j, g.m)] };
    }
    return null;
  }

  // Zoom by a factor around a point of the canvas, which stays where it is.
  zoom(factor, px, py) {
    const g = this.geometry();
    const z = Math.min(Math.max(1, g.z * factor), g.most);
    const [key, row] = [(px - g.x(0)) / g.sx, (py - g.y(0)) / g.sy];
    const [sx, sy] = [(g.sx * z) / g.z, (g.sy * z) / g.z];
    this.go(key - (px - LEFT - g.width / 2) / sx, row - (py - TOP - g.height / 2) / sy, z);
  }

  pan(dx, dy) {
    const g = this.geometry();
    this.go(g.cx + dx / g.sx, g.cy + dy / g.sy, g.z);
  }

  go(cx, cy, z) {
    const { n, m } = this.source;
    this.at = { u: cx / m, v: cy / n, z };
    const g = this.geometry(); // which keeps the window within the map
    this.at = { u: g.cx / m, v: g.cy / n, z: g.z };
    this.tell.view(this.at);
    this.redraw();
  }

  draw() {
    const { canvas, context } = this;
    if (!canvas.isConnected || !canvas.clientWidth) return;
    const ratio = devicePixelRatio || 1;
    const [wide, high] = [Math.round(canvas.clientWidth * ratio), Math.round(canvas.clientHeight * ratio)];
    if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    if (!this.source) return;
    const g = this.geometry();
    canvas.style.touchAction = g.z > 1.001 ? "none" : "pan-y"; // the whole map lets a finger scroll the page
    context.save();
    context.beginPath();
    const [left, top] = [Math.max(LEFT, g.x(0)), Math.max(TOP, g.y(0))];
    context.rect(left, top, Math.min(LEFT + g.width, g.x(g.m)) - left, Math.min(TOP + g.height, g.y(g.n)) - top);
    context.clip();
    const missing = this.drawTiles(g);
    if (g.level === 0 && Math.min(g.sx, g.sy) >= NUMBERS) this.writeNumbers(g);
    context.restore();
    const style = getComputedStyle(canvas);
    this.drawMarks(g, style);
    drawAxes(context, g, this.label, this.marks, style);
    canvas.dataset.level = g.level;
    canvas.dataset.loading = missing;
  }

  // Tiles in view; where one is missing, the part of a coarser one. Returns how many are missing.
  drawTiles(g) {
    const { context, source } = this;
    const span = SIZE << g.level;
    const range = (first, last, total) => {
      const from = Math.max(0, Math.floor(first / span));
      return [from, Math.min(Math.ceil(total / span) - 1, Math.floor(last / span))];
    };
    const [x0, x1] = range((LEFT - g.x(0)) / g.sx, (LEFT + g.width - g.x(0)) / g.sx - 1e-6, g.m);
    const [y0, y1] = range((TOP - g.y(0)) / g.sy, (TOP + g.height - g.y(0)) / g.sy - 1e-6, g.n);
    const here = [];
    context.imageSmoothingEnabled = false;
    for (let y = y0; y <= y1; y++) {
      for (let x = x0; x <= x1; x++) {
        const away = Math.hypot((x + 0.5) * span - g.cx, (y + 0.5) * span - g.cy);
        if (!this.drawTile(g, x, y)) here.push([away, [g.level, x, y]]);
      }
    }
    here.sort((a, b) => a[0] - b[0]);
    const whole = source.get(source.top, 0, 0) ? [] : [[source.top, 0, 0]];
    clearTimeout(this.timer);
    const want = () => source.want([...whole, ...here.map(([, tile]) => tile)]);
    if (whole.length || !here.length) want();
    else this.timer = setTimeout(() => this.source === source && want(), SETTLED);
    return here.length;
  }

  drawTile(g, x, y) {
    const span = SIZE << g.level;
    const snap = (value) => Math.round(value * g.ratio) / g.ratio; // no seams between tiles
    for (let level = g.level; level <= this.source.top; level++) {
      const by = level - g.level;
      const [tx, ty] = [x >> by, y >> by];
      const tile = this.source.get(level, tx, ty);
      if (!tile) continue;
      const [part, size] = [SIZE / 2 ** by, 2 ** level];
      const [u, v] = [(x - (tx << by)) * part, (y - (ty << by)) * part];
      const [cols, rows] = [Math.min(part, tile.cols - u), Math.min(part, tile.rows - v)];
      if (cols <= 0 || rows <= 0) return by === 0;
      const [left, top] = [snap(g.x(x * span)), snap(g.y(y * span))];
      const [right, bottom] = [snap(g.x(x * span + cols * size)), snap(g.y(y * span + rows * size))];
      this.context.drawImage(this.source.picture(tile, level, tx, ty), u, v, cols, rows, left, top, right - left, bottom - top);
      return by === 0;
    }
    return false;
  }

  writeNumbers(g) {
    const { context } = this;
    const first = (start, edge, size) => Math.max(0, Math.floor((edge - start) / size));
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const dark = getComputedStyle(this.canvas).colorScheme === "dark";
    for (let row = first(g.y(0), TOP, g.sy); row < g.n && g.y(row) < TOP + g.height; row++) {
      for (let key = first(g.x(0), LEFT, g.sx); key < g.m && g.x(key) < LEFT + g.width; key++) {
        const found = this.read({ row, key });
        if (!found || found.level || !(Math.abs(found.value) >= 0.0005)) continue;
        const deep = Math.sqrt(Math.abs(found.value) / this.source.darkest(0)) > 0.55;
        context.fillStyle = deep !== dark ? "#ffffff" : "#10151f";
        context.fillText(said(found.value), g.x(key + 0.5), g.y(row + 0.5));
      }
    }
  }

  // The locked row and cell, and where the pointer is.
  drawMarks(g, style) {
    const { context, marks } = this;
    const box = (x0, y0, x1, y1) => {
      const [l, t] = [Math.max(LEFT, x0), Math.max(TOP, y0)];
      const [w, h] = [Math.min(LEFT + g.width, g.x(g.m), x1) - l, Math.min(TOP + g.height, g.y(g.n), y1) - t];
      if (w > 0 && h > 0) context.strokeRect(l, t, w, h);
    };
    const thick = (size) => Math.max(size, 2);
    context.lineWidth = 1.5;
    context.strokeStyle = style.getPropertyValue("--asked");
    const { row, key, hover } = marks;
    if (row !== null && row !== undefined) box(g.x(0), g.y(row), g.x(g.m), g.y(row) + thick(g.sy));
    if (key !== null && key !== undefined) {
      if (row === null || row === undefined) box(g.x(key), g.y(0), g.x(key) + thick(g.sx), g.y(g.n));
      else box(g.x(key) - 1, g.y(row) - 1, g.x(key) + thick(g.sx) + 1, g.y(row) + thick(g.sy) + 1);
    }
    if (!hover) return;
    context.lineWidth = 1;
    context.strokeStyle = style.getPropertyValue("--quiet");
    context.setLineDash([3, 3]);
    if (hover.row !== null) box(g.x(0), g.y(hover.row), g.x(g.m), g.y(hover.row) + thick(g.sy));
    if (hover.key !== null) box(g.x(hover.key), g.y(0), g.x(hover.key) + thick(g.sx), g.y(g.n));
    context.setLineDash([]);
  }
}
