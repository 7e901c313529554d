// What is asked about, as the address has it: a kind with its fields or a config, and what it runs on.

const UP = (...given) => given;
const WIDTHS = UP(32, 48, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 5120,
  6144, 8192, 12288, 16384);
const HEAD = UP(1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128, 160, 192, 256, 512);
const DEPTHS = UP(1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 18, 20, 24, 28, 32, 36, 40, 48, 60, 64, 80, 96, 126);
const COUNTS = UP(...Array(16).keys()).map((x) => x + 1).concat(18, 20, 24, 25, 28, 32, 36, 40, 48, 56, 64, 72, 80, 96, 128);
export const LENGTHS = UP(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192,
  12288, 16384, 24576, 32768, 49152, 65536, 131072, 262144, 524288, 1048576);
export const BATCHES = Array.from({ length: 13 }, (_, i) => 2 ** i);

const divides = (x) => (step) => x % step === 0;
const free = (now) => now.fields.d_key && (now.kind !== "attention" || now.fields.d_value);

// name → [label, steps(now)]; `largest` as the lab takes it.
export const SIZES = {
  image: ["image side", () => UP(32, 64, 96, 128, 160, 192, 224, 256, 288, 336, 384, 448, 512, 768, 1024)],
  patch: ["patch side", (now) => UP(1, 2, 4, 7, 8, 12, 14, 16, 28, 32, 56, 64).filter(divides(now.fields.image))],
  d: ["width d", () => WIDTHS],
  heads: ["heads", (now) => (free(now) ? COUNTS : COUNTS.filter(divides(now.fields.d)))],
  kv_heads: ["k, v heads", (now) => COUNTS.filter(divides(now.fields.heads))],
  d_key: ["key width", () => HEAD],
  d_value: ["value width", () => HEAD],
  d_out: ["output width", () => WIDTHS],
  layers: ["layers", () => DEPTHS],
  decoder_layers: ["decoder layers", () => DEPTHS],
  hidden: ["hidden width", () => UP(64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6144, 8192, 11008, 12288, 14336,
    16384, 20480, 24576, 28672, 32768, 49152, 65536)],
  vocab: ["vocabulary", () => UP(256, 1000, 4096, 8192, 16000, 30522, 32000, 37000, 50257, 65536, 100000, 128256, 151936,
    200000, 256000)],
  classes: ["classes", () => UP(2, 10, 100, 200, 365, 1000, 10000, 21843)],
  window: ["window", () => LENGTHS.filter((x) => x >= 16 && x <= 32768)],
  reach: ["positions reach", () => LENGTHS.filter((x) => x >= 16 && x <= 131072)],
};
export const LARGEST = { heads: 4096, kv_heads: 4096, layers: 1024, decoder_layers: 1024, hidden: 2 ** 20, vocab: 2 ** 24,
  classes: 2 ** 24, window: 2 ** 24, reach: 2 ** 24, image: 2 ** 13, patch: 2 ** 13, n: 2 ** 24, m: 2 ** 24, batch: 2 ** 20 };
export const NEEDED = ["d", "heads", "layers", "image", "patch"];
const USUAL = { d: 512, heads: 8, layers: 6, image: 224, patch: 16 };
// name → [label, what it is without being said]
export const FLAGS = {
  causal: ["causal mask", false], bias: ["biases", true], qkv_bias: ["biases on q, k, v", false],
  gated: ["gated feed-forward", false], tied: ["logits share the embedding", true],
};
export const CHOICES = {
  position: ["positions", ["none", "learned", "sinusoidal", "rotary", "alibi", "t5", "table", "shaw", "quadratic"]],
  norm: ["norm", ["layer", "rms"]],
  order: ["norms stand", ["pre", "post"]],
};
export const REACHING = ["learned", "t5", "table", "shaw"];

export function beginning(preset) {
  return { kind: preset.kind, fields: { ...preset.fields }, tokens: preset.tokens ?? null, source: null, batch: 1,
    dtype: "float32", weights: null, training: false, optimizer: "adam", tiled: true, machine: null, config: null };
}

