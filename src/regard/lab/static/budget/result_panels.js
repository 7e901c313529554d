// The results of a plan: totals, the bottleneck, the cost by part, and memory.
import { element } from "../dom.js";
import { formatBytes, formatCount, formatExact, formatLongest, formatPercent, formatSeconds } from "./units.js";

const GROUPS = {
  projections: { title: "q, k, v, out", colour: "#1f77b4" },
  attention: { title: "scores and values", colour: "#d55e00" },
  "feed-forward": { title: "feed-forward", colour: "#009e73" },
  logits: { title: "logits", colour: "#cc79a7" },
  norms: { title: "norms", colour: "#e69f00" },
  embedding: { title: "embedding", colour: "#7f7f7f" },
};
// By the basis of the shares: the heading of the panel, and the heading of their column, as on the command line.
const BASES = {
  time: { title: "Time by part", column: "% of time" },
  FLOPs: { title: "FLOPs by part", column: "% of FLOPs" },
  "unmasked FLOPs": { title: "FLOPs by part, masked pairs skipped", column: "% unmasked" },
};
const THEORY_LABELS = { "a head": "one head", "in all": "total" };

function card(name, title, value, note) {
  return element("div", { className: "card", dataset: { card: name } },
    element("h3", { text: title }), element("strong", { text: value }), element("small", { text: note }));
}

export function totalCards(plan) {
  const { machine } = plan;
  const memory = card("memory", "Total memory", formatBytes(plan.bytes.total), memoryNote(plan));
  memory.classList.toggle("bad", plan.fits === false);
  const time = machine ? formatSeconds(plan.seconds) : "–";
  return element("div", { className: "cards" },
    card("parameters", "Parameters", formatCount(plan.parameters), parametersNote(plan)),
    flopsCard(plan),
    memory,
    card("longest", "Longest n", formatLongest(longestOf(plan)), longestNote(plan)),
    card("time", "Time", time, timeNote(plan)),
    card("crossover", "Crossover n*", formatExact(plan.crossover), crossoverNote(plan)));
}

function parametersNote({ parameters, active_parameters: active }) {
  const note = formatExact(parameters);
  return active === parameters ? note : `${note}; ${formatCount(active)} active per token`;
}

function flopsCard({ forward_flops: forward, unmasked_flops: unmasked, backward_flops: backward, training }) {
  if (training) {
    const note = `${formatCount(forward)} forward, ${formatCount(backward)} backward`;
    return card("flops", "FLOPs of a step", formatCount(forward + backward), note);
  }
  let note = formatExact(forward);
  if (unmasked !== forward) note += `; ${formatCount(unmasked)} if masked pairs are skipped`;
  return card("flops", "FLOPs, forward", formatCount(forward), note);
}

function memoryNote({ memory_limit: limit, fits, max_batch: largest, training }) {
  if (limit === null) return training ? "of a training step" : "of a forward pass";
  let note = `${fits ? "fits" : "does not fit"} into ${formatBytes(limit)}`;
  if (largest === 1) note += "; 1 sequence fits";
  else if (largest) note += `; ${formatExact(largest)} sequences fit`;
  return note;
}

// The largest n that fits, for the step that is planned.
function longestOf(plan) {
  return plan.training ? plan.max_tokens_training : plan.max_tokens_forward;
}

function longestNote(plan) {
  if (plan.fixed) return "this model has one length n";
  const context = contextNote(plan);
  if (plan.memory_limit === null) return ["select a machine, or enter a memory size", ...context].join("; ");
  const steps = { "in one pass": plan.max_tokens_forward, decoding: plan.max_tokens_decoding, training: plan.max_tokens_training };
  const own = plan.training ? "training" : "in one pass";
  const others = [];
  for (const [step, n] of Object.entries(steps)) {
    if (step !== own && n !== null) others.push(`${step} ${formatLongest(n)}`);
  }
  if (plan.decodes_any_length) others.push("decoding no limit by memory");
  let note = `tokens ${own}`;
  if (longestOf(plan) === plan.longest) note += ", all learned positions";
  return [note, ...others, ...context].join("; ");
}

