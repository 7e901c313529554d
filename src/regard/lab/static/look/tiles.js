// The tiles of maps. They are requested when they come into view, and the most recently used ones are kept.
import { getFloats } from "../api.js";
import { colourMaximum, paint, paintSigned } from "../colour.js";
import { binRange, headMap } from "../packed.js";
import { isDark } from "../theme.js";

export const TILE_SIZE = 256; // cells per side
const CACHE_SIZE = 180; // a tile and its image take half a megabyte
const PARALLEL_REQUESTS = 6;
const cache = new Map(); // key → tile, the least recently used first
const loading = new Map(); // key → AbortController
const needed = new Map(); // map → the tiles that it shows now, the most urgent first

function cachedTile(key) {
  const tile = cache.get(key);
  if (!tile) return null;
  cache.delete(key);
  cache.set(key, tile);
  return tile;
}

// Abort the requests that no map needs any more, and start those that are needed.
function updateRequests() {
  // The maps take turns, so that each gets its most urgent tiles first.
  const missing = new Map();
  let longest = 0;
  for (const tiles of needed.values()) longest = Math.max(longest, tiles.length);
  for (let i = 0; i < longest; i++) {
    for (const tiles of needed.values()) {
      const tile = tiles[i];
      if (tile && !cache.has(tile.key)) missing.set(tile.key, tile);
    }
  }
  for (const [key, controller] of loading) {
    if (missing.has(key)) continue;
    controller.abort();
    loading.delete(key);
  }
  for (const tile of missing.values()) {
    if (loading.size >= PARALLEL_REQUESTS) break;
    if (!loading.has(tile.key)) load(tile);
  }
}

async function load({ key, fields }) {
  const controller = new AbortController();
  loading.set(key, controller);
  try {
    const { values, shape } = await getFloats("/api/look/tile", fields, controller.signal);
    cache.set(key, { values, rows: shape[0], columns: shape[1] });
    while (cache.size > CACHE_SIZE) cache.delete(cache.keys().next().value);
    for (const map of [...needed.keys()]) map.onTile(key);
  } catch (error) {
    if (error.name !== "AbortError") {
      for (const map of [...needed.keys()]) map.onTileError(key, error);
    }
  }
  if (loading.get(key) === controller) loading.delete(key);
  updateRequests();
}

// The image of a tile, painted again when `stamp` changes.
function tileImage(tile, stamp, paintOn) {
  if (tile.stamp !== stamp) {
    tile.canvas ??= document.createElement("canvas");
    paintOn(tile.canvas);
    tile.stamp = stamp;
  }
  return tile.canvas;
}

// The map of one head with one setting of its scores. `levels` is the lab's response about its sizes.
export class Tiles {
  constructor(fields, levels, { onChange, onError }) {
    this.fields = fields;
    this.levels = levels;
    this.n = levels.n;
    this.m = levels.m;
    this.top = levels.top;
    this.onChange = onChange;
    this.onError = onError;
    this.base = JSON.stringify(fields);
    this.failedKeys = new Set();
    this.sinkColumns = null;
  }

  key(level, x, y) {
    return `${this.base}/${level}/${x}/${y}`;
  }

  get(level, x, y) {
    return cachedTile(this.key(level, x, y));
  }

  // Request tiles, given as [level, x, y]. Tiles that were requested before and are not in the list are not needed.
  request(positions) {
    const tiles = [];
    for (const [level, x, y] of positions) {
      const key = this.key(level, x, y);
      if (!this.failedKeys.has(key)) tiles.push({ key, fields: { ...this.fields, level, x, y } });
    }
    needed.set(this, tiles);
    updateRequests();
  }

  onTile(key) {
    if (key.startsWith(this.base)) this.onChange();
  }

  onTileError(key, error) {
    if (!key.startsWith(this.base)) return;
    if (!this.failedKeys.size) this.onError(error);
    this.failedKeys.add(key); // requested again only when the map is opened again
  }

  // Draw the map without the first keys. `columns` are the weights of all queries on each of them; null draws all.
  hideSinks(columns) {
    this.sinkColumns = columns;
    this.sinkFactor = null;
  }

  // The weight that gets the darkest colour. A sink takes most of the weight, and other cells look pale beside it:
  // without it the colours start lower.
  colourMaximum(level) {
    const maximum = this.levels.darkest[Math.min(level, this.levels.darkest.length - 1)] || 1;
    if (!this.sinkColumns) return maximum;
    const overview = this.sinkFactor ? null : this.get(this.top, 0, 0);
    if (overview) {
      const rest = colourMaximum(this.withoutSinks(overview, this.top, 0, 0));
      const all = colourMaximum(overview.values) || 1;
      this.sinkFactor = Math.min(1, rest / all) || 1;
    }
    return maximum * (this.sinkFactor ?? 1);
  }

