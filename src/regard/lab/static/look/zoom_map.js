// A map that can be zoomed from the whole text to single weights: a canvas that draws tiles.
import { formatNumber } from "../dom.js";
import { onTheme } from "../theme.js";
import { drawAxes, LEFT, RIGHT, TOP } from "./axes.js";
import { addGestures } from "./gestures.js";
import { TILE_SIZE } from "./tiles.js";

const LARGEST_CELL = 64; // pixels
const NUMBER_CELL = 38; // smallest cell, in pixels, in which the weight is written as a number
const SETTLED = 60; // ms without a redraw before missing tiles are requested

const isNumber = (value) => value !== null && value !== undefined;
const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

// `handlers`: { onHover(cell or null), onLock(cell), onMove(window) }. A cell is { row, key }. A window is { u, v, z }:
// (u, v) is its centre, from 0 at the first key (u) and query (v) to 1 at the last; z is the zoom. Maps of any size can
// share a window.
export class ZoomMap {
  constructor(canvas, handlers) {
    this.canvas = canvas;
    this.handlers = handlers;
    this.source = null; // Tiles, Difference or PooledMap
    this.label = () => "";
    this.window = { u: 0.5, v: 0.5, z: 1 };
    this.marks = {};
    this.context = canvas.getContext("2d");
    this.frame = 0;
    this.resizeObserver = new ResizeObserver(() => this.redraw());
    this.resizeObserver.observe(canvas);
    this.stopTheme = onTheme(() => this.redraw());
    this.stopGestures = addGestures(this);
  }

  // `label(side, index)` returns the label of a token.
  show(source, label) {
    if (this.source && this.source !== source) this.source.close();
    this.source = source;
    this.label = label;
    if (source) {
      // The canvas has the shape of the map, within limits.
      const share = clamp(source.n / source.m, 0.4, 1);
      this.canvas.style.aspectRatio = `600 / ${TOP + share * (600 - LEFT - RIGHT)}`;
    }
    this.redraw();
  }

  setWindow(mapWindow) {
    this.window = mapWindow;
    this.redraw();
  }

  setMarks(marks) {
    this.marks = marks;
    this.redraw();
  }

  // Draw at most once per frame.
  redraw() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  close() {
    cancelAnimationFrame(this.frame);
    clearTimeout(this.timer);
    this.resizeObserver.disconnect();
    this.stopTheme();
    this.stopGestures();
    this.source?.close();
    this.source = null;
  }

  // The sizes of the plot and of a cell in pixels, the middle of the window in cells, and the level that is shown.
  // `x(key)` and `y(row)` turn cells into pixels.
  geometry() {
    const { n, m } = this.source;
    const width = Math.max(40, this.canvas.clientWidth - LEFT - RIGHT);
    const height = Math.max(40, this.canvas.clientHeight - TOP);

    // Cells are squares, unless the map is so long that they would be too small to see.
    let wholeCellWidth = width / m;
    let wholeCellHeight = height / n;
    if (n / m < 3 && m / n < 3) {
      wholeCellWidth = Math.min(wholeCellWidth, wholeCellHeight);
      wholeCellHeight = wholeCellWidth;
    }
    const smallerSide = Math.min(wholeCellWidth, wholeCellHeight);
    const maxZoom = Math.max(1, LARGEST_CELL / smallerSide);
    const zoom = clamp(this.window.z, 1, maxZoom);
    const cellWidth = wholeCellWidth * zoom;
    const cellHeight = wholeCellHeight * zoom;

    // The window stays within the map. A map that is smaller than the window is centred.
    const middle = (share, count, cellSize, pixels) => {
      const half = pixels / cellSize / 2;
      return half * 2 >= count ? count / 2 : clamp(share * count, half, count - half);
    };
    const middleKey = middle(this.window.u, m, cellWidth, width);
    const middleRow = middle(this.window.v, n, cellHeight, height);

    // The finest level whose cells are at least about one pixel of the screen.
    const pixelRatio = devicePixelRatio || 1;
    const level = clamp(Math.ceil(Math.log2(1 / (smallerSide * zoom * pixelRatio)) - 0.01), 0, this.source.top);
    // A cell of a pooled map covers several tokens, so there are more of them than cells.
    const queryCount = this.source.queryCount ?? n;
    const keyCount = this.source.keyCount ?? m;
    return {
      n, m, queryCount, keyCount, width, height, cellWidth, cellHeight, zoom, maxZoom, level, pixelRatio,
      middleKey, middleRow,
      x: (key) => LEFT + width / 2 + (key - middleKey) * cellWidth,
      y: (row) => TOP + height / 2 + (row - middleRow) * cellHeight,
    };
  }

