// How scores are computed: the inverse temperature, the mask and the positions. All weights below follow.
import { checkbox, debounce, element, formatNumber, slider } from "../dom.js";
import { currentLayer, scoresChanged } from "./view_state.js";

// Multiples of the trained scale. Four steps double it; 0 leaves only biases, ∞ gives all weight to the largest q·k.
const BETAS = [0];
for (let i = -20; i <= 20; i++) BETAS.push(Number((2 ** (i / 4)).toPrecision(3)));
BETAS.push(Infinity);

// The index of the nearest step: the address may have any number.
function stepOf(beta) {
  if (beta === 0) return 0;
  if (beta === Infinity) return BETAS.length - 1;
  let nearest = 1;
  for (const [i, step] of BETAS.entries()) {
    if (Math.abs(step - beta) < Math.abs(BETAS[nearest] - beta)) nearest = i;
  }
  return nearest;
}

export function createScoreSettings(root, view) {
  // β is the factor on q·k, as in the steps of a weight. A multiple of the trained one says how far the head is changed.
  function formatBeta(factor) {
    const { scale, position } = currentLayer(view)?.has ?? {};
    if (factor === Infinity) return "∞ (hard)";
    if (factor === 0) return position === "bias" && view.position ? "0 (biases alone)" : "0 (uniform)";
    const multiple = factor === 1 ? "as trained" : `${factor} × trained`;
    return typeof scale === "number" ? `${formatNumber(scale * factor)} (${multiple})` : multiple;
  }

  const changeBeta = debounce((beta) => view.change({ beta }), 90);
  const betaSlider = slider("β", BETAS, stepOf(view.beta), formatBeta, changeBeta);
  betaSlider.querySelector("label").title = "inverse temperature: the factor on q·k, also called scale";
  const mask = checkbox("mask", view.mask, (checked) => view.change({ mask: checked }));
  const position = checkbox("position", view.position, (checked) => view.change({ position: checked }));
  const reset = element("button", {
    type: "button", text: "as trained", on: { click: () => view.change({ beta: 1, mask: true, position: true }) },
  });
  root.append(betaSlider, mask, position, reset);

  function show() {
    const layer = currentLayer(view);
    const available = layer?.has ?? {};
    betaSlider.put(BETAS[stepOf(view.beta)]);
    const input = betaSlider.querySelector("input");
    input.max = String(BETAS.length - (available.hard === false ? 2 : 1));
    input.disabled = !layer?.kept;
    const positionReason = "this model adds positions to its input; they cannot be removed from a head";
    update(mask, view.mask, layer?.kept && available.mask, "this head has no mask");
    update(position, view.position, layer?.kept && available.position, positionReason);
    reset.disabled = !scoresChanged(view);
    root.classList.toggle("changed", scoresChanged(view));
  }

  view.on("beta mask position layerIndex description", show);
  show();
}

// An option that is not available can still be switched on again. `reason` tells why it is not available.
function update(box, checked, isAvailable, reason) {
  const input = box.querySelector("input");
  input.checked = checked;
  input.disabled = !isAvailable && checked;
  box.title = isAvailable ? "" : reason;
}
