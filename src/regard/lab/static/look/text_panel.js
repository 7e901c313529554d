// The weights of the selected token on the text, as shades or as lines, and the largest of them as a list.
import { element, formatNumber } from "../dom.js";
import { createShadedTokens } from "./shaded_tokens.js";
import { longLabel } from "./token_labels.js";
import { createTokenLines } from "./token_lines.js";
import { currentLayer, lockedToken, otherField, otherSide, selectedField, selectedSide } from "./view_state.js";
import { formatWeight, strongest } from "./load_weights.js";

const LIST_LENGTH = 8;
const NO_WEIGHTS = "This recording has no q and k, so single weights are not available. "
  + "Run the text again here, or record it with regard look --keep.";

export function createTextPanel(root, view) {
  const bar = element("div", { className: "bar" });
  const text = element("div");
  const lines = element("div");
  const list = element("div", { className: "strongest" });
  const legend = element("p", { className: "shades quiet", hidden: true });
  const notice = element("p", { className: "quiet", hidden: true });
  root.append(bar, notice, element("div", { className: "columns" }, element("div", {}, text, lines, legend), list));

  // A group of buttons of which one is pressed. Options are [value, label, title].
  function choice(field, label, options) {
    const group = element("div", { className: "choice", role: "group", "aria-label": label });
    for (const [value, optionLabel, title] of options) {
      const button = element("button", { type: "button", text: optionLabel, title, dataset: { value } });
      button.addEventListener("click", () => view.change({ [field]: value, hover: null }));
      group.append(button);
    }
    function showPressed() {
      for (const button of group.children) {
        button.setAttribute("aria-pressed", String(button.dataset.value === view[field]));
      }
    }
    view.on(field, showPressed);
    showPressed();
    return group;
  }

  const title = element("h3");
  bar.append(
    title,
    choice("direction", "direction", [
      ["from", "attends to", "the keys that the locked query attends to"],
      ["to", "is attended to by", "the queries that attend to the locked key"],
    ]),
    choice("display", "shown as", [
      ["text", "text", "weights as shades of the tokens"],
      ["lines", "lines", "weights as lines from the locked token"],
    ]));

  // What the shades mean: each row has its own scale, so the darkest shade may be a small weight.
  function showLegend(layer, weights) {
    legend.hidden = !layer || !weights || weights.direction !== view.direction;
    if (legend.hidden) return;
    const largest = weights.values.reduce((a, b) => Math.max(a, b), 0);
    const subject = view.direction === "from" ? "of this query" : "on this key";
    const what = view.display === "lines" ? "Lines" : "Shades";
    const sinks = view.hideSinks ? ", sinks left out" : "";
    const ramp = element("i", { className: layer.grid && view.display === "text" ? "ramp clear" : "ramp" });
    const maximum = element("b", { text: formatNumber(largest), dataset: { value: largest } });
    legend.replaceChildren("0 ", ramp, " ", maximum,
      `, the largest weight ${subject}${sinks}. ${what} are relative to it, on a square-root scale.`);
  }

  function show() {
    const layer = currentLayer(view);
    showLegend(layer, view.weights);
    // Labels of another text are not shown: they would name the wrong tokens.
    const problem = view.description?.label_problem;
    const labels = problem ? `The labels of this recording do not fit it, so numbers stand in their place: ${problem}. ` : "";
    notice.textContent = labels + (layer?.kept ? "" : NO_WEIGHTS);
    notice.hidden = !layer || (layer.kept && !problem);
    title.textContent = layer?.grid ? "On the image" : "On the text";
    bar.querySelector("[data-value=text]").textContent = layer?.grid ? "image" : "text";
    const { weights } = view;
    if (!layer || !weights) {
      const unit = layer?.grid ? "patch" : "token";
      const hint = layer?.kept ? `Point at a ${unit} to see its weights, click to lock it.` : "";
      list.replaceChildren(element("p", { className: "quiet", text: hint }));
      return;
    }
    // The weights may still be those of the other direction.
    const shown = { direction: weights.direction };
    const name = longLabel(view.description, layer, selectedSide(shown), weights.index);
    const verb = weights.direction === "from" ? " attends to" : " is attended to by";
    list.replaceChildren(element("h4", {}, element("b", { text: name }), verb));

    const items = element("ol");
    const lockedPartner = lockedToken(view, otherField(shown));
    for (const { index, weight } of strongest(weights.values, LIST_LENGTH)) {
      const button = element("button", {
        type: "button", text: longLabel(view.description, layer, otherSide(shown), index), title: "lock this cell",
        "aria-pressed": String(lockedPartner === index && !weights.preview),
      });
      button.addEventListener("click", () => {
        view.change({ [selectedField(shown)]: weights.index, [otherField(shown)]: index });
      });
      items.append(element("li", {}, button, element("span", { text: formatWeight(weight) })));
    }
    if (items.children.length) list.append(items);
    else list.append(element("p", { className: "quiet", text: "nothing" }));
  }

  const stopTokens = createShadedTokens(text, view);
  const stopLines = createTokenLines(lines, view);
  view.on("weights description layerIndex row key display hideSinks", show);
  show();
  return () => {
    stopTokens();
    stopLines();
  };
}