// The length that the model is made for, if this n or the longest n that fits is beyond it.
function contextNote(plan) {
  const { context_length: context, tokens } = plan;
  if (context === null) return [];
  const note = `the model is made for n ≤ ${formatExact(context)}`;
  if (tokens > context) return [`${note}; this n is longer`];
  const longest = [plan.max_tokens_forward, plan.max_tokens_decoding, plan.max_tokens_training];
  return plan.decodes_any_length || longest.some((n) => n !== null && n > context) ? [note] : [];
}

function timeNote({ machine, batch, tokens, seconds }) {
  if (!machine) return "select a machine";
  return seconds ? `${formatCount((batch * tokens) / seconds)} tokens/s` : "";
}

function crossoverNote({ crossover, machine, fixed }) {
  if (crossover !== null && machine) return "tokens: attention takes half the time";
  if (crossover !== null) return "tokens: attention is half of the FLOPs";
  return fixed ? "this model has one length n" : "never: attention stays below half";
}

// A bar of coloured pieces with a legend. Pieces are { label, share, colour }.
function stackedBar(pieces) {
  const label = pieces.map((piece) => piece.label).join(", ");
  const bar = element("div", { className: "stacked", role: "img", "aria-label": label });
  const legend = element("ul", { className: "legend" });
  for (const piece of pieces) {
    const background = `background: ${piece.colour}`;
    bar.append(element("span", { style: `width: ${100 * piece.share}%; ${background}`, title: piece.label }));
    legend.append(element("li", {}, element("i", { className: "dot", style: background }), piece.label));
  }
  return [bar, legend];
}

export function bottleneckPanel(plan) {
  const pieces = [];
  for (const [name, share] of Object.entries(plan.shares)) {
    const { title, colour } = GROUPS[name];
    pieces.push({ label: `${title} ${formatPercent(share)}`, share, colour });
  }
  pieces.sort((a, b) => b.share - a.share);
  return element("section", { className: "panel bottleneck" },
    element("h2", { text: BASES[plan.share_basis].title }),
    element("p", { className: "words", text: plan.bottleneck }),
    ...stackedBar(pieces));
}

// The sum in the theory: one head, all heads, the output, the total.
export function theoryPanel(plan) {
  if (!plan.theory) return null;
  const signs = { output: "+", "in all": "=" };
  if (plan.theory["a head"]) signs["all heads"] = `× ${plan.sizes.heads} =`;
  const steps = element("div", { className: "steps" });
  for (const [name, value] of Object.entries(plan.theory)) {
    if (signs[name]) steps.append(element("span", { className: "sign", text: signs[name] }));
    steps.append(element("div", { dataset: { theory: name } },
      element("strong", { text: formatExact(value) }), element("small", { text: THEORY_LABELS[name] ?? name })));
  }
  return element("section", { className: "panel theory" }, element("h2", { text: "Parameters of attention" }), steps);
}

// The columns of the table of parts. `share` shades a cell by its part of the total.
function partColumns(plan) {
  const columns = [
    { title: "layers", text: (part) => formatExact(part.repeats), share: null, total: "" },
    {
      title: "parameters", text: (part) => (part.parameters ? formatExact(part.parameters) : "–"),
      share: (part) => part.parameters / plan.parameters, total: formatExact(plan.parameters),
    },
    {
      title: plan.training ? "FLOPs, forward" : "FLOPs", text: (part) => (part.forward_flops ? formatCount(part.forward_flops) : "–"),
      share: (part) => part.forward_flops / plan.forward_flops, total: formatCount(plan.forward_flops),
    },
  ];
  if (plan.training) {
    columns.push({
      title: "activations", text: (part) => (part.saved_bytes ? formatBytes(part.saved_bytes) : "–"),
      share: (part) => part.saved_bytes / plan.bytes.activations, total: formatBytes(plan.bytes.activations),
    });
  }
  if (plan.machine !== null) {
    columns.push({
      title: "time", text: (part) => formatSeconds(part.seconds),
      share: (part) => part.seconds / plan.seconds, total: formatSeconds(plan.seconds),
    });
  }
  // The update of the weights has no share: it does not belong to a part of the model.
  columns.push({
    title: BASES[plan.share_basis].column, text: (part) => (part.share ? formatPercent(part.share) : "–"), share: null, total: "",
  });
  return columns;
}

