// How scores are made: the inverse temperature, the mask, the positions. Everything below follows.
import { checkbox, element, settled, slider } from "../dom.js";
import { changedScores, placeOf } from "./view.js";

// Multiples of the trained scale, in steps that double every fourth; 0 is uniform, ∞ the largest score alone.
const BETAS = [0, ...Array.from({ length: 41 }, (_, i) => Number((2 ** ((i - 20) / 4)).toPrecision(3))), Infinity];

const shown = (beta) => (beta === Infinity ? "∞ (hard)" : beta === 1 ? "1 (as trained)" : beta === 0 ? "0 (uniform)" : `× ${beta}`);

export function makeScores(root, view) {
  const change = settled((beta) => view.change({ beta }), 90);
  const index = (beta) => BETAS.reduce((best, x, i) => (Math.abs(x - beta) < Math.abs(BETAS[best] - beta) ? i : best), 1);
  const at = (beta) => (beta === Infinity ? BETAS.length - 1 : beta === 0 ? 0 : index(beta));
  const heat = slider("β", BETAS, at(view.beta), shown, change);
  heat.querySelector("label").title = "inverse temperature: multiplies the trained scale of the scores";
  const mask = checkbox("mask", view.mask, (on) => view.change({ mask: on }));
  const position = checkbox("position", view.position, (on) => view.change({ position: on }));
  const reset = element("button", {
    type: "button", text: "as trained", on: { click: () => view.change({ beta: 1, mask: true, position: true }) },
  });
  root.append(heat, mask, position, reset);

  function show() {
    const place = placeOf(view);
    heat.put(BETAS[at(view.beta)]);
    const has = place?.has ?? {};
    const input = heat.querySelector("input");
    input.max = String(BETAS.length - (has.hard === false ? 2 : 1));
    input.disabled = !place?.kept;
    put(mask, view.mask, !place?.kept || !has.mask, "this head has no mask");
    const why = "positions are part of this model's input, and cannot be taken out of a head";
    put(position, view.position, !place?.kept || !has.position, why);
    reset.disabled = !changedScores(view);
    root.classList.toggle("changed", changedScores(view));
  }

  view.on("beta mask position place found", show);
  show();
}

function put(box, checked, disabled, why) {
  const input = box.querySelector("input");
  input.checked = checked;
  input.disabled = disabled && checked;
  box.title = disabled ? why : "";
}