  // The values of a tile, without the weight on hidden sinks.
  withoutSinks(tile, level, x, y) {
    if (!this.sinkColumns || x > 0) return tile.values;
    const values = Float32Array.from(tile.values);
    const cellSize = 2 ** level;
    for (const [key, column] of this.sinkColumns.entries()) {
      const tileColumn = Math.floor(key / cellSize);
      if (tileColumn >= tile.columns) continue;
      for (let row = 0; row < tile.rows; row++) {
        const first = (y * TILE_SIZE + row) * cellSize;
        const weights = column.subarray(first, first + cellSize);
        values[row * tile.columns + tileColumn] -= weights.reduce((sum, weight) => sum + weight, 0) / weights.length;
      }
    }
    return values;
  }

  image(tile, level, x, y) {
    const maximum = this.colourMaximum(level);
    const stamp = `${isDark()} ${maximum} ${Boolean(this.sinkColumns)}`;
    return tileImage(tile, stamp, (canvas) => {
      paint(canvas, this.drawn(tile, level, x, y), tile.columns, tile.rows, maximum);
    });
  }

  // The values of a tile as they are drawn. Cells are sums over 2^level keys, but the last ones and those with hidden
  // sinks have fewer: they are scaled to the same number, because they would look paler than they are.
  drawn(tile, level, x, y) {
    const values = this.withoutSinks(tile, level, x, y);
    const cellSize = 2 ** level;
    const hidden = this.sinkColumns?.length ?? 0;
    const factors = Float32Array.from({ length: tile.columns }, (_, column) => {
      const first = (x * TILE_SIZE + column) * cellSize;
      const keys = Math.min(this.m, first + cellSize) - Math.max(first, hidden);
      return keys > 0 ? cellSize / keys : 1;
    });
    if (factors.every((factor) => factor === 1)) return values;
    return values.map((weight, i) => weight * factors[i % tile.columns]);
  }

  close() {
    needed.delete(this);
    updateRequests();
  }
}

// The difference B − A of two maps of the same size.
export class Difference {
  constructor(a, b, handlers) {
    this.a = new Tiles(a.fields, a.levels, handlers);
    this.b = new Tiles(b.fields, b.levels, handlers);
    this.n = b.n;
    this.m = b.m;
    this.top = b.top;
    this.differences = new WeakMap(); // tile of B → its difference
  }

  // Draw the difference without the first keys: see `Tiles.hideSinks`. The values that are read stay the whole ones.
  hideSinks(columnsOfA, columnsOfB) {
    this.a.hideSinks(columnsOfA);
    this.b.hideSinks(columnsOfB);
  }

  get(level, x, y) {
    const a = this.a.get(level, x, y);
    const b = this.b.get(level, x, y);
    if (!a || !b) return null;
    if (this.differences.get(b)?.a !== a) {
      const values = Float32Array.from(b.values, (value, i) => value - a.values[i]);
      this.differences.set(b, { a, b, values, rows: b.rows, columns: b.columns });
    }
    return this.differences.get(b);
  }

  request(positions) {
    this.a.request(positions);
    this.b.request(positions);
  }

  colourMaximum(level) {
    return Math.max(this.a.colourMaximum(level), this.b.colourMaximum(level));
  }

  image(tile, level, x, y) {
    const maximum = this.colourMaximum(level);
    // The columns of the two heads arrive one after the other, so each of them needs a new picture.
    const stamp = `${isDark()} ${maximum} ${Boolean(this.a.sinkColumns)} ${Boolean(this.b.sinkColumns)}`;
    return tileImage(tile, stamp, (canvas) => {
      const valuesOfA = this.a.drawn(tile.a, level, x, y);
      const valuesOfB = this.b.drawn(tile.b, level, x, y);
      const values = valuesOfB.map((value, i) => value - valuesOfA[i]);
      paintSigned(canvas, values, tile.columns, tile.rows, maximum);
    });
  }

  close() {
    this.a.close();
    this.b.close();
  }
}

// The pooled map alone, for a recording without q and k. `index` is the index of the head in its layer.
export class PooledMap {
  constructor(layer, index, hideSinks) {
    const { map, perKey, rows, width, darkest } = headMap(layer, index, hideSinks);
    this.isPooled = true;
    this.sums = map; // the weight on all keys of a cell
    this.tile = { values: perKey, rows, columns: width };
    this.n = rows;
    this.m = width;
    this.top = 0;
    this.maximum = darkest;
    this.queryCount = layer.n ?? rows;
    this.keyCount = layer.m ?? width;
  }

  // The first and the last query or key of a bin.
  bin(side, index) {
    const bins = side === "keys" ? this.m : this.n;
    const count = side === "keys" ? this.keyCount : this.queryCount;
    const [first, end] = binRange(index, bins, count);
    return [first, end - 1];
  }

  // The weight on all keys of a cell.
  sum({ row, key }) {
    return this.sums[row * this.m + key];
  }

  get(level, x, y) {
    return level === 0 && x === 0 && y === 0 ? this.tile : null;
  }

  request() {}

  colourMaximum() {
    return this.maximum;
  }

  image(tile) {
    this.canvas ??= document.createElement("canvas");
    return paint(this.canvas, tile.values, tile.columns, tile.rows, this.maximum);
  }

  close() {}
}
