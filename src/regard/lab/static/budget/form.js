// The left side: which model, its sizes and switches, and what it runs on. Only what a kind takes is shown.
import { checkbox, element, select } from "../dom.js";
import { size } from "./size.js";
import { BATCHES, CHOICES, FLAGS, LARGEST, LENGTHS, NEEDED, REACHING, SIZES, beginning, divided, fitting } from "./model.js";

const KINDS = { attention: "Attention", block: "Block", encoder: "Encoder", decoder: "Decoder",
  "encoder-decoder": "Encoder–decoder", vit: "Vision" };

// `given.changed()` after each change of `given.now`.
export function form(given) {
  const { start, changed } = given;
  const parts = {};
  const set = (change, name = "") => {
    change(given.now);
    divided(given.now, name);
    fitting(given.now, start);
    show();
    changed();
  };

  parts.kinds = element("div", { className: "kinds", role: "group", "aria-label": "kind of model" });
  for (const [kind, title] of Object.entries(KINDS)) {
    parts.kinds.append(element("button", { type: "button", text: title, dataset: { kind }, on: { click: () => set((now) => {
      Object.assign(now, { kind, config: null, tokens: now.tokens ?? 512 });
    }) } }));
  }
  parts.preset = select("begin with", [["", "sizes of your own"], ...Object.keys(start.presets).map((x) => [x, x])], "", (name) => {
    if (name) set((now) => Object.assign(now, beginning(start.presets[name]), ran(now)));
  });
  parts.sizes = Object.fromEntries(Object.entries(SIZES).map(([name, [label]]) => [name, size(label, {
    optional: !NEEDED.includes(name), largest: LARGEST[name], change: (value) => set((now) => {
      if (value === null) delete now.fields[name];
      else now.fields[name] = value;
    }, name),
  })]));
  parts.flags = Object.fromEntries(Object.entries(FLAGS).map(([name, [label]]) => [name, checkbox(label, false, (on) => {
    set((now) => { now.fields[name] = on; }, name);
  })]));
  parts.choices = Object.fromEntries(Object.entries(CHOICES).map(([name, [label, known]]) => [name,
    select(label, known.map((x) => [x, x]), known[0], (value) => set((now) => {
      now.fields[name] = value;
      if (name === "position") delete now.fields.reach;
    }, name))]));
  const run = (label, name, key) => size(label, { optional: key !== "batch", largest: LARGEST[name],
    change: (value) => set((now) => { now[key] = value; }) });
  parts.tokens = run("tokens n", "n", "tokens");
  parts.source = run("source m", "m", "source");
  parts.batch = run("batch", "batch", "batch");
  parts.training = checkbox("training step", false, (on) => set((now) => { now.training = on; }));
  parts.tiled = checkbox("tiled attention (never stores n × n)", true, (on) => set((now) => { now.tiled = on; }));
  parts.dtype = select("computed in", ["float32", "bfloat16", "float16", "float64"].map((x) => [x, x]), "float32",
    (value) => set((now) => { now.dtype = value; }));
  parts.weights = select("weights in", [["", "the same"], ["int8", "int8"], ["int4", "int4"]], "",
    (value) => set((now) => { now.weights = value || null; }));
  parts.optimizer = select("optimizer", ["adam", "adam32", "momentum", "sgd", "none"].map((x) => [x, x]), "adam",
    (value) => set((now) => { now.optimizer = value; }));

  function show() {
    const { now } = given;
    const takes = now.config === null ? start.kinds[now.kind] : [];
    for (const button of parts.kinds.children) {
      button.setAttribute("aria-pressed", String(now.config === null && button.dataset.kind === now.kind));
    }
    parts.preset.querySelector("select").value = presetOf(now, start);
    for (const [name, box] of Object.entries(parts.sizes)) {
      box.hidden = !takes.includes(name) || (name === "reach" && !REACHING.includes(now.fields.position))
        || (name === "window" && takes.includes("causal") && !now.fields.causal);
      const follows = given.answer?.sizes?.[name];
      if (!box.hidden) box.put(now.fields[name] ?? usual(name, follows), SIZES[name][1](now), now.fields[name] !== undefined);
    }
    for (const [name, box] of Object.entries(parts.flags)) {
      box.hidden = !takes.includes(name);
      const unsaid = name === "qkv_bias" && now.kind === "vit" ? true : FLAGS[name][1];
      box.querySelector("input").checked = now.fields[name] ?? unsaid;
    }
    for (const [name, box] of Object.entries(parts.choices)) {
      box.hidden = !takes.includes(name);
      box.querySelector("select").value = now.fields[name] ?? CHOICES[name][1][0];
    }
    for (const option of parts.choices.position.querySelectorAll("option")) {
      option.disabled = now.kind === "attention" && ["learned", "sinusoidal"].includes(option.value);
    }
    const fixed = now.config === null ? now.kind === "vit" : given.answer?.fixed ?? false;
    const longest = now.fields.position === "learned" && now.config === null ? now.fields.reach : given.answer?.longest ?? Infinity;
    const within = LENGTHS.filter((x) => x <= longest);
    parts.tokens.put(fixed ? given.answer?.tokens : now.tokens ?? given.answer?.tokens ?? 512, within, now.tokens !== null);
    parts.tokens.enable(!fixed);
    parts.source.hidden = !(now.config === null ? now.kind === "encoder-decoder" : given.answer?.needs_source);
    parts.source.put(now.source ?? now.tokens ?? 512, within, now.source !== null);
    parts.batch.put(now.batch, BATCHES);
    parts.training.querySelector("input").checked = now.training;
    parts.tiled.querySelector("input").checked = now.tiled;
    parts.optimizer.hidden = !now.training;
    parts.weights.hidden = now.training;
    parts.weights.querySelector("select").value = now.weights ?? "";
    parts.optimizer.querySelector("select").value = now.optimizer;
    const dtypes = machineOf(given)?.dtypes;
    for (const option of parts.dtype.querySelectorAll("option")) option.disabled = dtypes ? !dtypes.includes(option.value) : false;
    parts.dtype.querySelector("select").value = now.dtype;
    more.hidden = now.config !== null;
    sizes.hidden = now.config !== null;
  }

  const sizes = element("div", { className: "sizes", role: "group", "aria-label": "sizes" }, ...Object.values(parts.sizes));
  const more = element("details", { className: "more" }, element("summary", { text: "switches and positions" }),
    element("div", { className: "switches" }, ...Object.values(parts.choices), ...Object.values(parts.flags)));
  more.append(parts.sizes.reach, parts.sizes.window);
  const runs = element("div", { className: "sizes", role: "group", "aria-label": "what it runs on" },
    parts.tokens, parts.source, parts.batch,
    element("div", { className: "switches" }, parts.training, parts.tiled, parts.dtype, parts.weights, parts.optimizer));
  return { kinds: parts.kinds, preset: parts.preset, sizes, more, runs, show };
}

// What a new model keeps: the batch, the machine, the numbers it is computed in.
function ran({ batch, dtype, training, optimizer, tiled, machine, weights }) {
  return { batch, dtype, training, optimizer, tiled, machine, weights };
}

function usual(name, follows) {
  return { classes: 1000, reach: 32 }[name] ?? follows ?? null;
}

function presetOf(now, start) {
  const same = (a, b) => JSON.stringify(Object.entries(a).sort()) === JSON.stringify(Object.entries(b).sort());
  const found = Object.entries(start.presets).find(([, one]) => now.config === null && one.kind === now.kind && same(one.fields, now.fields));
  return found ? found[0] : "";
}

export function machineOf({ now, start }) {
  return now.machine === "this" ? start.this : start.machines.find((one) => one.name === now.machine);
}