  // The cell under a point of the canvas, or null outside the map.
  cellAt(px, py) {
    if (!this.source || px < LEFT || py < TOP) return null;
    const geometry = this.geometry();
    if (px > LEFT + geometry.width) return null;
    const key = Math.floor((px - geometry.x(0)) / geometry.cellWidth);
    const row = Math.floor((py - geometry.y(0)) / geometry.cellHeight);
    const inside = key >= 0 && key < geometry.m && row >= 0 && row < geometry.n;
    return inside ? { row, key } : null;
  }

  // The value of a cell from the first level that is loaded, from the shown level on to coarser ones, with the rows and
  // keys that this value covers; or null.
  read({ row, key }) {
    const geometry = this.geometry();
    for (let level = geometry.level; level <= this.source.top; level++) {
      const i = row >> level;
      const j = key >> level;
      const tile = this.source.get(level, Math.floor(j / TILE_SIZE), Math.floor(i / TILE_SIZE));
      if (!tile) continue;
      const value = tile.values[(i % TILE_SIZE) * tile.columns + (j % TILE_SIZE)];
      const rows = [i << level, Math.min(geometry.n, (i + 1) << level) - 1];
      const keys = [j << level, Math.min(geometry.m, (j + 1) << level) - 1];
      return { level, value, rows, keys };
    }
    return null;
  }

  // Zoom by a factor around a point of the canvas, which stays where it is.
  zoom(factor, px, py) {
    const geometry = this.geometry();
    const zoom = clamp(geometry.zoom * factor, 1, geometry.maxZoom);
    const key = (px - geometry.x(0)) / geometry.cellWidth;
    const row = (py - geometry.y(0)) / geometry.cellHeight;
    const cellWidth = (geometry.cellWidth * zoom) / geometry.zoom;
    const cellHeight = (geometry.cellHeight * zoom) / geometry.zoom;
    const middleKey = key - (px - LEFT - geometry.width / 2) / cellWidth;
    const middleRow = row - (py - TOP - geometry.height / 2) / cellHeight;
    this.moveTo(middleKey, middleRow, zoom);
  }

  // Zoom by a factor to the locked cell, which moves to the middle. Without one, the middle stays where it is.
  zoomToLocked(factor) {
    const geometry = this.geometry();
    const { row, key } = this.marks;
    const middleKey = isNumber(key) ? key + 0.5 : geometry.middleKey;
    const middleRow = isNumber(row) ? row + 0.5 : geometry.middleRow;
    this.moveTo(middleKey, middleRow, clamp(geometry.zoom * factor, 1, geometry.maxZoom));
  }

  // Move the window by pixels.
  pan(dx, dy) {
    const geometry = this.geometry();
    const middleKey = geometry.middleKey + dx / geometry.cellWidth;
    const middleRow = geometry.middleRow + dy / geometry.cellHeight;
    this.moveTo(middleKey, middleRow, geometry.zoom);
  }

  moveTo(middleKey, middleRow, zoom) {
    const { n, m } = this.source;
    this.window = { u: middleKey / m, v: middleRow / n, z: zoom };
    const geometry = this.geometry(); // this keeps the window within the map
    this.window = { u: geometry.middleKey / m, v: geometry.middleRow / n, z: geometry.zoom };
    this.handlers.onMove(this.window);
    this.redraw();
  }