// The model from the address; `start` is what the lab offers.
export function fromState(state, start) {
  const now = beginning(Object.values(start.presets)[0]);
  const kind = state.get("kind");
  if (Object.hasOwn(start.kinds, kind)) Object.assign(now, { kind, fields: {}, tokens: null });
  for (const name of start.kinds[now.kind]) {
    const text = state.get(name);
    if (text === "") continue;
    if (name in FLAGS) now.fields[name] = text === "yes";
    else if (name in CHOICES) { if (CHOICES[name][1].includes(text)) now.fields[name] = text; }
    else if (name in SIZES && whole(text)) now.fields[name] = Number(text);
  }
  for (const [name, key] of [["n", "tokens"], ["m", "source"], ["batch", "batch"]]) {
    if (whole(state.get(name))) now[key] = Number(state.get(name));
  }
  for (const [key, known] of Object.entries(OPTIONS)) if (known.includes(state.get(key))) now[key] = state.get(key);
  now.training = state.get("train") === "yes";
  now.tiled = state.get("attention") !== "plain";
  now.machine = state.get("machine") || null;
  now.config = state.get("config") || null;
  return fitting(now, start);
}

const whole = (text) => /^[1-9][0-9]{0,8}$/.test(text);
const OPTIONS = { dtype: ["float64", "float32", "bfloat16", "float16"], weights: ["int8", "int4"],
  optimizer: ["adam", "adam32", "momentum", "sgd", "none"] };

export function toState(state, now, start, shared) {
  const all = new Set(Object.values(start.kinds).flat());
  const fields = Object.fromEntries([...all].map((name) => {
    const value = now.config === null ? now.fields[name] : undefined;
    return [name, typeof value === "boolean" ? (value ? "yes" : "no") : value ?? ""];
  }));
  state.set({ ...fields, kind: now.config === null ? now.kind : "", config: now.config === null ? "" : shared,
    n: now.tokens, m: now.source, batch: now.batch === 1 ? "" : now.batch, dtype: now.dtype === "float32" ? "" : now.dtype,
    weights: now.weights, train: now.training ? "yes" : "", optimizer: now.optimizer === "adam" ? "" : now.optimizer,
    attention: now.tiled ? "" : "plain", machine: now.machine });
}

// Fields that the kind takes, with all that it needs; sizes that must divide others do.
export function fitting(now, start) {
  const takes = start.kinds[now.kind];
  const fields = Object.fromEntries(Object.entries(now.fields).filter(([name]) => takes.includes(name)));
  for (const name of NEEDED) if (takes.includes(name)) fields[name] ??= USUAL[name];
  if (now.kind === "attention" && ["learned", "sinusoidal"].includes(fields.position)) delete fields.position;
  if (fields.position === "learned") fields.reach ??= Math.max(512, now.tokens ?? 0);
  if (!REACHING.includes(fields.position)) delete fields.reach;
  if (takes.includes("causal") && !fields.causal) delete fields.window;
  if (now.kind === "vit") now.tokens = null;
  if (now.kind !== "encoder-decoder" && now.config === null) now.source = null;
  if (now.training) now.weights = null;
  now.fields = fields;
  return now;
}

// After `name` was changed: the other sizes that must divide or be divided.
export function divided(now, name) {
  const fields = now.fields;
  const down = (x, by) => { while (by % x) x -= 1; return x; };
  if (name === "d" && !free(now)) fields.heads = down(fields.heads, fields.d);
  if (fields.kv_heads) fields.kv_heads = down(Math.min(fields.kv_heads, fields.heads), fields.heads);
  if (name === "image") fields.patch = down(fields.patch, fields.image);
  if (name === "reach" && fields.position === "learned" && now.tokens > fields.reach) now.tokens = fields.reach;
}

export function asked(now) {
  const { kind, fields, config, ...rest } = now;
  const given = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== null));
  return config === null ? { kind, fields, ...given } : { config, ...given };
}
