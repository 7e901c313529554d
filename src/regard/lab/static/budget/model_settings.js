// The settings of the page: a kind of model with its fields, or a config.json, and the run. They are kept in the address.

const WIDTHS = [
  32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120, 6144, 8192,
  12288, 16384,
];
const HEAD_WIDTHS = [1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512];
const HIDDEN_WIDTHS = [
  64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 11008, 12288, 14336, 16384, 20480, 24576, 28672,
  32768, 49152, 65536,
];
const DEPTHS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 18, 20, 24, 28, 32, 36, 40, 48, 60, 64, 80, 96, 126];
const HEAD_COUNTS = [
  1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 128,
];
const IMAGE_SIDES = [32, 64, 96, 128, 160, 192, 224, 256, 288, 336, 384, 448, 512, 768, 1024];
const PATCH_SIDES = [1, 2, 4, 7, 8, 12, 14, 16, 28, 32, 56, 64];
const VOCABULARIES = [
  256, 1000, 4096, 8192, 16000, 30522, 32000, 37000, 50257, 65536, 100000, 128256, 151936, 200000, 256000,
];
const CLASS_COUNTS = [2, 10, 100, 200, 365, 1000, 10000, 21843];
export const LENGTHS = [
  1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576,
  32768, 49152, 65536, 131072, 262144, 524288, 1048576,
];
export const BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096];

const divisorsAmong = (steps, size) => steps.filter((step) => size % step === 0);
const lengthsUpTo = (longest) => LENGTHS.filter((length) => length >= 16 && length <= longest);

// Whether the widths of a head are given. Then the number of heads need not divide d.
function hasHeadWidths({ kind, fields }) {
  return Boolean(fields.d_key && (kind !== "attention" || fields.d_value));
}

function headCounts(settings) {
  return hasHeadWidths(settings) ? HEAD_COUNTS : divisorsAmong(HEAD_COUNTS, settings.fields.d);
}

// Each size: its label, and the steps of its slider.
export const SIZES = {
  image: { label: "image side", steps: () => IMAGE_SIDES },
  patch: { label: "patch side", steps: ({ fields }) => divisorsAmong(PATCH_SIDES, fields.image) },
  d: { label: "width d", steps: () => WIDTHS },
  heads: { label: "heads", steps: headCounts },
  kv_heads: { label: "k, v heads", steps: ({ fields }) => divisorsAmong(HEAD_COUNTS, fields.heads) },
  d_key: { label: "key width", steps: () => HEAD_WIDTHS },
  d_value: { label: "value width", steps: () => HEAD_WIDTHS },
  d_out: { label: "output width", steps: () => WIDTHS },
  layers: { label: "layers", steps: () => DEPTHS },
  decoder_layers: { label: "decoder layers", steps: () => DEPTHS },
  hidden: { label: "hidden width", steps: () => HIDDEN_WIDTHS },
  vocab: { label: "vocabulary", steps: () => VOCABULARIES },
  classes: { label: "classes", steps: () => CLASS_COUNTS },
  window: { label: "window", steps: () => lengthsUpTo(32768) },
  reach: { label: "positions reach", steps: () => lengthsUpTo(131072) },
};

// The largest values that the lab accepts; 2 ** 18 for sizes that are not listed.
export const LARGEST = {
  heads: 4096, kv_heads: 4096, layers: 1024, decoder_layers: 1024, hidden: 2 ** 20, vocab: 2 ** 24, classes: 2 ** 24,
  window: 2 ** 24, reach: 2 ** 24, image: 2 ** 13, patch: 2 ** 13, n: 2 ** 24, m: 2 ** 24, batch: 2 ** 20,
};
export const REQUIRED = ["d", "heads", "layers", "image", "patch"];
const REQUIRED_DEFAULTS = { d: 512, heads: 8, layers: 6, image: 224, patch: 16 };

