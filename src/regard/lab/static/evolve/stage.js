// All that shows one run: pictures of its heads, and charts of them over time.
import { KIND_COLOURS } from "../colour.js";
import { checkbox, element, note, said, select } from "../dom.js";
import { isDark } from "../theme.js";
import { chart } from "./chart.js";
import { film, heads, large } from "./pictures.js";
import { colourOf, legend, story, types } from "./types.js";
import { setEven } from "./time.js";
import { where } from "./where.js";

const LOSS = { train: "var(--accent)", held: "var(--asked)" };

// `jump(record, head)` and `change({ … })` are the room's.
export function stage({ jump, change }) {
  const pick = (head) => jump(now.at, head);
  const [grid, strip, rows, planes] = [heads(pick), film((at) => jump(at)), types(jump), where(pick)];
  const [lines, loss, score] = [chart("a number of every head over the steps", 220, jump), chart("loss over the steps", 150, jump), chart("held-out score over the steps", 130, jump)];
  const empty = element("p", { className: "panel empty", hidden: true });
  const kinds = element("p", { className: "kinds" });
  const came = element("div", { className: "story" });
  const canvas = element("canvas", { className: "large", role: "img" });
  const about = element("div", { className: "about-head" });
  const numbers = element("select", { "aria-label": "number", on: { change: () => change({ value: numbers.value }) } });
  const unit = element("span", { className: "quiet" });
  const which = select("heads", [["all", "all"], ["layer", "of the layer"], ["one", "the picked one"]], "all", (value) => change({ which: value }));
  const logarithmic = checkbox("log steps", true, (on) => change({ even: !on }));
  const of = select("show", [["profile", "offsets"], ["map", "weights"]], "map", (value) => change({ of: value }));
  const titled = (title, ...parts) => element("section", { className: "panel", "aria-label": title }, element("div", { className: "bar" }, element("h2", { text: title }), ...parts.shift()), ...parts);
  const plane = titled("Where heads look", [element("span", { className: "quiet", text: "from a cell of the picture; circles are as wide as the head looks" })], planes.box);
  const lossTitle = element("p", { className: "quiet key" });
  const scoreTitle = element("p", { className: "quiet key" });
  const learned = titled("How it learned", [lossTitle], loss.box, scoreTitle, score.box);
  const left = element("div", { className: "left" },
    titled("All heads", [of], kinds, grid.box),
    learned);
  const right = element("div", { className: "right" },
    titled("Over time", [numbers, which, logarithmic, unit], lines.box),
    plane,
    titled("When types arose", [], rows.box, came));
  const one = titled("One head", [about], element("div", { className: "one" }, canvas, strip.box));
  const box = element("div", { className: "stage" }, empty, left, right, one);
  let [now, drawn] = [{ data: null, at: 0 }, 0];

  async function draw(shown) {
    now = shown;
    const { data } = shown;
    const mine = ++drawn;
    for (const part of [left, right, one]) part.hidden = !data.heads.length;
    empty.hidden = data.heads.length > 0;
    if (!data.heads.length) {
      empty.textContent = { training: "The first record of the heads comes before the first step …", growing: "No record of the heads yet …" }[data.told.state] ?? "This run has no records of heads.";
      left.hidden = !data.metrics?.loss.steps.length;
      left.firstChild.hidden = true;
      curves();
      return;
    }
    left.firstChild.hidden = false;
    of.hidden = plane.hidden = !data.told.on_grid;
    of.querySelector("select").value = shown.of;
    which.querySelector("select").value = shown.which;
    options(data);
    setEven(shown.even);
    logarithmic.firstChild.checked = !shown.even;
    rows.box.hidden = !data.labels.some((step) => step.some((named) => named.length));
    rows.draw(data, shown.head);
    came.replaceChildren(...story(data, jump));
    curves();
    try {
      const [value] = await Promise.all([data.value(shown.value), move(shown, true), data.where()]);
      if (mine !== drawn) return;
      trajectories(value);
      if (data.offsets) planes.draw(data, data.offsets, shown.at, shown.head);
    } catch (error) {
      if (mine === drawn) note(error.message, "error");
    }
  }

  function options(data) {
    const all = data.names.flatMap((group) => group.names).join();
    if (numbers.dataset.all !== all) {
      numbers.replaceChildren(...data.names.map((group) =>
        element("optgroup", { label: group.title }, ...group.names.map((name) => element("option", { value: name, text: name })))));
      numbers.dataset.all = all;
    }
    numbers.value = now.value;
  }

  function trajectories({ unit: what, rows: values }) {
    const { data, head, which: chosen } = now;
    unit.textContent = what;
    const shown = data.heads.map((_, at) => at).filter((at) =>
      chosen === "all" || at === head || (chosen === "layer" && data.heads[at].layer === data.heads[head].layer));
    shown.sort((a, b) => (a === head) - (b === head)); // the picked one on top
    lines.draw({
      steps: data.steps, at: now.at,
      lines: shown.map((at) => {
        const kind = data.labels.at(-1)[at][0];
        return {
          label: `${data.heads[at].label}${kind ? ` ${kind}` : ""}`, colour: colourOf(data, at, data.labels.length - 1),
          class: at === head ? "picked" : "", points: data.steps.slice(0, values.length).map((step, k) => [step, values[k][at] ?? NaN]),
        };
      }),
    });
  }

  function curves() {
    const { data } = now;
    const steps = data.steps.length ? data.steps : data.metrics?.loss.steps ?? [];
    const points = (line) => line.steps.map((step, k) => [step, line.values[k] ?? NaN]);
    const held = data.metrics?.held_out;
    const known = data.metrics?.loss.steps.length > 0;
    for (const part of [loss.box, score.box, scoreTitle]) part.hidden = !known;
    if (!known) {
      const best = data.told.result?.best;
      const told = best ? Object.entries(best.scores).map(([name, x]) => `${name} ${said(x)}`).join(", ") : "";
      lossTitle.textContent = best ? `At its best, step ${best.step.toLocaleString("en")}: ${told}, held out. Its loss at every step was not kept.` : "No numbers yet.";
      return;
    }
    const end = [...steps.slice(0, 1), Math.max(steps.at(-1), data.metrics.loss.steps.at(-1), held.steps.at(-1) ?? 0)];
    const span = [...steps.slice(0, -1), end.at(-1)]; // numbers come sooner than records
    const both = [{ label: "loss", colour: LOSS.train, class: "thin", points: points(data.metrics.loss) }];
    if (held.values.loss) both.push({ label: "held-out loss", colour: LOSS.held, points: points({ steps: held.steps, values: held.values.loss }) });
    loss.draw({ steps: span, at: now.at, lines: both });
    keyed(lossTitle, both);
    const name = data.told.score;
    score.box.hidden = scoreTitle.hidden = !held.values[name] || name === "loss";
    if (!score.box.hidden) {
      const line = { label: `held-out ${name}`, colour: LOSS.held, points: points({ steps: held.steps, values: held.values[name] }) };
      score.draw({ steps: span, at: now.at, lines: [line] });
      keyed(scoreTitle, [line]);
    }
  }

  function keyed(box, all) {
    box.replaceChildren(...all.map((line) => element("span", { className: "kind" }, element("i", { style: `background:${line.colour}` }), line.label)));
  }

  // Another step, or another head: pictures and markers alone.
  async function move(shown, picked = false) {
    now = shown;
    const { data, at, head, of: what } = shown;
    for (const part of [lines, rows, loss, score]) part.mark(at);
    strip.mark(at);
    kinds.replaceChildren(...legend(data, at));
    const step = data.steps[at];
    const pictures = await data.at(step, what);
    if (now.data !== data || data.steps[now.at] !== step || now.of !== what) return;
    grid.draw(data, at, pictures, what, now.head);
    large(canvas, data, now.head, pictures, what);
    described(data, at, now.head);
    if (data.offsets) planes.draw(data, data.offsets, at, now.head);
    if (at + 1 < data.steps.length) data.at(data.steps[at + 1], what).catch(() => {}); // the next one, for playing
    if (!picked) return;
    rows.draw(data, head);
    if (data.values.get(now.value)?.rows.length === data.steps.length) trajectories(data.values.get(now.value));
    const frames = await data.film(head, what);
    if (now.data === data && now.head === head && now.of === what) strip.draw(data, head, frames, what, now.at, isDark());
  }

  function described(data, at, head) {
    const { label, path } = data.heads[head];
    const is = data.labels[at][head];
    about.replaceChildren(
      element("b", { text: label }), " ",
      ...(is.length ? is : ["no type"]).map((kind) => element("span", { className: "kind" },
        element("i", { style: `background:${KIND_COLOURS[kind] ?? "var(--rule)"}` }), kind)),
      element("span", { className: "quiet", text: ` at step ${data.steps[at].toLocaleString("en")} · ${path}` }));
    canvas.setAttribute("aria-label", `head ${label} at step ${data.steps[at]}: ${now.of === "map" ? "queries down, keys across" : "weight by offset"}`);
  }

  return {
    box, draw,
    move: (...given) => move(...given).catch((error) => note(error.message, "error")),
    empty(text) {
      for (const part of [left, right, one]) part.hidden = true;
      [empty.hidden, empty.textContent] = [false, text];
    },
    stop() { for (const part of [lines, rows, loss, score]) part.stop(); },
  };
}
