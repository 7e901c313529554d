// The text under a head: which way to ask, as text or as lines, and the strongest answers as a list.
import { element } from "../dom.js";
import { makeLines } from "./lines.js";
import { precise } from "./maps.js";
import { strongest } from "./rows.js";
import { makeTokens } from "./tokens.js";
import { locked, placeOf } from "./view.js";
import { named } from "./words.js";

const SHOWN = 8;

export function makeReading(root, view) {
  const bar = element("div", { className: "bar" });
  const text = element("div");
  const lines = element("div");
  const list = element("div", { className: "strongest" });
  const closed = element("p", { className: "quiet", hidden: true, text: "q and k of this recording were not kept, so that single weights cannot be had. Run the text again here, or watch with keep." });
  root.append(bar, closed, element("div", { className: "columns" }, element("div", {}, text, lines), list));

  const choice = (field, legend, options) => {
    const group = element("div", { className: "choice", role: "group", "aria-label": legend });
    for (const [value, label, title] of options) {
      group.append(element("button", { type: "button", text: label, title, dataset: { value }, on: { click: () => view.change({ [field]: value, hover: null }) } }));
    }
    const show = () => { for (const one of group.children) one.setAttribute("aria-pressed", String(one.dataset.value === view[field])); };
    view.on(field, show);
    show();
    return group;
  };
  const title = element("h3");
  bar.append(
    title,
    choice("direction", "direction", [["from", "looks at", "where the locked token looks"], ["to", "is looked at by", "who looks at the locked token"]]),
    choice("reading", "shown as", [["text", "text", "weights as shades of the words"], ["lines", "lines", "lines from the locked token"]]),
  );

  function show() {
    const place = placeOf(view);
    closed.hidden = !place || place.kept;
    title.textContent = place?.grid ? "On the picture" : "On the text";
    bar.querySelector("[data-value=text]").textContent = place?.grid ? "picture" : "text";
    const asked = view.weights;
    if (!place || !asked) {
      list.replaceChildren(element("p", { className: "quiet", text: place?.kept ? "Hover a token to see, click to lock it." : "" }));
      return;
    }
    const from = asked.direction === "from";
    const who = named(view.found, place, from ? "queries" : "keys", asked.at);
    const items = strongest(asked.values, SHOWN).map(({ at, weight }) => element("li", {}, element("button", {
      type: "button", text: named(view.found, place, from ? "keys" : "queries", at), title: "lock this cell",
      "aria-pressed": String(locked(view, from ? "key" : "row") === at && !asked.preview),
      on: { click: () => view.change({ [from ? "row" : "key"]: asked.at, [from ? "key" : "row"]: at }) },
    }), element("span", { text: precise(weight) })));
    list.replaceChildren(
      element("h4", {}, element("b", { text: who }), from ? " looks at" : " is looked at by"),
      items.length ? element("ol", {}, ...items) : element("p", { className: "quiet", text: "nothing" }),
    );
  }

  const stop = makeTokens(text, view);
  const stopLines = makeLines(lines, view);
  view.on("weights found place row key", show);
  show();
  return () => { stop(); stopLines(); };
}
