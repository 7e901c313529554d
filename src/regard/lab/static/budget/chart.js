// Cost against n: attention and all the rest, this n, and the n from which on attention is ahead.
import { element } from "../dom.js";
import { plot } from "../plot.js";
import { exact } from "./units.js";

const COLOURS = { attention: "#d55e00", "all the rest": "#1f77b4", total: "#7f7f7f", logits: "#cc79a7" };

export function chart() {
  const box = element("div", { className: "chart", role: "img", "aria-label": "cost against the number of tokens" });
  const panel = element("section", { className: "panel" }, element("h2", { text: "Cost against n" }), box);
  let clear = null;
  panel.show = async (told) => {
    panel.hidden = told.n.length === 0;
    if (panel.hidden) return;
    const traces = Object.entries(told.lines).map(([name, ys]) => ({ x: told.n, y: ys.map((y) => (y > 0 ? y : null)), name, mode: "lines",
      line: { color: COLOURS[name], width: name === "total" ? 1 : 2, dash: name === "logits" ? "dot" : "solid" }, hovertemplate: "n = %{x:,}: %{y:.3s}<extra>%{fullData.name}</extra>" }));
    const marks = [[told.at, `n = ${exact(told.at)}`]];
    if (told.crossover !== null && told.crossover <= told.n.at(-1)) marks.push([told.crossover, `n* = ${exact(told.crossover)}`]);
    const shapes = marks.map(([x], i) => ({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color: i ? "#d55e00" : "#7f7f7f", width: 1.5, dash: "dash" } }));
    const left = marks.length > 1 && marks[0][0] > marks[1][0];
    const annotations = marks.map(([x, text], i) => ({ x: Math.log10(x), y: i ? 0.9 : 1, xref: "x", yref: "paper", text, showarrow: false,
      xanchor: (i === 1) === left ? "right" : "left", xshift: (i === 1) === left ? -4 : 4, font: i ? { color: "#d55e00" } : {} }));
    if (marks.length > 1) {
      const total = at(told, "total", told.crossover) / 2;
      traces.push({ x: [told.crossover], y: [total], mode: "markers", marker: { color: "#d55e00", size: 9 }, showlegend: false, hovertemplate: `${marks[1][1]}<extra></extra>` });
    }
    traces.push({ x: [told.at], y: [at(told, "total", told.at)], mode: "markers", marker: { color: "#7f7f7f", size: 9 }, showlegend: false, hovertemplate: `${marks[0][1]}: %{y:.3s}<extra></extra>` });
    clear = await plot(box, traces, {
      height: 340, shapes, annotations, xaxis: { type: "log", title: { text: "tokens n" }, dtick: 1, exponentformat: "power" },
      yaxis: { type: "log", title: { text: told.unit === "FLOPs" ? "FLOPs" : "seconds" }, exponentformat: told.unit === "FLOPs" ? "SI" : "power" },
      margin: { l: 56, r: 14, t: 14, b: 44 }, legend: { orientation: "h", y: -0.22 },
    });
  };
  panel.leave = () => clear?.();
  return panel;
}

// A line between its points, as the axes draw it: straight in logarithms.
function at(told, name, n) {
  const ys = told.lines[name];
  const i = Math.max(1, told.n.findIndex((x) => x >= n));
  const share = Math.log(n / told.n[i - 1]) / Math.log(told.n[i] / told.n[i - 1]);
  return Math.exp(Math.log(ys[i - 1]) * (1 - share) + Math.log(ys[i]) * share);
}
