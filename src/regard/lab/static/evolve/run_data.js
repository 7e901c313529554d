// The data of one run. It is requested in parts: while a run trains, only new records are loaded.
import { get, getFloats } from "../api.js";

const MAPS_CACHE_SIZE = 160; // steps

export class RunData {
  constructor(id) {
    this.id = id;
    this.run = null; // the last response: title, state, job, result …
    this.generation = 0; // counts how often all records were loaded again
    this.clear();
  }

  clear() {
    this.generation += 1;
    this.steps = [];
    this.labels = []; // by record and head: the head's types, the most confident first
    this.heads = [];
    this.arrivals = [];
    this.measures = []; // groups of measures, each { name, label, meaning }
    this.gaps = []; // pairs of steps that are too far apart to show what happened between them
    this.metrics = null;
    this.metricsRead = -1;
    this.values = new Map(); // name → { meaning, rows }
    this.maps = new Map(); // "step content" → promise of one map per head
    this.headHistories = new Map(); // "head content" → one map per record
    this.offsets = null;
  }

  // The step after which records are new, if `count` records are loaded.
  lastStep(count) {
    return count ? this.steps[count - 1] : -1;
  }

  // Load what is new. Returns whether there was something.
  async update(signal) {
    const after = this.lastStep(this.steps.length);
    const run = await get("/api/evolve/run", { run: this.id, after, metrics: this.metricsRead }, signal);
    if (run.count !== this.steps.length + run.steps.length) {
      // The run continues from an earlier checkpoint, and the records after it are gone; or it was stopped, and the
      // record of its best step stands before the last one.
      this.clear();
      return this.update(signal);
    }
    const stateChanged = this.run?.state !== run.state || this.run?.model !== run.model;
    this.run = run;
    this.heads = run.heads;
    this.steps.push(...run.steps);
    this.labels.push(...run.labels);
    this.arrivals = run.arrivals;
    this.measures = run.measures;
    this.gaps = run.gaps;
    if (run.metrics) this.metrics = run.metrics;
    this.metricsRead = run.metrics_read;
    return Boolean(run.steps.length || run.metrics) || stateChanged;
  }

  // Whether some head has a type at some record.
  get hasTypes() {
    return this.labels.some((record) => record.some((types) => types.length));
  }

  // One number of all heads at all records, as { meaning, rows }.
  async loadValues(name, signal) {
    const values = this.values.get(name) ?? { meaning: "", rows: [] };
    const known = values.rows.length;
    if (known < this.steps.length) {
      const response = await get("/api/evolve/value", { run: this.id, name, after: this.lastStep(known) }, signal);
      values.meaning = response.meaning;
      if (values.rows.length === known) values.rows.push(...response.values); // else another call was quicker
      this.values.set(name, values);
    }
    return values;
  }

  // Rows and columns of the maps of a head. `content` is "map" (weights) or "profile" (weights by offset).
  mapShape(head, content) {
    if (content === "profile") return this.run.profile;
    return [this.heads[head].rows, this.heads[head].columns];
  }

  // The maps of all heads at a step.
  loadMaps(step, content) {
    const key = `${step} ${content}`;
    if (!this.maps.has(key)) {
      const request = this.requestMaps(step, content);
      request.catch(() => this.maps.delete(key)); // so that the next call tries again
      this.maps.set(key, request);
      if (this.maps.size > MAPS_CACHE_SIZE) this.maps.delete(this.maps.keys().next().value);
    }
    return this.maps.get(key);
  }

  async requestMaps(step, content) {
    const { values } = await getFloats("/api/evolve/maps", { run: this.id, step, of: content });
    const maps = [];
    let start = 0;
    for (let head = 0; head < this.heads.length; head++) {
      const [rows, columns] = this.mapShape(head, content);
      const end = start + rows * columns;
      maps.push(values.subarray(start, end));
      start = end;
    }
    return maps;
  }

  // The maps of one head at all records.
  async loadHeadHistory(head, content) {
    const key = `${head} ${content}`;
    const maps = this.headHistories.get(key) ?? [];
    this.headHistories.set(key, maps);
    const known = maps.length;
    if (known < this.steps.length) {
      const [rows, columns] = this.mapShape(head, content);
      const fields = { run: this.id, head, of: content, after: this.lastStep(known) };
      const { values } = await getFloats("/api/evolve/film", fields);
      if (maps.length === known) { // else another call was quicker
        const size = rows * columns;
        for (let start = 0; start < values.length; start += size) maps.push(values.subarray(start, start + size));
      }
    }
    return maps.slice(0, this.steps.length); // the response may have records that `update` has not loaded yet
  }

  // The offsets that the heads of an image model attend to; null for other models.
  async loadOffsets(signal) {
    if (!this.run.on_grid) return null;
    const known = this.offsets?.steps.length ?? 0;
    if (known < this.steps.length) {
      const response = await get("/api/evolve/offsets", { run: this.id, after: this.lastStep(known) }, signal);
      if ((this.offsets?.steps.length ?? 0) !== known) return this.offsets; // another call was quicker
      if (known) {
        for (const name of ["steps", "peak", "centre", "width", "covered"]) this.offsets[name].push(...response[name]);
      } else {
        this.offsets = response;
      }
    }
    return this.offsets;
  }
}
