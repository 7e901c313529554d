// The text, shaded by the contribution of each token. A click on a token attributes the prediction after it.
import { element, formatNumber } from "../dom.js";
import { labelNodes, visibleText } from "../shared.js";
import { largestSize, shadeOf, signedNumber } from "./signed_colour.js";

export function createTokenStrip(selectPosition) {
  const line = element("div", { className: "strip" });
  const note = element("p", { className: "quiet" });
  const box = element("div", {}, line, note);
  let answer = null;

  function show(shown) {
    answer = shown;
    const largest = largestSize(answer.contributions);
    line.replaceChildren();
    for (const [i, label] of answer.tokens.entries()) {
      const text = visibleText(label);
      const value = answer.contributions[i];
      const number = signedNumber(value, formatNumber);
      const token = element("button", {
        type: "button", className: "token", title: `${number} · token ${i}`,
        "aria-label": `${text.trim() || "space"}, token ${i}, ${number}`, "aria-pressed": String(i === answer.position),
        on: { click: () => selectPosition(i) },
      }, ...labelNodes(text.trim() || "␣"));
      Object.assign(token.style, shadeOf(value, largest));
      if (text.startsWith(" ")) line.append(" ");
      line.append(token);
      if (text.endsWith("↵")) line.append(element("br"));
    }
    note.textContent = `Embedding × gradient of each token, from −${formatNumber(largest)} (orange, against the prediction)`
      + ` to +${formatNumber(largest)} (blue, for it). Click a token to attribute the prediction after it.`;
  }

  return {
    box,
    show,
    redraw() {
      if (answer) show(answer);
    },
  };
}