export function partsPanel(plan) {
  const columns = partColumns(plan);
  const header = element("tr", {}, element("th", { scope: "col", text: "part" }));
  const total = element("tr", {}, element("th", { scope: "row", text: "total" }));
  for (const column of columns) {
    header.append(element("th", { scope: "col", className: "number", text: column.title }));
    total.append(element("td", { className: "number", text: column.total }));
  }
  const body = element("tbody");
  for (const part of plan.parts) {
    const row = element("tr", {}, element("th", { scope: "row", text: part.part }));
    for (const { text, share } of columns) {
      const cell = element("td", { className: "number", text: text(part) });
      if (share) cell.style.setProperty("--share", `${100 * Math.min(1, Math.max(0, share(part) || 0))}%`);
      row.append(cell);
    }
    body.append(row);
  }
  const table = element("table", { className: "parts" },
    element("thead", {}, header), body, element("tfoot", {}, total));
  return element("section", { className: "panel" },
    element("h2", { text: "By part" }),
    element("div", { className: "wide", tabindex: 0, role: "region", "aria-label": "parts" }, table));
}

export function memoryPanel(plan) {
  const { bytes, training } = plan;
  const pieces = [];
  const addPiece = (name, size, colour) => {
    pieces.push({ label: `${name} ${formatBytes(size)}`, share: size / bytes.total, colour });
  };
  addPiece("weights", bytes.weights, "#1f77b4");
  if (training) addPiece("optimizer", bytes.optimizer, "#e69f00");
  addPiece(training ? "peak of the step" : "peak of a pass", bytes.peak, "#d55e00");
  if (!training && bytes.cache) addPiece("cache", bytes.cache, "#009e73");

  const list = element("dl", { className: "lines" });
  const addLine = (name, text) => list.append(element("dt", { text: name }), element("dd", { text }));
  addLine("total", formatBytes(bytes.total));
  if (training) {
    const recomputed = `${formatBytes(bytes.checkpointed_activations)} if blocks are recomputed`;
    addLine("gradients", `${formatBytes(bytes.gradients)}, part of the peak`);
    addLine("activations", `${formatBytes(bytes.activations)} kept for the backward pass; ${recomputed}`);
    addLine("peak if recomputed", formatBytes(bytes.checkpointed_peak));
  }
  const weights = bytes.attention_weights;
  if (weights) addLine("n × n", `${formatBytes(weights)} of attention weights, ${storageText(plan)}`);
  if (plan.decoding && !training) addDecoding(addLine, plan.decoding);
  return element("section", { className: "panel" }, element("h2", { text: "Memory" }), ...stackedBar(pieces), list);
}

function storageText({ tiled, training }) {
  if (tiled) return "never stored";
  return training ? "stored" : "stored for one layer at a time";
}

// The cost of one more token, and how many sequences can be decoded at once.
function addDecoding(addLine, decoding) {
  const parts = [`${formatCount(decoding.token_flops)}FLOP, ${formatBytes(decoding.token_bytes_read)} read`];
  if (decoding.tokens_per_second !== null) parts.push(`${formatCount(decoding.tokens_per_second)} tokens/s`);
  addLine("one more token", parts.join("; "));
  const batch = decoding.decoding_max_batch;
  if (batch === null) return;
  if (!batch) {
    addLine("serving", "no such cache fits beside the weights");
    return;
  }
  const caches = batch === 1 ? "1 such cache fits" : `${formatExact(batch)} such caches fit`;
  const together = decoding.decoding_max_batch_tokens_per_second;
  const rate = together ? `, ${formatCount(together)} tokens/s together` : "";
  addLine("serving", `${caches} beside the weights${rate}`);
}
