// The controls of the model and of its run. Only those that apply to the kind of model are shown.
import { checkbox, element, sameNames, select } from "../dom.js";
import {
  adjustSizes, BATCHES, CHOICES, DTYPES, FLAGS, LARGEST, LENGTHS, makeConsistent, OPTIMIZERS, presetName, presetSettings,
  REACHING, REQUIRED, selectedMachine, SIZES,
} from "./model_settings.js";
import { createSizeInput } from "./size_input.js";

const KINDS = {
  attention: "Attention", block: "Block", encoder: "Encoder", decoder: "Decoder", "encoder-decoder": "Encoder–decoder",
  vit: "Vision",
};
const SHOWN_DEFAULTS = { classes: 1000, reach: 32 }; // sizes whose default does not follow from other sizes

// `page.changed(live)` is called after each change of `page.settings`.
export function createModelForm(page) {
  const { options } = page;

  // Change the settings; `name` is the size that changes, `live` the input that is still being moved or typed in.
  function change(call, name = "", live = "") {
    call(page.settings);
    adjustSizes(page.settings, name);
    makeConsistent(page.settings, options);
    show();
    page.changed(live);
  }

  // Model

  const kinds = element("div", { className: "kinds", role: "group", "aria-label": "kind of model" });
  for (const [kind, title] of Object.entries(KINDS)) {
    const button = element("button", { type: "button", text: title, dataset: { kind } });
    button.addEventListener("click", () => change((settings) => {
      settings.kind = kind;
      settings.config = null;
      settings.tokens ??= 512;
    }));
    kinds.append(button);
  }

  const presetNames = [["", "custom sizes"]];
  for (const [name, { title }] of Object.entries(options.presets)) presetNames.push([name, title]);
  const preset = select("start from", presetNames, "", (name) => {
    if (!name) return;
    page.sharedConfig = options.presets[name].config ?? "";
    page.plan = null; // it belongs to another model
    change((settings) => {
      // A new model keeps the run: the batch, the machine, the data type.
      const { batch, dtype, training, optimizer, tiled, machine, weights, memory_limit } = settings;
      const run = { batch, dtype, training, optimizer, tiled, machine, weights, memory_limit };
      Object.assign(settings, presetSettings(options.presets[name]), run);
    });
  });

  const sizeInputs = {};
  for (const [name, { label }] of Object.entries(SIZES)) {
    sizeInputs[name] = createSizeInput(label, {
      optional: !REQUIRED.includes(name),
      largest: LARGEST[name],
      onChange: (value, live) => change(({ fields }) => {
        if (value === null) delete fields[name];
        else fields[name] = value;
      }, name, live),
    });
  }

  const flagBoxes = {};
  for (const [name, { label }] of Object.entries(FLAGS)) {
    flagBoxes[name] = checkbox(label, false, (checked) => {
      change(({ fields }) => { fields[name] = checked; }, name);
    });
  }

  const choiceLists = {};
  for (const [name, { label, values }] of Object.entries(CHOICES)) {
    choiceLists[name] = select(label, sameNames(values), values[0], (value) => change(({ fields }) => {
      fields[name] = value;
      if (name === "position") delete fields.reach; // it has another meaning for other positions
    }, name));
  }

  // Run

  function setter(name) {
    return (value, live) => change((settings) => { settings[name] = value; }, "", live);
  }

  const tokens = createSizeInput("tokens n", { optional: true, largest: LARGEST.n, onChange: setter("tokens") });
  const source = createSizeInput("source m", { optional: true, largest: LARGEST.m, onChange: setter("source") });
  const batch = createSizeInput("batch", { largest: LARGEST.batch, onChange: setter("batch") });
  const training = checkbox("training step", false, setter("training"));
  const tiled = checkbox("tiled attention (never stores n × n)", true, setter("tiled"));
  const dtype = select("data type", sameNames(DTYPES), "float32", setter("dtype"));
  const weightTypes = [["", "the same"], ["int8", "int8"], ["int4", "int4"]];
  const weights = select("weights in", weightTypes, "", (value) => setter("weights")(value || null));
  const optimizer = select("optimizer", sameNames(OPTIMIZERS), "adam", setter("optimizer"));

  const sizes = element("div", { className: "sizes", role: "group", "aria-label": "sizes" }, ...Object.values(sizeInputs));
  const switches = element("div", { className: "switches" }, ...Object.values(choiceLists), ...Object.values(flagBoxes));
  const more = element("details", { className: "more" }, element("summary", { text: "options and positions" }),
    switches, sizeInputs.reach, sizeInputs.window);
  const run = element("div", { className: "sizes", role: "group", "aria-label": "run" }, tokens, source, batch,
    element("div", { className: "switches" }, training, tiled, dtype, weights, optimizer));

  function show() {
    const { settings } = page;
    const hasConfig = settings.config !== null;
    for (const button of kinds.children) {
      button.setAttribute("aria-pressed", String(!hasConfig && button.dataset.kind === settings.kind));
    }
    preset.querySelector("select").value = presetName(settings, options);
    sizes.hidden = hasConfig;
    more.hidden = hasConfig;
    showFields(settings, hasConfig ? [] : options.kinds[settings.kind]);
    showLengths(settings, hasConfig);
    showRun(settings);
  }

  // `accepted` are the names of the fields that the kind of model has.
  function showFields(settings, accepted) {
    const { fields } = settings;
    const hiddenSizes = new Set();
    if (!REACHING.includes(fields.position)) hiddenSizes.add("reach");
    if (accepted.includes("causal") && !fields.causal) hiddenSizes.add("window");
    for (const [name, input] of Object.entries(sizeInputs)) {
      input.hidden = !accepted.includes(name) || hiddenSizes.has(name);
      if (input.hidden) continue;
      const initial = SHOWN_DEFAULTS[name] ?? page.plan?.sizes?.[name] ?? null;
      input.show(fields[name] ?? initial, SIZES[name].steps(settings), fields[name] !== undefined);
    }
    for (const [name, box] of Object.entries(flagBoxes)) {
      box.hidden = !accepted.includes(name);
      const initial = FLAGS[name].initial || (name === "qkv_bias" && settings.kind === "vit");
      box.querySelector("input").checked = fields[name] ?? initial;
    }
    for (const [name, list] of Object.entries(choiceLists)) {
      list.hidden = !accepted.includes(name);
      list.querySelector("select").value = fields[name] ?? CHOICES[name].values[0];
    }
    for (const option of choiceLists.position.querySelectorAll("option")) {
      option.disabled = settings.kind === "attention" && ["learned", "sinusoidal"].includes(option.value);
    }
  }

  // A vision model has one length, and learned positions have a longest one.
  function showLengths(settings, hasConfig) {
    const { plan } = page;
    let isFixed = settings.kind === "vit";
    let hasSource = settings.kind === "encoder-decoder";
    let longest = plan?.longest ?? Infinity;
    if (hasConfig) {
      isFixed = plan?.fixed ?? false;
      hasSource = Boolean(plan?.needs_source);
    } else if (settings.fields.position === "learned") {
      longest = settings.fields.reach;
    }
    const shortest = hasConfig ? plan?.shortest ?? 1 : 1; // an image needs tokens of its own
    const lengths = LENGTHS.filter((length) => length >= shortest && length <= longest);
    const length = isFixed ? plan?.tokens : settings.tokens ?? plan?.tokens ?? 512;
    tokens.show(length, lengths, settings.tokens !== null);
    tokens.enable(!isFixed);
    source.hidden = !hasSource;
    source.show(settings.source ?? settings.tokens ?? 512, lengths, settings.source !== null);
  }

  function showRun(settings) {
    batch.show(settings.batch, BATCHES);
    training.querySelector("input").checked = settings.training;
    tiled.querySelector("input").checked = settings.tiled;
    optimizer.hidden = !settings.training;
    optimizer.querySelector("select").value = settings.optimizer;
    weights.hidden = settings.training;
    weights.querySelector("select").value = settings.weights ?? "";
    const dtypes = selectedMachine(settings, options)?.dtypes ?? DTYPES;
    for (const option of dtype.querySelectorAll("option")) option.disabled = !dtypes.includes(option.value);
    dtype.querySelector("select").value = settings.dtype;
  }

  return { kinds, preset, sizes, more, run, show };
}
