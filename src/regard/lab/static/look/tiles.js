// Tiles of maps: asked for as they come into view, let go when they leave it, and the last few hundred kept.
import { floats } from "../api.js";
import { darkestOf, paint, paintSigned } from "../colour.js";
import { isDark } from "../theme.js";
import { headMap } from "./numbers.js";

export const SIZE = 256; // cells of a tile, either way
const KEPT = 180; // 256 × 256 numbers and their picture are half a megabyte
const AT_ONCE = 6;
const kept = new Map(); // key → tile, the least recently used first
const loading = new Map(); // key → AbortController
const wanted = new Map(); // owner → tiles it shows now, the most urgent first

function use(key) {
  const tile = kept.get(key);
  if (tile) {
    kept.delete(key);
    kept.set(key, tile);
  }
  return tile ?? null;
}

function pump() {
  const all = new Map();
  const longest = Math.max(0, ...[...wanted.values()].map((tiles) => tiles.length));
  for (let i = 0; i < longest; i++) {
    for (const tiles of wanted.values()) if (tiles[i] && !kept.has(tiles[i].key)) all.set(tiles[i].key, tiles[i]);
  }
  for (const [key, controller] of loading) {
    if (!all.has(key)) {
      controller.abort();
      loading.delete(key);
    }
  }
  for (const one of all.values()) {
    if (loading.size >= AT_ONCE) break;
    if (!loading.has(one.key)) load(one);
  }
}

async function load(one) {
  const controller = new AbortController();
  loading.set(one.key, controller);
  try {
    const { values, shape } = await floats("/api/look/tile", one.fields, controller.signal);
    kept.set(one.key, { values, rows: shape[0], cols: shape[1] });
    while (kept.size > KEPT) kept.delete(kept.keys().next().value);
    for (const owner of [...wanted.keys()]) owner.arrived(one.key);
  } catch (error) {
    if (error.name !== "AbortError") for (const owner of [...wanted.keys()]) owner.failed(one.key, error);
  }
  if (loading.get(one.key) === controller) loading.delete(one.key);
  pump();
}

// The tiles of one head with one way of making scores. `levels` is what the lab says of its sizes.
export class Tiles {
  constructor(fields, levels, { changed, failed }) {
    Object.assign(this, { fields, levels, n: levels.n, m: levels.m, top: levels.top, changed });
    this.base = JSON.stringify(fields);
    this.broken = new Set();
    this.tell = failed;
  }

  key(level, x, y) {
    return `${this.base}/${level}/${x}/${y}`;
  }

  get(level, x, y) {
    return use(this.key(level, x, y));
  }

  want(list) {
    const tiles = list.map(([level, x, y]) => ({ key: this.key(level, x, y), fields: { ...this.fields, level, x, y } }));
    wanted.set(this, tiles.filter((one) => !this.broken.has(one.key)));
    pump();
  }

  arrived(key) {
    if (key.startsWith(this.base)) this.changed();
  }

  failed(key, error) {
    if (!key.startsWith(this.base)) return;
    if (!this.broken.size) this.tell(error);
    this.broken.add(key); // asked again only when the map is opened again
  }

  // Leave out of the picture what the first keys took: `columns` are all queries' weights on each of them.
  hide(columns) {
    this.columns = columns;
    this.paler = null;
  }

  // A sink takes most of what there is, and all else looks pale beside it: without it colours begin lower.
  darkest(level) {
    const given = this.levels.darkest[Math.min(level, this.levels.darkest.length - 1)] || 1;
    if (!this.columns) return given;
    const whole = this.paler ? null : this.get(this.top, 0, 0);
    if (whole) this.paler = Math.min(1, darkestOf(this.rest(whole, this.top, 0, 0)) / (darkestOf(whole.values) || 1)) || 1;
    return given * (this.paler ?? 1);
  }

  // A tile's values without the sinks' share of them.
  rest(tile, level, x, y) {
    if (!this.columns || x > 0) return tile.values;
    const values = Float32Array.from(tile.values);
    const size = 2 ** level;
    this.columns.forEach((column, key) => {
      const at = Math.floor(key / size);
      for (let i = 0; at < tile.cols && i < tile.rows; i++) {
        const first = (y * SIZE + i) * size;
        const rows = column.subarray(first, first + size);
        values[i * tile.cols + at] -= rows.reduce((a, b) => a + b, 0) / rows.length;
      }
    });
    return values;
  }

  picture(tile, level, x, y) {
    const stamp = `${isDark()} ${this.darkest(level)} ${Boolean(this.columns)}`;
    if (tile.stamp !== stamp) {
      tile.canvas ??= document.createElement("canvas");
      paint(tile.canvas, this.rest(tile, level, x, y), tile.cols, tile.rows, this.darkest(level));
      tile.stamp = stamp;
    }
    return tile.canvas;
  }

  close() {
    wanted.delete(this);
    pump();
  }
}

// B − A, cell by cell, of two maps of one size.
export class Difference {
  constructor(a, b, handlers) {
    this.a = new Tiles(a.fields, a.levels, handlers);
    this.b = new Tiles(b.fields, b.levels, handlers);
    Object.assign(this, { n: b.n, m: b.m, top: b.top });
    this.made = new WeakMap(); // of B's tile; both are given back together
  }

  get(level, x, y) {
    const [a, b] = [this.a.get(level, x, y), this.b.get(level, x, y)];
    if (!a || !b) return null;
    if (this.made.get(b)?.of !== a) {
      const values = Float32Array.from(b.values, (value, i) => value - a.values[i]);
      this.made.set(b, { of: a, values, rows: b.rows, cols: b.cols });
    }
    return this.made.get(b);
  }

  want(list) {
    this.a.want(list);
    this.b.want(list);
  }

  darkest(level) {
    return Math.max(this.a.darkest(level), this.b.darkest(level));
  }

  picture(tile, level) {
    const stamp = `${isDark()} ${this.darkest(level)}`;
    if (tile.stamp !== stamp) {
      tile.canvas ??= document.createElement("canvas");
      paintSigned(tile.canvas, tile.values, tile.cols, tile.rows, this.darkest(level));
      tile.stamp = stamp;
    }
    return tile.canvas;
  }

  close() {
    this.a.close();
    this.b.close();
  }
}

// The small map alone, of a recording that kept no q and k: `place` and which of its heads.
export class Pooled {
  constructor(place, index, hide) {
    const { values, rows, width, darkest } = headMap(place, index, hide);
    this.tile = { values, rows, cols: width };
    Object.assign(this, { n: rows, m: width, top: 0, pooled: true, most: darkest });
    this.totals = [place.n ?? rows, place.m ?? width];
  }

  // The first and last query (0) or key (1) of a bin.
  bin(which, at) {
    const [bins, total] = [which ? this.m : this.n, this.totals[which]];
    return [Math.ceil((at * total) / bins), Math.ceil(((at + 1) * total) / bins) - 1];
  }

  get(level, x, y) {
    return level === 0 && x === 0 && y === 0 ? this.tile : null;
  }

  want() {}

  darkest() {
    return this.most;
  }

  picture(tile) {
    this.canvas ??= document.createElement("canvas");
    return paint(this.canvas, tile.values, tile.cols, tile.rows, this.most);
  }

  close() {}
}