  draw() {
    const { canvas, context } = this;
    if (!canvas.isConnected || !canvas.clientWidth) return;
    const pixelRatio = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * pixelRatio);
    const height = Math.round(canvas.clientHeight * pixelRatio);
    if (canvas.width !== width || canvas.height !== height) {
      canvas.width = width;
      canvas.height = height;
    }
    context.setTransform(pixelRatio, 0, 0, pixelRatio, 0, 0);
    context.clearRect(0, 0, canvas.clientWidth, canvas.clientHeight);
    if (!this.source) return;

    const geometry = this.geometry();
    canvas.style.touchAction = geometry.zoom > 1.001 ? "none" : "pan-y"; // without zoom a swipe scrolls the page
    context.save();
    context.beginPath();
    const left = Math.max(LEFT, geometry.x(0));
    const top = Math.max(TOP, geometry.y(0));
    const right = Math.min(LEFT + geometry.width, geometry.x(geometry.m));
    const bottom = Math.min(TOP + geometry.height, geometry.y(geometry.n));
    context.rect(left, top, right - left, bottom - top);
    context.clip();
    const missing = this.drawTiles(geometry);
    const cellSize = Math.min(geometry.cellWidth, geometry.cellHeight);
    if (geometry.level === 0 && cellSize >= NUMBER_CELL) this.writeNumbers(geometry);
    context.restore();

