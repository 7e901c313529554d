// Why a weight is what it is: the operator's own steps with the numbers put in.
import { get } from "../api.js";
import { drawing, element, said, settled } from "../dom.js";
import { precise } from "./maps.js";
import { asked, locked, placeOf, SCORES } from "./view.js";
import { named } from "./words.js";

const number = (x) => (typeof x === "string" ? { inf: Infinity, "-inf": -Infinity, nan: NaN }[x] : x);

export function makeWhy(root, view) {
  const body = element("div", { className: "steps" });
  root.append(element("h3", { text: "Why this number" }), body);
  let asking = null;

  async function show() {
    asking?.abort();
    const place = placeOf(view);
    const [row, key] = [locked(view, "row"), locked(view, "key")];
    if (!place || !place.kept || row === null || key === null) {
      body.replaceChildren(element("p", { className: "quiet", text: "Lock a cell of the map, and its weight is taken apart here." }));
      return;
    }
    const { signal } = (asking = new AbortController());
    try {
      const found = await get("/api/look/why", { ...asked(view), row, key }, signal);
      const who = element("p", { className: "who", "aria-live": "polite" });
      who.append(named(view.found, place, "queries", row), " looks at ", named(view.found, place, "keys", key), ": ",
        element("b", { text: precise(found.weight) }));
      body.replaceChildren(who, chain(found), bars(found.contributions));
      body.dataset.weight = found.weight;
    } catch (error) {
      if (error.name !== "AbortError") body.replaceChildren(element("p", { className: "error", text: error.message }));
    }
  }

  view.on(`${SCORES} found row key`, settled(show, 40));
  show();
  return () => asking?.abort();
}

function chain(found) {
  const list = element("ol", { className: "chain" });
  const step = (name, sum, value, about = "") => list.append(element("li", { title: about },
    element("span", { className: "name", text: name }), element("span", { className: "sum", text: sum }),
    element("span", { className: "value", text: value })));
  const scale = number(found.scale);
  step("q · k", `${found.contributions.length} products, below`, said(found.product), "the query's and the key's vectors multiplied and summed");
  if (scale === Infinity) step("× scale", "∞: only the largest q · k of the row counts", "");
  else step("× scale", `${said(found.product)} × ${said(scale)}`, said(number(found.scaled)), "scale is the inverse temperature β");
  if (found.softcap) step("softcap", `${said(found.softcap)} · tanh(${said(number(found.scaled))} / ${said(found.softcap)})`, said(found.capped));
  for (const bias of found.biases) step(`+ ${bias.name}`, "", said(number(bias.value)));
  if (found.logit !== null && found.biases.length) step("= score", "", said(number(found.logit)));
  step("mask", found.hidden ? "hidden: its weight is 0" : "may be seen", found.hidden ? "×" : "✓");
  const lse = number(found.lse);
  if (!found.hidden && found.logit !== null && lse !== null && Number.isFinite(lse)) {
    step("softmax", `exp(${said(number(found.logit))} − ${said(lse)})`, precise(found.weight), `${said(lse)} is the logarithm of the row's sum of exp(score)`);
  } else {
    step("softmax", found.hidden ? "" : scale === Infinity ? "ties share the weight" : "", precise(found.weight));
  }
  return list;
}

// The d products that q · k is the sum of.
function bars(products) {
  const [wide, high] = [320, 74];
  const [low, top] = [Math.min(...products, 0), Math.max(...products, 0)];
  const y = (value) => 1 + ((top - value) / (top - low || 1)) * (high - 2);
  const size = wide / products.length;
  const label = `${products.length} products of q and k, from ${said(low)} to ${said(top)}`;
  const svg = drawing("svg", { viewBox: `0 0 ${wide} ${high}`, role: "img", preserveAspectRatio: "none", "aria-label": label });
  svg.append(drawing("line", { x1: 0, x2: wide, y1: y(0), y2: y(0), class: "base" }));
  products.forEach((x, i) => {
    const bar = drawing("rect", {
      x: (i * size + size * 0.1).toFixed(2), width: (size * 0.8).toFixed(2), class: x < 0 ? "minus" : "plus",
      y: y(Math.max(x, 0)).toFixed(2), height: Math.max(0.3, Math.abs(y(0) - y(x))).toFixed(2),
    });
    const title = drawing("title");
    title.textContent = `q · k, entry ${i}: ${said(x)}`;
    bar.append(title);
    svg.append(bar);
  });
  const caption = element("figcaption", { className: "quiet", text: `q · k entry by entry: ${said(low)} … ${said(top)}` });
  return element("figure", { className: "products" }, caption, svg);
}