// Each flag: its label, and its default.
export const FLAGS = {
  causal: { label: "causal mask", initial: false },
  bias: { label: "biases", initial: true },
  qkv_bias: { label: "biases on q, k, v", initial: false },
  gated: { label: "gated feed-forward", initial: false },
  tied: { label: "logits share the embedding", initial: true },
  scaled: { label: "embedding × √d", initial: true },
  dropout: { label: "dropout", initial: false },
};
// Each choice: its label, and its values; the first one is the default.
export const CHOICES = {
  position: {
    label: "positions",
    values: ["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic"],
  },
  norm: { label: "norm", values: ["layer", "rms"] },
  order: { label: "norm order", values: ["pre", "post"] },
};
export const REACHING = ["learned", "t5", "table", "shaw"]; // positions that have a largest length or distance

// Options of the run that are one of several words; the first one is the default.
export const DTYPES = ["float32", "bfloat16", "float16", "float64"];
export const OPTIMIZERS = ["adam", "adam32", "momentum", "sgd", "none"];
const RUN_OPTIONS = { dtype: DTYPES, weights: ["int8", "int4"], optimizer: OPTIMIZERS };

export function presetSettings(preset) {
  return {
    kind: preset.kind ?? "encoder", fields: { ...preset.fields }, config: preset.config ?? null,
    tokens: preset.tokens ?? null, source: null, batch: 1,
    dtype: "float32", weights: null, training: false, optimizer: "adam", tiled: true, machine: null, memory_limit: null,
  };
}

export const GIB = 2 ** 30;
const LARGEST_MEMORY = 2 ** 50; // bytes
const isPositiveInteger = (text) => /^[1-9][0-9]{0,8}$/.test(text);

// A number of GiB, as text, in bytes; null if the text is not a number that the lab accepts.
export function memoryLimit(text) {
  const bytes = Math.round(Number(text) * GIB);
  return bytes >= 1 && bytes <= LARGEST_MEMORY ? bytes : null;
}

// Read the settings from the address. `options` is what the lab offers.
export function settingsFromAddress(state, options) {
  const settings = presetSettings(Object.values(options.presets)[0]);
  const kind = state.get("kind");
  if (Object.hasOwn(options.kinds, kind)) {
    settings.kind = kind;
    settings.fields = {};
    settings.tokens = null;
  }
  for (const name of options.kinds[settings.kind]) {
    const text = state.get(name);
    if (text === "") continue;
    if (name in FLAGS) settings.fields[name] = text === "yes";
    else if (name in CHOICES && CHOICES[name].values.includes(text)) settings.fields[name] = text;
    else if (name in SIZES && isPositiveInteger(text)) settings.fields[name] = Number(text);
  }
  for (const [name, field] of [["n", "tokens"], ["m", "source"], ["batch", "batch"]]) {
    if (isPositiveInteger(state.get(name))) settings[field] = Number(state.get(name));
  }
  for (const [name, values] of Object.entries(RUN_OPTIONS)) {
    if (values.includes(state.get(name))) settings[name] = state.get(name);
  }
  settings.training = state.get("train") === "yes";
  settings.tiled = state.get("attention") !== "plain";
  settings.machine = state.get("machine") || null;
  settings.memory_limit = memoryLimit(state.get("memory"));
  settings.config = state.get("config") || null;
  return makeConsistent(settings, options);
}

// The settings as fields of the address. `sharedConfig` is a short form of the config, or empty if there is none.
export function addressFields(settings, options, sharedConfig) {
  const hasConfig = settings.config !== null;
  const fields = {};
  for (const name of new Set(Object.values(options.kinds).flat())) {
    const value = hasConfig ? undefined : settings.fields[name];
    if (typeof value === "boolean") fields[name] = value ? "yes" : "no";
    else fields[name] = value ?? "";
  }
  return {
    ...fields,
    kind: hasConfig ? "" : settings.kind,
    config: hasConfig ? sharedConfig : "",
    n: settings.tokens,
    m: settings.source,
    batch: settings.batch === 1 ? "" : settings.batch,
    dtype: settings.dtype === "float32" ? "" : settings.dtype,
    weights: settings.weights,
    train: settings.training ? "yes" : "",
    optimizer: settings.optimizer === "adam" ? "" : settings.optimizer,
    attention: settings.tiled ? "" : "plain",
    machine: settings.machine,
    memory: settings.memory_limit === null ? "" : settings.memory_limit / GIB,
  };
}