    const style = getComputedStyle(canvas);
    this.drawMarks(geometry, style);
    drawAxes(context, geometry, this.label, this.tokenMarks(geometry), style);
    canvas.dataset.level = geometry.level;
    canvas.dataset.loading = missing;
  }

  // Draw the tiles in view. A missing tile is replaced by the part of a coarser one. Returns how many are missing.
  drawTiles(geometry) {
    const { context, source } = this;
    const span = TILE_SIZE << geometry.level; // cells of the map per tile
    const firstTile = (cell) => Math.max(0, Math.floor(cell / span));
    const lastTile = (cell, count) => Math.min(Math.ceil(count / span) - 1, Math.floor(cell / span));
    const firstX = firstTile((LEFT - geometry.x(0)) / geometry.cellWidth);
    const firstY = firstTile((TOP - geometry.y(0)) / geometry.cellHeight);
    const lastX = lastTile((LEFT + geometry.width - geometry.x(0)) / geometry.cellWidth - 1e-6, geometry.m);
    const lastY = lastTile((TOP + geometry.height - geometry.y(0)) / geometry.cellHeight - 1e-6, geometry.n);

    const missing = [];
    context.imageSmoothingEnabled = false;
    for (let y = firstY; y <= lastY; y++) {
      for (let x = firstX; x <= lastX; x++) {
        if (this.drawTile(geometry, x, y)) continue;
        const distance = Math.hypot((x + 0.5) * span - geometry.middleKey, (y + 0.5) * span - geometry.middleRow);
        missing.push({ distance, position: [geometry.level, x, y] });
      }
    }

    // The overview comes first, because it can replace any other tile; then the tiles nearest to the middle.
    missing.sort((a, b) => a.distance - b.distance);
    const positions = missing.map((tile) => tile.position);
    const needsOverview = !source.get(source.top, 0, 0);
    if (needsOverview) positions.unshift([source.top, 0, 0]);
    clearTimeout(this.timer);
    if (needsOverview || !missing.length) {
      source.request(positions);
    } else {
      this.timer = setTimeout(() => {
        if (this.source === source) source.request(positions);
      }, SETTLED);
    }
    return missing.length;
  }

  // Draw one tile. Returns whether it was loaded at the level that is shown.
  drawTile(geometry, x, y) {
    const span = TILE_SIZE << geometry.level;
    const snap = (pixel) => Math.round(pixel * geometry.pixelRatio) / geometry.pixelRatio; // no seams between tiles
    for (let level = geometry.level; level <= this.source.top; level++) {
      const coarser = level - geometry.level;
      const tileX = x >> coarser;
      const tileY = y >> coarser;
      const tile = this.source.get(level, tileX, tileY);
      if (!tile) continue;

      // The part of this (possibly coarser) tile that covers tile (x, y) of the shown level.
      const part = TILE_SIZE / 2 ** coarser;
      const cellSize = 2 ** level;
      const firstColumn = (x - (tileX << coarser)) * part;
      const firstRow = (y - (tileY << coarser)) * part;
      const columns = Math.min(part, tile.columns - firstColumn);
      const rows = Math.min(part, tile.rows - firstRow);
      if (columns <= 0 || rows <= 0) return coarser === 0;

      const left = snap(geometry.x(x * span));
      const top = snap(geometry.y(y * span));
      const right = snap(geometry.x(x * span + columns * cellSize));
      const bottom = snap(geometry.y(y * span + rows * cellSize));
      const image = this.source.image(tile, level, tileX, tileY);
      this.context.drawImage(image, firstColumn, firstRow, columns, rows, left, top, right - left, bottom - top);
      return coarser === 0;
    }
    return false;
  }

  writeNumbers(geometry) {
    const { context } = this;
    const { n, m, width, height, cellWidth, cellHeight, x, y } = geometry;
    context.font = "10px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    const darkTheme = getComputedStyle(this.canvas).colorScheme === "dark";
    const firstRow = Math.max(0, Math.floor((TOP - y(0)) / cellHeight));
    const firstKey = Math.max(0, Math.floor((LEFT - x(0)) / cellWidth));
    for (let row = firstRow; row < n && y(row) < TOP + height; row++) {
      for (let key = firstKey; key < m && x(key) < LEFT + width; key++) {
        const cell = this.read({ row, key });
        if (!cell || cell.level || !(Math.abs(cell.value) >= 0.0005)) continue;
        // Strong colours are dark in the light theme and light in the dark theme.
        const strong = Math.sqrt(Math.abs(cell.value) / this.source.colourMaximum(0)) > 0.55;
        context.fillStyle = strong !== darkTheme ? "#ffffff" : "#10151f";
        context.fillText(formatNumber(cell.value), x(key + 0.5), y(row + 0.5));
      }
    }
  }

  // The marks as token indices, for the axes. A pooled cell has none of its own.
  tokenMarks(geometry) {
    const isExact = geometry.queryCount === geometry.n && geometry.keyCount === geometry.m;
    return isExact ? this.marks : {};
  }

  // Mark the locked row and cell, and light up the row and the column under the pointer.
  drawMarks(geometry, style) {
    const { context } = this;
    const { n, m, width, height, cellWidth, cellHeight, x, y } = geometry;
    const { row, key, hover } = this.marks;

    function drawBox(x0, y0, x1, y1, isFilled = false) {
      const left = Math.max(LEFT, x0);
      const top = Math.max(TOP, y0);
      const boxWidth = Math.min(LEFT + width, x(m), x1) - left;
      const boxHeight = Math.min(TOP + height, y(n), y1) - top;
      if (boxWidth <= 0 || boxHeight <= 0) return;
      if (isFilled) context.fillRect(left, top, boxWidth, boxHeight);
      context.strokeRect(left, top, boxWidth, boxHeight);
    }
    const rowBox = (i, isFilled) => drawBox(x(0), y(i), x(m), y(i) + Math.max(cellHeight, 2), isFilled);
    const columnBox = (j, isFilled) => drawBox(x(j), y(0), x(j) + Math.max(cellWidth, 2), y(n), isFilled);

    context.lineWidth = 1.5;
    context.strokeStyle = style.getPropertyValue("--asked");
    if (isNumber(row)) rowBox(row);
    if (isNumber(key) && isNumber(row)) {
      const right = x(key) + Math.max(cellWidth, 2) + 1;
      const bottom = y(row) + Math.max(cellHeight, 2) + 1;
      drawBox(x(key) - 1, y(row) - 1, right, bottom);
    } else if (isNumber(key)) {
      columnBox(key);
    }
    if (!hover) return;
    context.lineWidth = 1;
    context.strokeStyle = style.getPropertyValue("--asked");
    context.fillStyle = style.getPropertyValue("--light");
    if (isNumber(hover.row)) rowBox(hover.row, true);
    if (isNumber(hover.key)) columnBox(hover.key, true);
  }
}
