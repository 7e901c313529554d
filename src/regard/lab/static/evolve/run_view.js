// Everything that shows one run: the maps of its heads, and charts over the steps.
import { HEAD_TYPE_COLOURS } from "../colour.js";
import { checkbox, element, formatNumber, select, showMessage } from "../dom.js";
import { isDark } from "../theme.js";
import { createHeadHistory, createHeadMaps, drawMap } from "./head_maps.js";
import { createLineChart } from "./line_chart.js";
import { createOffsetPlanes } from "./offset_planes.js";
import { setLinearSteps } from "./step_axis.js";
import {
  arrivalButtons, colourOptions, confidenceName, createTypeTimeline, headColour, legendEntry, typeLegend,
} from "./type_timeline.js";

const TRAIN_COLOUR = "var(--accent)";
const HELD_OUT_COLOUR = "var(--asked)";
const NO_RECORDS = {
  waiting: "This run waits until other trainings have ended.",
  unstarted: "This run was never started, so it has no records of heads.",
  training: "The heads are recorded for the first time before the first step …",
  growing: "There are no records of the heads yet …",
};

const showError = (error) => showMessage(error.message, "error");

// A panel with a title, and controls beside the title.
function panel(title, controls, ...content) {
  const bar = element("div", { className: "bar" }, element("h2", { text: title }), ...controls);
  return element("section", { className: "panel", "aria-label": title }, bar, ...content);
}

// Pairs of a step and a value, for a line chart.
function pointsOf(steps, values) {
  return steps.map((step, i) => [step, values[i] ?? NaN]);
}

function showLegend(box, lines) {
  box.replaceChildren(...lines.map((line) => legendEntry(line.colour, line.label)));
}

