// The cost against the number of tokens n: attention, the rest, the present n, and the crossover n*.
import { element } from "../dom.js";
import { plot } from "../plot.js";
import { formatExact } from "./units.js";

const ATTENTION_COLOUR = "#d55e00";
const QUIET_COLOUR = "#7f7f7f";
const COLOURS = { attention: ATTENTION_COLOUR, "all the rest": "#1f77b4", total: QUIET_COLOUR, logits: "#cc79a7" };

export function createCostChart() {
  const box = element("div", { className: "chart", role: "img", "aria-label": "cost against the number of tokens" });
  const panel = element("section", { className: "panel" }, element("h2", { text: "Cost against n" }), box);
  let removeChart = null;

  // `costs` is the response of the lab: lengths `n`, the `lines` over them, the present length `at`, the crossover.
  panel.show = async (costs) => {
    panel.hidden = costs.n.length === 0;
    if (panel.hidden) return;
    const traces = [];
    for (const [name, values] of Object.entries(costs.lines)) traces.push(lineTrace(name, costs.n, values));

    const present = { n: costs.at, text: `n = ${formatExact(costs.at)}`, y: 1, colour: QUIET_COLOUR, font: {} };
    const marks = [present];
    if (costs.crossover !== null && costs.crossover <= costs.n.at(-1)) {
      const text = `n* = ${formatExact(costs.crossover)}`;
      const crossover = { n: costs.crossover, text, y: 0.9, colour: ATTENTION_COLOUR, font: { color: ATTENTION_COLOUR } };
      marks.push(crossover);
      // At the crossover attention costs half of the total.
      traces.push(pointTrace(crossover, interpolate(costs, "total", costs.crossover) / 2, text));
    }
    traces.push(pointTrace(present, interpolate(costs, "total", costs.at), `${present.text}: %{y:.3s}`));

    // The label of the smaller n stands left of its line, so that two labels do not overlap.
    const crossoverIsFirst = marks.length > 1 && present.n > marks[1].n;
    const leftMark = crossoverIsFirst ? marks[1] : present;
    const shapes = [];
    const annotations = [];
    for (const mark of marks) {
      const isLeft = mark === leftMark;
      shapes.push({
        type: "line", x0: mark.n, x1: mark.n, y0: 0, y1: 1, yref: "paper",
        line: { color: mark.colour, width: 1.5, dash: "dash" },
      });
      annotations.push({
        x: Math.log10(mark.n), y: mark.y, xref: "x", yref: "paper", text: mark.text, showarrow: false, font: mark.font,
        xanchor: isLeft ? "right" : "left", xshift: isLeft ? -4 : 4,
      });
    }
    const isFlops = costs.unit === "FLOPs";
    removeChart = await plot(box, traces, {
      height: 340, shapes, annotations, margin: { l: 56, r: 14, t: 14, b: 44 }, legend: { orientation: "h", y: -0.22 },
      xaxis: { type: "log", title: { text: "tokens n" }, dtick: 1, exponentformat: "power" },
      yaxis: { type: "log", title: { text: isFlops ? "FLOPs" : "seconds" }, exponentformat: isFlops ? "SI" : "power" },
    });
  };
  panel.leave = () => removeChart?.();
  return panel;
}

function lineTrace(name, lengths, values) {
  return {
    x: lengths, y: values.map((value) => (value > 0 ? value : null)), name, mode: "lines",
    line: { color: COLOURS[name], width: name === "total" ? 1 : 2, dash: name === "logits" ? "dot" : "solid" },
    hovertemplate: "n = %{x:,}: %{y:.3s}<extra>%{fullData.name}</extra>",
  };
}

function pointTrace(mark, value, hoverText) {
  return {
    x: [mark.n], y: [value], mode: "markers", marker: { color: mark.colour, size: 9 }, showlegend: false,
    hovertemplate: `${hoverText}<extra></extra>`,
  };
}

// The value of a line between its points: straight on logarithmic axes.
function interpolate(costs, name, n) {
  const values = costs.lines[name];
  const i = Math.max(1, costs.n.findIndex((length) => length >= n));
  const share = Math.log(n / costs.n[i - 1]) / Math.log(costs.n[i] / costs.n[i - 1]);
  return Math.exp(Math.log(values[i - 1]) * (1 - share) + Math.log(values[i]) * share);
}
