// Tiles of maps: asked for as they come into view, let go when they leave it, and the last few hundred kept.
import { floats } from "../api.js";
import { paint, paintSigned } from "../colour.js";
import { isDark } from "../theme.js";

export const SIZE = 256; // cells of a tile, either way
const KEPT = 300; // 256 × 256 numbers and their picture are half a megabyte
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
    this.signed = false;
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

  darkest(level) {
    return this.levels.darkest[Math.min(level, this.levels.darkest.length - 1)] || 1;
  }

  picture(tile, level) {
    const stamp = `${isDark()} ${this.darkest(level)}`;
    if (tile.stamp !== stamp) {
      tile.canvas ??= document.createElement("canvas");
      paint(tile.canvas, tile.values, tile.cols, tile.rows, this.darkest(level));
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
    Object.assign(this, { n: b.n, m: b.m, top: b.top, signed: true });
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
