// The picked head's own line: its name and kinds, pinning it as A, taking it out, and files of its map.
import { element } from "../dom.js";
import { exportMenu } from "./export.js";
import { kindColour, kindOf, MEANINGS } from "./grid.js";
import { pin, pinned, pinnedName } from "./pinned.js";
import { placeOf } from "./view.js";
import { headName } from "./words.js";

export function makeHead(root, view, map) {
  const title = element("h2");
  const chips = element("span", { className: "chips" });
  const batch = element("span");
  const compare = element("button", { type: "button", on: { click: () => view.change({ pinned: pin(view) }) } });
  const tick = element("button", { type: "button", on: { click: toggle } });
  const against = element("p", { className: "against bar", hidden: true });
  const bar = element("div", { className: "bar actions" }, compare, tick, exportMenu(view, map));
  root.append(element("div", { className: "bar title" }, title, chips, batch), bar, against);

  const id = () => `${view.place}.${view.head}`;

  function toggle() {
    const on = view.ablated.includes(id());
    view.change({ ablated: on ? view.ablated.filter((one) => one !== id()) : [...view.ablated, id()] });
  }

  async function show() {
    const place = placeOf(view);
    if (!place || view.head === null) return;
    title.textContent = headName(place, view.head);
    title.title = place.path;
    const kind = kindOf(view.found, place.path, view.head);
    chips.replaceChildren(...(kind?.labels ?? []).map((name) => element("span", {
      className: "chip", title: `${MEANINGS[name]}`, style: `--kind: ${kindColour(name)}`, text: `${name} ${Math.round(100 * kind.confidence[name])} %`,
    })));
    if (kind && !kind.labels.length) chips.append(element("span", { className: "quiet", text: "no clear kind" }));
    batches(place);
    tick.textContent = view.ablated.includes(id()) ? "keep this head" : "take out";
    tick.title = "choose this head for ablation";
    tick.setAttribute("aria-pressed", String(view.ablated.includes(id())));
    compare.textContent = view.pinned ? "pin this as A instead" : "compare: pin as A";
    const a = await pinned(view);
    against.hidden = a === null;
    if (a) {
      against.replaceChildren(
        element("span", {}, "A is ", element("b", { text: pinnedName(a, view) }), ". Pick another head, recording or β as B."),
        element("button", { type: "button", text: "end comparison", on: { click: () => view.change({ pinned: "" }) } }),
      );
    }
  }

  function batches(place) {
    batch.replaceChildren();
    if (!(place.batches > 1)) return;
    const choice = element("select", { "aria-label": "batch entry", on: { change: () => view.change({ batch: Number(choice.value) }) } });
    for (let i = 0; i < place.batches; i++) choice.append(element("option", { value: i, text: `entry ${i}` }));
    choice.value = String(view.batch);
    batch.append(choice);
  }

  view.on("place head found kinds ablated pinned batch recording", show);
  show();
}
