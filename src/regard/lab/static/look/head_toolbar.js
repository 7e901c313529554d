// The line above the map: the name and types of the selected head, and buttons to compare, ablate and export it.
import { element, formatNumber } from "../dom.js";
import { createAblationBar } from "./ablation_bar.js";
import { pinnedField, pinnedHead, pinnedName } from "./pinned_head.js";
import { exportMenu } from "./export.js";
import { MEANINGS, typeColour, typesOf } from "./head_types.js";
import { scoreNote } from "./head_details.js";
import { headName } from "./token_labels.js";
import { currentLayer, toggleAblation } from "./view_state.js";

export function createHeadBar(root, view, map) {
  const title = element("h2");
  const chips = element("span", { className: "chips" });
  const batch = element("span");
  const onText = element("p", { className: "on-text" });
  const onTextA = element("p", { className: "on-text-of-a" });
  const pinButton = element("button", { type: "button", on: { click: () => view.change({ pinned: pinnedField(view) }) } });
  const ablateButton = element("button", { type: "button", on: { click: () => toggleAblation(view, headId()) } });
  const comparison = element("p", { className: "against bar", hidden: true });
  const heading = element("div", { className: "bar title" }, title, chips, batch);
  const ablation = createAblationBar(view, heading);
  const menu = exportMenu(view, map);
  const actions = element("div", { className: "bar actions" }, pinButton, ablateButton, menu, ablation.slot);
  root.append(heading, actions, onText, comparison, onTextA);

  const headId = () => `${view.layerIndex}.${view.head}`;

  async function show() {
    const layer = currentLayer(view);
    if (!layer || view.head === null) return;
    title.textContent = headName(layer, view.head);
    title.title = layer.path;
    showTypes(layer);
    showBatch(layer);

    const isAblated = view.ablated.includes(headId());
    ablateButton.textContent = isAblated ? "keep this head" : "select for ablation";
    ablateButton.title = "select this head for ablation";
    ablateButton.setAttribute("aria-pressed", String(isAblated));
    pinButton.textContent = view.pinned ? "pin this as A instead" : "compare: pin as A";

    const head = await pinnedHead(view);
    comparison.hidden = head === null;
    if (!head) return;
    const name = element("b", { text: pinnedName(head, view) });
    comparison.replaceChildren(
      element("span", {}, "A is ", name, ". Select another head, recording or β as B."),
      element("button", { type: "button", text: "end comparison", on: { click: () => view.change({ pinned: "" }) } }));
  }

  function showTypes(layer) {
    const types = typesOf(view.description, layer.path, view.head);
    chips.replaceChildren();
    if (!types) return;
    const source = `${view.description.kind_source ?? "found on probes"}; this text does not change the types`;
    chips.append(element("span", { className: "quiet", title: source, text: "type, from probes:" }));
    for (const type of types.labels) {
      const text = `${type} ${Math.round(100 * types.confidence[type])} %`;
      const style = `--kind: ${typeColour(type)}`;
      chips.append(element("span", { className: "chip", title: MEANINGS[type], style, text }));
    }
    if (!types.labels.length) chips.append(element("span", { className: "quiet", text: "no clear type" }));
  }

  // What the head does here, beside the type that it has on probes; in a comparison also what head A does.
  function showOnText() {
    const { headNumbers, pinnedNumbers } = view;
    onText.replaceChildren();
    onTextA.replaceChildren();
    const note = scoreNote(view);
    const subject = view.description?.image ? "on this image" : "on this text";
    if (headNumbers) {
      const title = `${pinnedNumbers ? "B " : ""}${subject}${note && `, ${note}`}:`;
      onText.append(element("span", { className: "quiet", text: title }), ...scores(headNumbers));
    }
    if (pinnedNumbers) {
      const { head, numbers } = pinnedNumbers;
      const isSame = head.recording === view.recording;
      const title = `A ${isSame ? subject : "on its own text"}:`;
      onTextA.append(element("span", { className: "quiet", text: title }), ...scores(numbers));
    }
  }

  function scores(headNumbers) {
    const values = [];
    for (const name of ["previous", "induction", "duplicate"]) values.push([name, headNumbers.on_text[name]?.value]);
    for (const name of ["sink", "spread", "entropy"]) values.push([name, headNumbers.numbers[name]]);
    const nodes = [];
    for (const [name, value] of values) {
      if (typeof value !== "number") continue;
      nodes.push(element("span", { className: "score" }, `${name} `, element("b", { text: formatNumber(value) })));
    }
    return nodes;
  }

  function showBatch(layer) {
    batch.replaceChildren();
    if (!(layer.batches > 1)) return;
    const entry = element("select", { "aria-label": "batch entry" });
    entry.addEventListener("change", () => view.change({ batch: Number(entry.value) }));
    for (let i = 0; i < layer.batches; i++) entry.append(element("option", { value: i, text: `entry ${i}` }));
    entry.value = String(view.batch);
    batch.append(entry);
  }

  view.on("layerIndex head description headTypes ablated pinned batch recording", show);
  view.on("headNumbers pinnedNumbers description", showOnText);
  show();
  return ablation.close;
}