// Remove the fields that the kind of model does not have, and add those that it requires.
export function makeConsistent(settings, options) {
  const accepted = options.kinds[settings.kind];
  const fields = {};
  for (const [name, value] of Object.entries(settings.fields)) {
    if (accepted.includes(name)) fields[name] = value;
  }
  for (const name of REQUIRED) {
    if (accepted.includes(name)) fields[name] ??= REQUIRED_DEFAULTS[name];
  }
  // A single attention has no input embedding to which positions could be added.
  if (settings.kind === "attention" && ["learned", "sinusoidal"].includes(fields.position)) delete fields.position;
  if (fields.position === "learned") fields.reach ??= Math.max(512, settings.tokens ?? 0);
  if (!REACHING.includes(fields.position)) delete fields.reach;
  if (accepted.includes("causal") && !fields.causal) delete fields.window;
  if (settings.kind === "vit") settings.tokens = null;
  if (settings.kind !== "encoder-decoder" && settings.config === null) settings.source = null;
  if (settings.training) settings.weights = null;
  settings.fields = fields;
  return settings;
}

// The largest divisor of `size` that is not larger than `divisor`.
function divisorBelow(divisor, size) {
  let candidate = divisor;
  while (size % candidate) candidate -= 1;
  return candidate;
}

// After the size `name` was changed, adjust the sizes that must divide it or are limited by it.
export function adjustSizes(settings, name) {
  const { fields } = settings;
  if (name === "d" && !hasHeadWidths(settings)) fields.heads = divisorBelow(fields.heads, fields.d);
  if (fields.kv_heads) fields.kv_heads = divisorBelow(Math.min(fields.kv_heads, fields.heads), fields.heads);
  if (name === "image") fields.patch = divisorBelow(fields.patch, fields.image);
  if (name === "reach" && fields.position === "learned" && settings.tokens > fields.reach) settings.tokens = fields.reach;
}

// The model alone, without its run.
export function modelBody({ kind, fields, config }) {
  return config === null ? { kind, fields: { ...fields } } : { config };
}

export function presetBody({ kind, fields, config }) {
  return config === undefined ? { kind, fields } : { config };
}

// The name of the preset that is this model, or "".
export function presetName(settings, options) {
  const sorted = (fields) => JSON.stringify(Object.entries(fields).sort());
  for (const [name, preset] of Object.entries(options.presets)) {
    if (settings.config !== null) {
      if (preset.config === settings.config) return name;
    } else if (preset.kind === settings.kind && sorted(preset.fields) === sorted(settings.fields)) {
      return name;
    }
  }
  return "";
}

// The name of the model: that of its preset, or that of its class.
export function modelTitle(settings, options, plan) {
  const name = presetName(settings, options);
  return name ? options.presets[name].title : plan?.model ?? settings.kind;
}

// Titles of two models that tell them apart. `models` are their bodies; the second one is a preset or was pinned.
export function distinctTitles(titles, models) {
  if (titles[0] !== titles[1]) return titles;
  const [first, second] = models;
  const distinct = [titleBesides(titles[0], first, second), titleBesides(titles[1], second, first)];
  return distinct[0] === distinct[1] ? [titles[0], `${titles[1]} (pinned)`] : distinct;
}

// The title with the fields that the other model does not have, or has with another value.
function titleBesides(title, model, other) {
  const different = [];
  for (const [name, value] of Object.entries(model.fields ?? {})) {
    if (other.fields?.[name] === value) continue;
    const text = typeof value === "boolean" ? (value ? "yes" : "no") : value;
    different.push(`${name}=${text}`);
  }
  return different.length ? `${title} with ${different.join(", ")}` : title;
}

// The body of a request. Settings that are null are left out. The fields are copied: a request may be sent later, and
// must not contain what has changed meanwhile.
export function requestBody(settings) {
  const { kind, fields, config, ...run } = settings;
  const body = modelBody({ kind, fields, config });
  for (const [name, value] of Object.entries(run)) {
    if (value !== null) body[name] = value;
  }
  return body;
}

// The selected machine; null or undefined if there is none, or it is this machine and was not measured.
export function selectedMachine(settings, options) {
  if (settings.machine === "this") return options.this;
  return options.machines.find((machine) => machine.name === settings.machine);
}
