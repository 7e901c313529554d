// The exact parts of the logit: embeddings, heads, feed-forwards and biases. With the norms frozen they add up to it.
import { element, formatNumber } from "../dom.js";
import { largestSize, signedNumber } from "./signed_colour.js";

const SHOWN = 12;

export function createLogitParts() {
  const box = element("div");

  function show(answer) {
    box.replaceChildren(element("h2", { text: "What the logit is made of" }));
    if (answer.no_parts) {
      box.append(element("p", { className: "quiet", text: `It cannot be split: ${answer.no_parts}` }));
      return;
    }
    const parts = answer.parts.map(({ kind, path, value }) => ({ name: partName(kind, path), value }));
    for (const { layer, head, direct } of answer.heads) {
      if (direct !== null) parts.push({ name: `layer ${layer} · head ${head}`, value: direct });
    }
    parts.sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
    const shown = parts.slice(0, SHOWN);
    const rest = parts.slice(SHOWN);
    if (rest.length) {
      let total = 0;
      for (const { value } of rest) total += value;
      shown.push({ name: `${rest.length} other parts`, value: total });
    }
    const largest = largestSize(shown.map(({ value }) => value)) || 1;
    const list = element("ul", { className: "parts" });
    let sum = 0;
    for (const { name, value } of shown) {
      sum += value;
      const side = value < 0 ? "negative" : "positive";
      list.append(element("li", {}, element("span", { className: "name", text: name }),
        element("span", { className: `bar-of ${side}`, style: `--share: ${Math.abs(value) / largest}` }),
        element("span", { className: "value", text: signedNumber(value, formatNumber) })));
    }
    box.append(list, element("p", { className: "quiet", dataset: { sum } },
      `Together ${formatNumber(sum)}. These are direct paths only: what a head does through later layers counts there.`));
  }

  return { box, show };
}

// "decoder.blocks.2.feedforward" of kind "feed-forward" becomes "feed-forward of layer 2".
function partName(kind, path) {
  const number = /\.(\d+)\./.exec(path)?.[1];
  if (kind === "constant") return number === undefined ? `bias: ${path}` : `bias of layer ${number}: ${path.split(".").slice(-2).join(".")}`;
  return number === undefined ? kind : `${kind} of layer ${number}`;
}