// `selectRecord(record, head)` and `change({ … })` belong to the page. The page's selection is
// { data, record, head, valueName, content, headFilter, colourBy, linearSteps }.
export function createRunView({ selectRecord, change }) {
  let selection = { data: null, record: 0 };
  let drawCount = 0;
  const selectHead = (head) => selectRecord(selection.record, head);

  const headMaps = createHeadMaps(selectHead);
  const content = select("show", [["profile", "offsets"], ["map", "weights"]], "map", (value) => change({ content: value }));
  const types = element("p", { className: "kinds" });
  const mapsPanel = panel("All heads", [content], types, headMaps.box);

  const lossChart = createLineChart("loss over the steps", 150, selectRecord);
  const lossLegend = element("p", { className: "quiet key" });
  const scoreChart = createLineChart("held-out score over the steps", 130, selectRecord);
  const scoreLegend = element("p", { className: "quiet key" });
  const metricsPanel = panel("How it learned", [lossLegend], lossChart.box, scoreLegend, scoreChart.box);

  const valueChart = createLineChart("a number of every head over the steps", 220, selectRecord);
  const valueName = element("select", { "aria-label": "measure", className: "measure" });
  valueName.addEventListener("change", () => change({ valueName: valueName.value }));
  const filters = [["all", "all"], ["layer", "of the layer"], ["one", "the selected one"]];
  const headFilter = select("heads", filters, "all", (value) => change({ headFilter: value }));
  const colourBy = select("colour by", colourOptions(), "", (value) => change({ colourBy: value }));
  const logSteps = checkbox("log steps", true, (checked) => change({ linearSteps: !checked }));
  const meaning = element("p", { className: "quiet meaning" });
  const valuePanel = panel("Over time", [valueName, headFilter, colourBy, logSteps], meaning, valueChart.box);

  const planes = createOffsetPlanes(selectHead);
  const planesHint = "from a patch of the image; the radius of a circle is the width of the head";
  const planesPanel = panel("Offsets that heads attend to",
    [element("span", { className: "quiet", text: planesHint })], planes.box);

  const timeline = createTypeTimeline(selectRecord);
  const arrivals = element("div", { className: "story" });
  const typesPanel = panel("Arrival of head types", [], timeline.box, arrivals);

  const about = element("div", { className: "about-head" });
  const canvas = element("canvas", { className: "large", role: "img" });
  const history = createHeadHistory((record) => selectRecord(record));
  const headPanel = panel("One head", [about], element("div", { className: "one" }, canvas, history.box));

  const message = element("p", { className: "panel empty", hidden: true });
  const left = element("div", { className: "left" }, mapsPanel, metricsPanel);
  const right = element("div", { className: "right" }, valuePanel, planesPanel, typesPanel);
  const box = element("div", { className: "stage" }, message, left, right, headPanel);
  const charts = [valueChart, timeline, lossChart, scoreChart];

  function setHidden(hidden) {
    left.hidden = hidden;
    right.hidden = hidden;
    headPanel.hidden = hidden;
  }

  // Draw everything.
  async function draw(newSelection) {
    selection = newSelection;
    drawCount += 1;
    const thisDraw = drawCount;
    const { data } = selection;
    const hasHeads = data.heads.length > 0;
    setHidden(!hasHeads);
    message.hidden = hasHeads;
    mapsPanel.hidden = !hasHeads;
    if (!hasHeads) {
      // The loss may be known before the first record of the heads.
      message.textContent = NO_RECORDS[data.run.state] ?? "This run has no records of heads.";
      left.hidden = !data.metrics?.loss.steps.length;
      drawMetrics();
      return;
    }
    data.colourBy = data.hasTypes ? selection.colourBy : "";
    showControls();
    timeline.box.hidden = !data.hasTypes;
    timeline.draw(data, selection.head);
    arrivals.replaceChildren(...arrivalButtons(data, selectRecord));
    drawMetrics();
    try {
      const parts = [data.loadValues(selection.valueName), drawSelected(selection, true), data.loadOffsets()];
      if (data.colourBy) parts.push(data.loadValues(confidenceName(data.colourBy)));
      const [values] = await Promise.all(parts);
      if (thisDraw !== drawCount) return; // something else is drawn meanwhile
      drawValues(values);
      if (data.offsets) planes.draw(data, data.offsets, selection.record, selection.head);
    } catch (error) {
      if (thisDraw === drawCount) showError(error);
    }
  }

  function showControls() {
    const { data } = selection;
    content.hidden = !data.run.on_grid;
    planesPanel.hidden = !data.run.on_grid;
    content.querySelector("select").value = selection.content;
    headFilter.querySelector("select").value = selection.headFilter;
    colourBy.querySelector("select").value = selection.colourBy;
    colourBy.hidden = !data.hasTypes;
    setLinearSteps(selection.linearSteps);
    logSteps.firstChild.checked = !selection.linearSteps;

    // The list is built again only if the names changed, because that closes it.
    const names = data.measures.flatMap((group) => group.measures.map((measure) => measure.name)).join();
    if (valueName.dataset.all !== names) {
      valueName.replaceChildren();
      for (const group of data.measures) {
        const options = group.measures.map(({ name, label, meaning }) =>
          element("option", { value: name, text: label, title: meaning }));
        valueName.append(element("optgroup", { label: group.title }, ...options));
      }
      valueName.dataset.all = names;
    }
    valueName.value = selection.valueName;
  }

  function isShown(head) {
    const { data, headFilter: filter, head: selectedHead } = selection;
    if (filter === "all" || head === selectedHead) return true;
    return filter === "layer" && data.heads[head].layer === data.heads[selectedHead].layer;
  }

  function drawValues({ meaning: meaningText, rows }) {
    const { data, record, head: selectedHead } = selection;
    meaning.textContent = meaningText;
    const lastRecord = data.labels.length - 1;
    const steps = data.steps.slice(0, rows.length);
    const lines = [];
    let selectedLine = null;
    for (let head = 0; head < data.heads.length; head++) {
      if (!isShown(head)) continue;
      const types = data.labels[lastRecord][head].join(", ");
      const line = {
        label: types ? `${data.heads[head].label} ${types}` : data.heads[head].label,
        colour: headColour(data, head, lastRecord),
        class: head === selectedHead ? "picked" : "",
        points: pointsOf(steps, rows.map((row) => row[head])),
      };
      if (head === selectedHead) selectedLine = line;
      else lines.push(line);
    }
    if (selectedLine) lines.push(selectedLine); // drawn last, above the others
    valueChart.draw({ steps: data.steps, record, lines, gaps: data.gaps });
  }

  // The loss and the held-out score.
  function drawMetrics() {
    const { data, record } = selection;
    const { metrics } = data;
    const hasLoss = metrics?.loss.steps.length > 0;
    lossChart.box.hidden = !hasLoss;
    scoreChart.box.hidden = !hasLoss;
    scoreLegend.hidden = !hasLoss;
    if (!hasLoss) {
      lossLegend.textContent = bestText(data.run);
      return;
    }
    // Metrics arrive sooner than records: the axis ends at the last step of either.
    const held = metrics.held_out;
    const steps = data.steps.length ? data.steps : metrics.loss.steps;
    const lastStep = Math.max(metrics.loss.steps.at(-1), held.steps.at(-1) ?? 0);

    const lines = [
      { label: "loss", colour: TRAIN_COLOUR, class: "thin", points: pointsOf(metrics.loss.steps, metrics.loss.values) },
    ];
    if (held.values.loss) {
      const points = pointsOf(held.steps, held.values.loss);
      lines.push({ label: "held-out loss", colour: HELD_OUT_COLOUR, points });
    }
    lossChart.draw({ steps, lastStep, record, lines });
    showLegend(lossLegend, lines);

    const name = data.run.score;
    const hasScore = Boolean(held.values[name]) && name !== "loss";
    scoreChart.box.hidden = !hasScore;
    scoreLegend.hidden = !hasScore;
    if (!hasScore) return;
    const points = pointsOf(held.steps, held.values[name]);
    const scoreLine = { label: `held-out ${name}`, colour: HELD_OUT_COLOUR, points };
    scoreChart.draw({ steps, lastStep, record, lines: [scoreLine] });
    showLegend(scoreLegend, [scoreLine]);
  }

  function bestText({ state, result }) {
    const best = result?.best;
    const isTraining = ["training", "waiting", "growing"].includes(state);
    if (!best && isTraining) return "There are no numbers yet.";
    if (!best) return "No loss was saved with these records.";
    const scores = Object.entries(best.scores).map(([name, value]) => `${name} ${formatNumber(value)}`).join(", ");
    return `Best step ${best.step.toLocaleString("en")}: held-out ${scores}. The loss at every step was not saved.`;
  }

  // Draw another record, or with `headChanged` another head: only what depends on them.
  async function drawSelected(newSelection, headChanged = false) {
    selection = newSelection;
    // The page changes its selection in place; these are the values of this call.
    const { data, record, head, content: mapContent } = selection;
    const isCurrent = () => selection.data === data && selection.content === mapContent;
    for (const chart of charts) chart.mark(record);
    history.mark(record);
    types.replaceChildren(...typeLegend(data, record));

    const step = data.steps[record];
    const maps = await data.loadMaps(step, mapContent);
    if (!isCurrent() || data.steps[selection.record] !== step) return;
    headMaps.draw(data, record, maps, mapContent, selection.head);
    drawMap(canvas, maps[selection.head], data.mapShape(selection.head, mapContent));
    showHead(data, record, selection.head);
    if (data.offsets) planes.draw(data, data.offsets, record, selection.head);
    const hasNext = record + 1 < data.steps.length;
    if (hasNext) data.loadMaps(data.steps[record + 1], mapContent).catch(() => {}); // so that playing is smooth
    if (!headChanged) return;

    timeline.draw(data, head);
    const values = data.values.get(selection.valueName);
    if (values?.rows.length === data.steps.length) drawValues(values);
    const headHistory = await data.loadHeadHistory(head, mapContent);
    if (!isCurrent() || selection.head !== head) return;
    history.draw(data, head, headHistory, mapContent, selection.record, isDark());
  }

  function showHead(data, record, head) {
    const { label, path } = data.heads[head];
    const step = data.steps[record];
    const labels = data.labels[record][head];
    const shownLabels = labels.length ? labels : ["no type"];
    about.replaceChildren(
      element("b", { text: label }), " ",
      ...shownLabels.map((type) => legendEntry(HEAD_TYPE_COLOURS[type] ?? "var(--rule)", type)),
      element("span", { className: "quiet", text: ` at step ${step.toLocaleString("en")} · ${path}` }));
    const axes = selection.content === "map" ? "queries down, keys across" : "weight by offset";
    canvas.setAttribute("aria-label", `head ${label} at step ${step}: ${axes}`);
  }

  function showEmpty(text) {
    setHidden(true);
    message.hidden = false;
    message.textContent = text;
  }

  function stop() {
    for (const chart of charts) chart.stop();
  }

  return {
    box,
    draw,
    drawSelected: (newSelection, headChanged) => drawSelected(newSelection, headChanged).catch(showError),
    showEmpty,
    stop,
  };
}
