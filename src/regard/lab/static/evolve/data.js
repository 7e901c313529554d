// One run as the page knows it: what has come so far, and only what is new when it grows.
import { floats, get } from "../api.js";

export class RunData {
  constructor(id) {
    this.id = id;
    this.told = null; // title, state, job, result …
    this.clear();
  }

  clear() {
    this.steps = [];
    this.labels = []; // by record and head: kinds, the surest first
    this.heads = [];
    this.arrivals = [];
    this.names = [];
    this.metrics = null;
    this.metricsRead = -1;
    this.values = new Map(); // name → { unit, rows }
    this.maps = new Map(); // "step of" → promise of a picture a head
    this.films = new Map(); // "head of" → pictures by record
    this.offsets = null;
  }

  get last() {
    return this.steps.at(-1) ?? -1;
  }

  // Ask for what is new; true where there is.
  async grow(signal) {
    const told = await get("/api/evolve/run", { run: this.id, after: this.last, metrics: this.metricsRead }, signal);
    if (told.count !== this.steps.length + told.steps.length) { // it went back to a checkpoint
      this.clear();
      return this.grow(signal);
    }
    const before = JSON.stringify([this.told?.state, this.told?.model]);
    this.told = told;
    this.heads = told.heads;
    this.steps.push(...told.steps);
    this.labels.push(...told.labels);
    this.arrivals = told.arrivals;
    this.names = told.names;
    if (told.metrics) this.metrics = told.metrics;
    this.metricsRead = told.metrics_read;
    return Boolean(told.steps.length || told.metrics) || before !== JSON.stringify([told.state, told.model]);
  }

  async value(name, signal) {
    const kept = this.values.get(name) ?? { unit: "", rows: [] };
    if (kept.rows.length < this.steps.length) {
      const after = kept.rows.length ? this.steps[kept.rows.length - 1] : -1;
      const told = await get("/api/evolve/value", { run: this.id, name, after }, signal);
      kept.unit = told.unit;
      // What another answer has brought meanwhile is not taken twice.
      if ((kept.rows.length ? this.steps[kept.rows.length - 1] : -1) === after) kept.rows.push(...told.values);
      this.values.set(name, kept);
    }
    return kept;
  }

  size(head, of) {
    return of === "profile" ? this.told.profile : [this.heads[head].rows, this.heads[head].columns];
  }

  // Pictures of all heads at a step.
  at(step, of) {
    const key = `${step} ${of}`;
    if (!this.maps.has(key)) {
      const asked = floats("/api/evolve/maps", { run: this.id, step, of }).then(({ values }) => {
        let begin = 0;
        return this.heads.map((_, head) => {
          const [rows, columns] = this.size(head, of);
          begin += rows * columns;
          return values.subarray(begin - rows * columns, begin);
        });
      });
      asked.catch(() => this.maps.delete(key));
      this.maps.set(key, asked);
      if (this.maps.size > 160) this.maps.delete(this.maps.keys().next().value);
    }
    return this.maps.get(key);
  }

  // Pictures of one head at all records.
  async film(head, of) {
    const key = `${head} ${of}`;
    const kept = this.films.get(key) ?? [];
    this.films.set(key, kept);
    const known = kept.length;
    if (known < this.steps.length) {
      const [rows, columns] = this.size(head, of);
      const { values } = await floats("/api/evolve/film", { run: this.id, head, of, after: known ? this.steps[known - 1] : -1 });
      if (kept.length === known) {
        for (let at = 0; at < values.length; at += rows * columns) kept.push(values.subarray(at, at + rows * columns));
      }
    }
    return kept.slice(0, this.steps.length); // a run that grows may have sent more than is known of it here
  }

  async where(signal) {
    if (!this.told.on_grid) return null;
    const known = this.offsets?.steps.length ?? 0;
    if (known < this.steps.length) {
      const told = await get("/api/evolve/offsets", { run: this.id, after: known ? this.steps[known - 1] : -1 }, signal);
      if ((this.offsets?.steps.length ?? 0) !== known) return this.offsets; // another call was quicker
      if (!known) this.offsets = told;
      else for (const name of ["steps", "peak", "centre", "width", "covered"]) this.offsets[name].push(...told[name]);
    }
    return this.offsets;
  }
}
