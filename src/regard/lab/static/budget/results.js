// What was counted: the sums, where they come from, and the bottleneck in words.
import { element } from "../dom.js";
import { bytes, counted, exact, percent, seconds } from "./units.js";

const GROUPS = { projections: ["q, k, v, out", "#1f77b4"], attention: ["scores and values", "#d55e00"],
  "feed-forward": ["feed-forward", "#009e73"], head: ["logits", "#cc79a7"], norms: ["norms", "#e69f00"],
  embedding: ["embedding", "#7f7f7f"] };

function card(name, title, value, under) {
  return element("div", { className: "card", dataset: { card: name } }, element("h3", { text: title }),
    element("strong", { text: value }), element("small", { text: under }));
}

export function cards(plan) {
  const machine = plan.machine;
  const pass = plan.training ? "training step" : "forward pass";
  const flops = plan.training ? plan.flops.forward + plan.flops.backward : plan.flops.forward;
  const skipped = plan.flops.forward_masks_exploited;
  const saves = skipped !== plan.flops.forward && !plan.training ? `; ${counted(skipped)} with masked pairs skipped` : "";
  const fits = machine && (plan.bytes.total <= machine.memory ? "fits" : "does not fit");
  const room = machine ? `${fits} ${bytes(machine.memory)}${plan.most ? `; ${exact(plan.most)} ${plan.most === 1 ? "sequence does" : "sequences do"}` : ""}` : `of a ${pass}`;
  const rate = plan.seconds ? `${counted((plan.batch * plan.tokens) / plan.seconds)} tokens/s` : "";
  const made = element("div", { className: "cards" },
    card("parameters", "Parameters", counted(plan.parameters), exact(plan.parameters)),
    card("flops", plan.training ? "FLOPs of a step" : "FLOPs, forward", counted(flops), `${plan.training ? `${counted(plan.flops.forward)} forward, ${counted(plan.flops.backward)} backward` : exact(flops)}${saves}`),
    card("memory", "Memory in all", bytes(plan.bytes.total), room),
    card("time", "Time", machine ? seconds(plan.seconds) : "–", machine ? rate : "choose a machine"),
    card("crossover", "Attention is half from n*", plan.crossover === null ? "–" : exact(plan.crossover),
      plan.crossover !== null ? (machine ? "tokens on, in seconds" : "tokens on, in FLOPs") : plan.fixed ? "this model has one n" : "never: it stays behind"),
  );
  made.querySelector("[data-card=memory]").classList.toggle("bad", fits === "does not fit");
  return made;
}

export function bottleneck(plan) {
  const bar = element("div", { className: "stacked", role: "img",
    "aria-label": Object.entries(plan.shares).map(([name, share]) => `${GROUPS[name][0]} ${percent(share)}`).join(", ") });
  const legend = element("ul", { className: "legend" });
  for (const [name, share] of Object.entries(plan.shares).sort((a, b) => b[1] - a[1])) {
    const [title, colour] = GROUPS[name];
    bar.append(element("span", { style: `width: ${100 * share}%; background: ${colour}`, title: `${title} ${percent(share)}` }));
    legend.append(element("li", {}, dot(colour), `${title} ${percent(share)}`));
  }
  return element("section", { className: "panel bottleneck" }, element("h2", { text: plan.machine ? "Where the time goes" : "Where the FLOPs go" }),
    element("p", { className: "words", text: plan.bottleneck }), bar, legend);
}

function dot(colour) {
  return element("i", { className: "dot", style: `background: ${colour}` });
}

// The theory's exercise: one head, all heads, the output, in all.
export function theory(plan) {
  if (!plan.theory) return null;
  const steps = Object.entries(plan.theory);
  const signs = { "all heads": plan.theory["a head"] ? `× ${plan.sizes.heads} =` : "", output: "+", "in all": "=" };
  return element("section", { className: "panel theory" }, element("h2", { text: "Parameters of attention" }),
    element("div", { className: "steps" }, ...steps.flatMap(([name, value]) => [
      signs[name] ? element("span", { className: "sign", text: signs[name] }) : null,
      element("div", { dataset: { theory: name } }, element("strong", { text: exact(value) }), element("small", { text: name })),
    ])));
}

