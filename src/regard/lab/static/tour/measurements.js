// What the tour says is measured: recordings of a short text, read once and twice, the heads that have the types the
// tour is about, and what changes if they are ablated. Each measurement is made once.
import { followJob, get, getFloats, post } from "../api.js";
import { loadDescription } from "../look/recording_cache.js";

// Every word of it is one token of the bundled model.
const TEXT = "The user must open a text file and then return the first line.";
// A title contains the text, so that a recording of another text is not taken for one of these.
const INPUTS = {
  once: { title: `tour: ${TEXT}`, text: TEXT },
  twice: { title: `tour, twice: ${TEXT}`, text: `${TEXT} ${TEXT}` },
};

export class Measurements {
  // `report(text)` is called with what is being done; `signal` stops waiting.
  constructor(report, signal) {
    this.report = report;
    this.signal = signal;
    this.results = new Map();
  }

  once(name, measure) {
    if (!this.results.has(name)) {
      const result = measure();
      this.results.set(name, result);
      result.catch(() => this.results.delete(name)); // so that the next call tries again
    }
    return this.results.get(name);
  }

  async runJob(path, body, text) {
    const job = await post(path, body, this.signal);
    return followJob(job, (current) => {
      const percent = current.of ? ` ${Math.round((100 * current.done) / current.of)} %` : "";
      this.report(`${text} …${percent}`);
    }, this.signal);
  }

  model() {
    return this.once("model", async () => (await post("/api/look/bundled", {}, this.signal)).id);
  }

  // The recording of an input ("once" or "twice"). An earlier tour may have made it.
  recording(input) {
    return this.once(`recording ${input}`, async () => {
      const model = await this.model();
      const { title, text } = INPUTS[input];
      const { recordings } = await get("/api/workspace", {}, this.signal);
      const earlier = recordings.find((item) => item.made && item.title === title && item.model === model);
      if (earlier) return loadDescription(earlier.id, this.signal);
      const { recording } = await this.runJob("/api/look", { model, text, title }, "reading the text");
      return loadDescription(recording, this.signal);
    });
  }

  // The heads of the tour, by their types in the atlas: the clearest induction head, the clearest previous-token head
  // before it, and of those that are neither, the one that attends most broadly.
  heads() {
    return this.once("heads", async () => {
      const description = await this.recording("once");
      const model = await this.model();
      const { kinds } = await this.runJob("/api/look/kinds", { model }, "finding head types");
      const candidates = [];
      for (const entry of kinds) {
        const layer = description.places.find((place) => place.path === entry.path);
        if (layer) candidates.push({ ...entry, layer, place: layer.place });
      }
      const induction = clearest(candidates, "induction");
      const earlier = candidates.filter((candidate) => candidate.place < induction.place);
      const previous = clearest(earlier, "previous");
      const column = Object.keys(description.columns).indexOf("spread");
      const spread = ({ layer, head }) => layer.numbers[layer.heads.indexOf(head)][column];
      let other = null;
      for (const candidate of candidates) {
        if (candidate.labels.includes("previous") || candidate.labels.includes("induction")) continue;
        if (!other || spread(candidate) > spread(other)) other = candidate;
      }
      return { induction, previous, other: other ?? induction, earlier, count: candidates.length };
    });
  }

  // The exact weights of a head on an input: values[n · query + key].
  weights(input, { place, head }) {
    return this.once(`weights ${input} ${place} ${head}`, async () => {
      const { id } = await this.recording(input);
      const tile = { recording: id, place, head, level: 0, x: 0, y: 0 };
      const { values, shape } = await getFloats("/api/look/tile", tile, this.signal);
      return { values, n: shape[1] };
    });
  }

  // What a head does on an input, for example { previous: { value, rows } }.
  async onText(input, { place, head }) {
    const { id } = await this.recording(input);
    const { on_text: scores } = await get("/api/look/head", { recording: id, place, head }, this.signal);
    if (scores.reason) throw new Error(scores.reason);
    return scores;
  }

  // The losses of the tokens of the repeated text, with and without the induction head.
  ablation() {
    return this.once("ablation", async () => {
      const { id } = await this.recording("twice");
      const { induction } = await this.heads();
      const body = { recording: id, heads: [[induction.place, induction.head]], by: "zero" };
      const { loss } = await this.runJob("/api/look/ablate", body, "running the model without the head");
      return { before: loss.before.tokens, after: loss.after.tokens };
    });
  }

  // The induction of the induction head, with all heads and without each earlier head.
  sources() {
    return this.once("sources", async () => {
      const { id } = await this.recording("twice");
      const { induction, earlier } = await this.heads();
      const body = {
        recording: id, place: induction.place, head: induction.head,
        sources: earlier.map(({ place, head }) => [place, head]),
      };
      return this.runJob("/api/look/sources", body, "ablating each earlier head");
    });
  }

  // How many tokens the first copy in the repeated text has: the repeated text starts with the tokens of the text.
  async firstCopy() {
    const [once, twice] = await Promise.all([this.recording("once"), this.recording("twice")]);
    const tokens = once.texts[once.places[0].queries];
    const repeated = twice.texts[twice.places[0].queries];
    if (!tokens.every((token, i) => token === repeated[i])) throw new Error("the text is split differently in its copy");
    return tokens.length;
  }
}

// The head with the highest confidence among those that have the type.
function clearest(candidates, type) {
  let best = null;
  for (const candidate of candidates) {
    if (!candidate.labels.includes(type)) continue;
    if (!best || candidate.confidence[type] > best.confidence[type]) best = candidate;
  }
  if (!best) throw new Error(`no head of the model clearly has the type ${type}, so the tour cannot go on`);
  return best;
}
