// A figure of a check: its lines with their intervals; and behind them, thin, those of the recorded numbers.
import { element } from "../dom.js";
import { plot, SERIES } from "../plot.js";

const DASHES = ["solid", "dash", "dot", "dashdot"];

// `boxes` are kept by the caller, one a figure, so that a chart moves and is not made anew.
export async function figures(root, shown, recorded) {
  while (root.children.length > shown.length) {
    root.lastChild.drawn?.();
    root.lastChild.remove();
  }
  while (root.children.length < shown.length) root.append(element("figure", { className: "chart" }));
  await Promise.all(shown.map((series, k) => drawn(root.children[k], series, recorded?.find((one) => one.title === series.title) ?? recorded?.[k])));
}

function drawn(box, series, before) {
  const traces = [];
  Object.entries(series.lines).forEach(([name, line], k) => {
    const colour = SERIES[k % SERIES.length];
    const [x, y, low, high] = line;
    if (before?.lines[name]) traces.push(ghost(before.lines[name], colour));
    if (low && high) traces.push(band(x, low, high, colour, name));
    const few = y.length < 2;
    traces.push({
      x, y, name, legendgroup: name, type: "scatter", mode: few ? "markers" : y.length <= 14 ? "lines+markers" : "lines",
      line: { color: colour, width: 2, dash: DASHES[Math.floor(k / SERIES.length) % DASHES.length] }, marker: { color: colour, size: few ? 8 : 5 },
      hovertemplate: "%{y:.4g} at %{x:.4g}",
    });
  });
  const axis = (title, letter) => ({ title: { text: title, standoff: 8 }, exponentformat: "power", ...(series.log.includes(letter) ? logarithmic(traces, letter) : {}) });
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${series.title}: ${series.y} against ${series.x}`);
  return plot(box, traces, {
    title: { text: wrapped(series.title, box.clientWidth), font: { size: 13 }, x: 0.01, xanchor: "left" },
    xaxis: axis(series.x, "x"), yaxis: axis(series.y, "y"), height: 340,
    margin: { l: 56, r: 14, t: 46, b: 44 }, legend: { orientation: "h", y: -0.24 }, hovermode: "closest",
  });
}

// Powers of ten, or 1, 2 and 5 of each where there are few; Plotly's own labels for such axes are hard to read.
function logarithmic(traces, letter) {
  const all = traces.flatMap((trace) => trace[letter]).filter((value) => value > 0);
  if (!all.length) return { type: "log" };
  const [low, high] = [Math.min(...all), Math.max(...all)].map(Math.log10);
  const [first, last] = [Math.floor(low), Math.ceil(high)];
  const every = Math.max(1, Math.ceil((last - first) / 7));
  const found = [];
  for (let k = first; k <= last; k++) {
    for (const d of high - low < 2.2 ? [1, 2, 5] : k % every === 0 ? [1] : []) found.push([d, k]);
  }
  return { type: "log", tickvals: found.map(([d, k]) => d * 10 ** k), ticktext: found.map(([d, k]) => power(d, k, first < -3 || last > 5)) };
}

function power(d, k, raised) {
  if (!raised) return k < 0 ? (d * 10 ** k).toFixed(-k) : (d * 10 ** k).toLocaleString("en");
  return `${d === 1 ? "" : `${d}·`}10<sup>${String(k).replace("-", "−")}</sup>`;
}

// As long as the box is wide; Plotly does not break lines itself.
function wrapped(text, width) {
  const most = Math.max(30, Math.floor(width / 7));
  const lines = [""];
  for (const word of text.split(" ")) {
    if (lines.at(-1) && lines.at(-1).length + word.length + 1 > most) lines.push(word);
    else lines[lines.length - 1] += (lines.at(-1) ? " " : "") + word;
  }
  return lines.map((line) => line.replace(/[<&]/g, (x) => (x === "<" ? "&lt;" : "&amp;"))).join("<br>");
}

function ghost([x, y], colour) {
  return {
    x, y, type: "scatter", mode: y.length < 2 ? "markers" : "lines", showlegend: false, hoverinfo: "skip", opacity: 0.45,
    line: { color: colour, width: 1, dash: "dot" }, marker: { color: colour, size: 5, symbol: "circle-open" },
  };
}

function band(x, low, high, colour, name) {
  return {
    x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], type: "scatter", mode: "lines", fill: "toself",
    fillcolor: `${colour}30`, line: { width: 0 }, showlegend: false, hoverinfo: "skip", legendgroup: name,
  };
}
