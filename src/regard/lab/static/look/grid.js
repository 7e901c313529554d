// All heads side by side: places down, heads across, or one flow sorted by a number. Frames say what kind a head is.
import { KIND_COLOURS, paint } from "../colour.js";
import { checkbox, element, said, select } from "../dom.js";
import { onTheme } from "../theme.js";
import { headMap } from "./numbers.js";
import { indexOf } from "./view.js";
import { headName } from "./words.js";

export const MEANINGS = {
  sink: "gives its weight to the first token and to special tokens", previous: "looks at the token before",
  positional: "looks at one fixed offset", convolution: "its weights go by offset alone",
  averaging: "looks at everything alike", induction: "looks at what followed this token before",
  duplicate: "looks at this token's earlier copies",
  content: "neither position nor average explains where it looks",
};
const MANY = 8; // heads of a layer beyond which there is no room to spare
const LAZY = 300; // more heads than this are drawn as they come into view

export function kindOf(found, path, head) {
  return found.kinds?.find((one) => one.path === path && one.head === head) ?? null;
}

export function kindColour(kind) {
  return KIND_COLOURS[kind] ?? "var(--rule)";
}

export function makeGrid(root, view) {
  const legend = element("div", { className: "legend", role: "group", "aria-label": "show only heads of a kind" });
  const tools = element("div", { className: "bar" });
  const box = element("div", { className: "heads", role: "group", "aria-label": "heads" });
  const hint = element("p", { className: "hint quiet" });
  const order = element("button", {
    type: "button", className: "order", on: { click: () => view.change({ ascending: !view.ascending }) },
  });
  root.append(tools, legend, box, hint);
  let heads = [];
  const coming = new IntersectionObserver((entries) => {
    for (const entry of entries) if (entry.isIntersecting) draw(heads[Number(entry.target.dataset.number)]);
  }, { rootMargin: "200px" });

  function build() {
    coming.disconnect();
    heads = [];
    for (const place of view.found.places) {
      for (const [index, head] of place.heads.entries()) {
        const one = { place, index, head, kind: null, drawn: "" };
        one.name = headName(place, head);
        one.canvas = element("canvas", { className: place.map ? "" : "none", "aria-hidden": "true" });
        one.caption = element("span", { className: "caption" });
        one.button = element("button", {
          type: "button", className: "head", tabindex: -1, dataset: { number: heads.length, place: place.place, head },
          on: { click: () => pick(one), mouseenter: () => tell(one), focus: () => { reach(one); tell(one); } },
        }, one.canvas, one.caption);
        one.tick = element("input", {
          type: "checkbox", tabindex: -1, "aria-label": `ablate ${one.name}`, title: "take this head out (x)",
          on: { change: () => toggle(one) },
        });
        one.cell = element("div", { className: "cell" }, one.button, one.tick);
        heads.push(one);
      }
    }
    named();
  }

  const id = (one) => `${one.place.place}.${one.head}`;
  const pick = (one) => view.change({ place: one.place.place, head: one.head, batch: 0, hover: null }, true);

  function toggle(one) {
    const others = view.ablated.filter((x) => x !== id(one));
    view.change({ ablated: others.length < view.ablated.length ? others : [...view.ablated, id(one)] });
  }

  function numberOf(one, name) {
    const column = Object.keys(view.found.columns).indexOf(name);
    if (column >= 0) return one.place.numbers[one.index]?.[column] ?? null;
    const kind = name.startsWith("kind ") ? one.kind?.confidence[name.slice(5)] : one.kind?.columns?.[name.slice(6)];
    return kind ?? null;
  }

  // Kinds may come later than the heads.
  function named() {
    const counts = {};
    for (const one of heads) {
      one.kind = kindOf(view.found, one.place.path, one.head);
      const label = one.kind?.labels[0] ?? null;
      if (label) counts[label] = (counts[label] ?? 0) + 1;
      one.cell.style.setProperty("--kind", label ? kindColour(label) : "transparent");
      const numbers = Object.keys(view.found.columns).map((name) => `${name} ${said(numberOf(one, name))}`);
      one.said = [label ?? (view.found.kinds ? "no clear kind" : ""), ...numbers].filter(Boolean).join(" · ");
      one.button.setAttribute("aria-label", `${one.name}: ${one.said}`);
    }
    legend.replaceChildren();
    for (const name of Object.keys(KIND_COLOURS)) {
      const swatch = element("i", { style: `background: ${kindColour(name)}` });
      legend.append(element("button", {
        type: "button", title: MEANINGS[name], disabled: !counts[name] && view.kind !== name, dataset: { kind: name },
        on: { click: () => view.change({ kind: view.kind === name ? "" : name }) },
      }, swatch, ` ${name}`, element("small", { text: counts[name] ? ` ${counts[name]}` : "" })));
    }
    legend.hidden = !view.found.kinds;
    showTools();
    arrange();
  }

  function showTools() {
    const options = [["", "by layer"], ...Object.keys(view.found.columns).map((name) => [name, name])];
    if (view.found.kinds) {
      for (const kind of Object.keys(KIND_COLOURS)) {
        if (heads.some((one) => one.kind?.confidence[kind] !== undefined)) options.push([`kind ${kind}`, `how surely ${kind}`]);
      }
      for (const name of Object.keys(view.found.kind_columns ?? {})) {
        if (heads.some((one) => typeof one.kind?.columns?.[name] === "number")) options.push([`score ${name}`, `score: ${name}`]);
      }
    }
    if (!options.some(([name]) => name === view.sort)) options.push([view.sort, view.sort]);
    tools.replaceChildren(
      select("sort", options, view.sort, (sort) => view.change({ sort })), order,
      checkbox("hide sinks", view.hide, (hide) => view.change({ hide })),
    );
  }

  function arrange() {
    order.disabled = !view.sort;
    order.textContent = view.ascending ? "smallest first" : "largest first";
    for (const button of legend.children) button.setAttribute("aria-pressed", String(button.dataset.kind === view.kind));
    const shown = heads.filter((one) => !view.kind || one.kind?.labels.includes(view.kind));
    box.replaceChildren();
    box.className = `heads ${view.sort ? "flow" : "grid"}`;
    if (!shown.length) box.append(element("p", { className: "quiet", text: "No head is surely of this kind." }));
    else if (view.sort) flow(shown);
    else layers(shown);
    chosen();
    drawAll();
  }

  function flow(shown) {
    const sign = view.ascending ? 1 : -1;
    const value = (one) => numberOf(one, view.sort) ?? sign * Infinity; // what has no number comes last, either way
    shown.sort((a, b) => (value(a) === value(b) ? 0 : sign * (value(a) - value(b))));
    for (const one of shown) {
      one.caption.replaceChildren(element("b", { text: id(one) }), ` ${said(numberOf(one, view.sort))}`);
      one.cell.style.gridColumn = "";
      box.append(one.cell);
    }
  }

  function layers(shown) {
    const across = [...new Set(view.found.places.flatMap((place) => place.heads))].sort((a, b) => a - b);
    box.style.setProperty("--across", across.length);
    box.classList.toggle("many", across.length > MANY);
    box.append(element("span", { className: "place" }), ...across.map((x) => element("span", { className: "number", text: x })));
    for (const place of view.found.places) {
      const mine = shown.filter((one) => one.place === place);
      if (!mine.length) continue;
      box.append(element("span", { className: "place", title: place.path, text: (place.name || place.path || "model").replaceAll(".", ".\u200b") }));
      for (const one of mine) {
        one.caption.replaceChildren();
        one.cell.style.gridColumn = across.indexOf(one.head) + 2;
        box.append(one.cell);
      }
    }
  }

  function drawAll() {
    if (heads.length > LAZY) {
      coming.disconnect(); // observed anew, it reports anew
      for (const one of heads) coming.observe(one.button);
    } else {
      heads.forEach(draw);
    }
  }

  function draw(one) {
    const stamp = `${view.hide} ${document.documentElement.dataset.theme}`;
    if (one.drawn === stamp || !one.place.map) return;
    const { values, rows, width, darkest } = headMap(one.place, one.index, view.hide);
    paint(one.canvas, values, width, rows, darkest);
    one.drawn = stamp;
  }

  function chosen() {
    let now = null;
    for (const one of heads) {
      const is = one.place.place === view.place && one.head === view.head;
      one.button.setAttribute("aria-pressed", String(is));
      one.tick.checked = view.ablated.includes(id(one));
      if (is && one.cell.isConnected) now = one;
    }
    reach(now ?? heads.find((one) => one.cell.isConnected));
    tell(now);
  }

  // One head is reached by Tab, the others from it by arrows.
  function reach(reached) {
    for (const one of heads) one.button.tabIndex = one === reached ? 0 : -1;
  }

  function tell(one) {
    hint.replaceChildren();
    if (one) hint.append(element("b", { text: one.name }), ` ${one.said}`);
    else hint.append("Pick a head.");
  }

  // Arrows go to the nearest head that way on the screen, whatever the arrangement; x takes a head out.
  function move(event) {
    const from = event.target.closest(".head");
    if (!from || event.metaKey || event.ctrlKey || event.altKey) return;
    if (event.key === "x") toggle(heads[Number(from.dataset.number)]);
    const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!way) return;
    event.preventDefault();
    const here = from.getBoundingClientRect();
    let best = null;
    for (const one of heads) {
      if (!one.button.isConnected || one.button === from) continue;
      const there = one.button.getBoundingClientRect();
      const [dx, dy] = [there.left - here.left, there.top - here.top];
      const along = dx * way[0] + dy * way[1];
      const beside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
      if (along < 1 || beside > here.width / 2) continue;
      if (!best || along < best.along) best = { along, one };
    }
    best?.one.button.focus();
  }

  box.addEventListener("keydown", move);
  box.addEventListener("mouseleave", () => tell(heads.find((one) => one.button.getAttribute("aria-pressed") === "true")));
  view.on("found", () => view.found && build());
  view.on("kinds", () => view.found && named());
  view.on("sort ascending kind", () => view.found && arrange());
  view.on("hide", () => view.found && drawAll());
  view.on("place head ablated", () => view.found && chosen());
  const stop = onTheme(() => drawAll());
  if (view.found) build();
  return () => { stop(); coming.disconnect(); };
}

export function defaultHead(found) {
  // The surest induction head, or else the one whose weights are nearest to a single key's without being a sink.
  const best = { score: -Infinity, place: null, head: null };
  for (const place of found.places) {
    for (const head of place.heads) {
      const kind = kindOf(found, place.path, head);
      const numbers = place.numbers[indexOf(place, head)] ?? [];
      const number = (name) => numbers[Object.keys(found.columns).indexOf(name)] ?? 0;
      const score = (kind?.confidence.induction ?? 0) * 2 + number("peak") - number("sink");
      if (score > best.score) Object.assign(best, { score, place: place.place, head });
    }
  }
  return { place: best.place, head: best.head };
}