function shaded(text, share, className = "number") {
  return element("td", { className, style: `--share: ${100 * Math.min(1, Math.max(0, share || 0))}%`, text });
}

export function parts(plan) {
  const timed = plan.machine !== null;
  const heads = ["part", "layers", "parameters", plan.training ? "FLOPs, forward" : "FLOPs", ...(plan.training ? ["kept"] : []), ...(timed ? ["time"] : [])];
  const body = element("tbody");
  for (const row of plan.parts) {
    body.append(element("tr", {}, element("th", { scope: "row", text: row.name }), element("td", { className: "number", text: exact(row.times) }),
      shaded(row.parameters ? exact(row.parameters) : "–", row.parameters / plan.parameters),
      shaded(row.flops ? counted(row.flops) : "–", row.flops / plan.flops.forward),
      plan.training ? shaded(row.kept ? bytes(row.kept) : "–", row.kept / plan.bytes.activations) : null,
      timed ? shaded(seconds(row.seconds), row.seconds / plan.seconds) : null));
  }
  const foot = element("tfoot", {}, element("tr", {}, element("th", { scope: "row", text: "in all" }), element("td"),
    element("td", { className: "number", text: exact(plan.parameters) }), element("td", { className: "number", text: counted(plan.flops.forward) }),
    plan.training ? element("td", { className: "number", text: bytes(plan.bytes.activations) }) : null,
    timed ? element("td", { className: "number", text: seconds(plan.seconds) }) : null));
  return element("section", { className: "panel" }, element("h2", { text: "By part" }),
    element("div", { className: "wide", tabindex: 0, role: "region", "aria-label": "parts" }, element("table", { className: "parts" },
      element("thead", {}, element("tr", {}, ...heads.map((text, i) => element("th", { scope: "col", className: i ? "number" : null, text })))), body, foot)));
}

export function memory(plan) {
  const size = plan.bytes;
  const training = plan.training;
  const pieces = [["weights", size.weights, "#1f77b4"], ...(training ? [["optimizer", size.optimizer, "#e69f00"]] : []),
    [training ? "peak of the step" : "peak of a pass", size.peak, "#d55e00"], ...(!training && size.cache ? [["cache", size.cache, "#009e73"]] : [])];
  const bar = element("div", { className: "stacked", role: "img", "aria-label": pieces.map(([name, x]) => `${name} ${bytes(x)}`).join(", ") });
  const legend = element("ul", { className: "legend" });
  for (const [name, x, colour] of pieces) {
    bar.append(element("span", { style: `width: ${(100 * x) / size.total}%; background: ${colour}`, title: `${name} ${bytes(x)}` }));
    legend.append(element("li", {}, dot(colour), `${name} ${bytes(x)}`));
  }
  const lines = [["in all", `${bytes(size.total)}`]];
  if (training) {
    lines.push(["gradients", `${bytes(size.gradients)}, in the peak`]);
    lines.push(["activations", `${bytes(size.activations)} kept for the backward pass; ${bytes(size.recomputed)} where blocks are computed again`]);
    lines.push(["peak then", bytes(size.recomputed_peak)]);
  }
  if (size.matrices) {
    lines.push(["n × n", `${bytes(size.matrices)} of attention weights, ${plan.tiled ? "never stored" : training ? "stored" : "stored a layer at a time"}`]);
  }
  if (plan.decoding && !training) {
    const one = plan.decoding;
    lines.push(["one more token", `${counted(one.flops)}FLOP, ${bytes(one.read)} read${one.tokens_per_second ? `; ${counted(one.tokens_per_second)} tokens/s` : ""}`]);
    if (one.most !== null) {
      const fast = one.most_per_second ? `, ${counted(one.most_per_second)} tokens/s together` : "";
      lines.push(["serving", one.most ? `${exact(one.most)} ${one.most === 1 ? "such cache fits" : "such caches fit"} beside the weights${fast}` : "not one such cache fits beside the weights"]);
    }
  }
  const list = element("dl", { className: "lines" });
  for (const [name, text] of lines) list.append(element("dt", { text: name }), element("dd", { text }));
  return element("section", { className: "panel" }, element("h2", { text: "Memory" }), bar, legend, list);
}
