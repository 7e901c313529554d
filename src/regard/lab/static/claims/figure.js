// The figures of a check: lines with their intervals. Behind them, thin lines show the recorded parameters.
import { element } from "../dom.js";
import { plot, SERIES } from "../plot.js";

const DASHES = ["solid", "dash", "dot", "dashdot"];
const FEW_POINTS = 14; // lines with at most this many points get markers

// The boxes in `root` are reused, one per figure, so that a chart moves instead of being drawn anew.
// `result` has the series and their labels as HTML with subscripts; `recorded` are the series that are drawn behind.
export async function figures(root, result, recorded) {
  const seriesList = result.series;
  const html = (text) => result.typeset[text] ?? text;
  while (root.children.length > seriesList.length) {
    root.lastChild.stopDrawing?.();
    root.lastChild.remove();
  }
  while (root.children.length < seriesList.length) root.append(element("figure", { className: "chart" }));
  await Promise.all(seriesList.map((series, index) => {
    const before = recorded?.find((one) => one.title === series.title) ?? recorded?.[index];
    return draw(root.children[index], series, before, html);
  }));
}

function draw(box, series, before, html) {
  const traces = [];
  Object.entries(series.lines).forEach(([name, [x, y, low, high]], index) => {
    const colour = SERIES[index % SERIES.length];
    if (before?.lines[name]) traces.push(recordedLine(before.lines[name], colour, !traces.length));
    if (low && high) traces.push(interval(x, low, high, colour, name));
    let mode = "lines";
    if (y.length < 2) mode = "markers";
    else if (y.length <= FEW_POINTS) mode = "lines+markers";
    traces.push({
      x, y, name: html(name), legendgroup: name, type: "scatter", mode,
      line: { color: colour, width: 2, dash: DASHES[Math.floor(index / SERIES.length) % DASHES.length] },
      marker: { color: colour, size: y.length < 2 ? 8 : 5 },
      hovertemplate: "%{y:.4g} at %{x:.4g}",
    });
  });
  const axis = (title, letter) => {
    const options = { title: { text: title, standoff: 8 }, exponentformat: "power" };
    if (series.log.includes(letter)) Object.assign(options, logarithmicAxis(traces, letter));
    return options;
  };
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", `${series.title}: ${series.y} against ${series.x}`);
  return plot(box, traces, {
    title: { text: wrap(html(series.title), box.clientWidth), font: { size: 13 }, x: 0.01, xanchor: "left" },
    xaxis: axis(html(series.x), "x"), yaxis: axis(html(series.y), "y"), height: 340,
    margin: { l: 56, r: 14, t: 46, b: 44 }, legend: { orientation: "h", y: -0.24 }, hovermode: "closest",
  });
}

// Ticks at powers of ten, or at 1, 2 and 5 times a power if the range is short. Plotly's own labels are hard to read.
function logarithmicAxis(traces, letter) {
  const values = traces.flatMap((trace) => trace[letter]).filter((value) => value > 0);
  if (!values.length) return { type: "log" };
  const low = Math.log10(Math.min(...values));
  const high = Math.log10(Math.max(...values));
  const first = Math.floor(low);
  const last = Math.ceil(high);
  const step = Math.max(1, Math.ceil((last - first) / 7));
  const asPowers = first < -3 || last > 5;
  const tickvals = [];
  const ticktext = [];
  for (let exponent = first; exponent <= last; exponent++) {
    let digits = exponent % step === 0 ? [1] : [];
    if (high - low < 2.2) digits = [1, 2, 5];
    for (const digit of digits) {
      tickvals.push(digit * 10 ** exponent);
      ticktext.push(tickLabel(digit, exponent, asPowers));
    }
  }
  return { type: "log", tickvals, ticktext };
}

function tickLabel(digit, exponent, asPower) {
  const value = digit * 10 ** exponent;
  if (!asPower) return exponent < 0 ? value.toFixed(-exponent) : value.toLocaleString("en");
  const factor = digit === 1 ? "" : `${digit}·`;
  return `${factor}10<sup>${String(exponent).replace("-", "−")}</sup>`;
}

// Break a title, HTML with subscripts, into lines as wide as the box; Plotly does not break lines itself.
function wrap(text, width) {
  const longest = Math.max(30, Math.floor(width / 7));
  const lines = [""];
  for (const word of text.split(" ")) {
    const line = lines.at(-1);
    if (line && visibleLength(line) + visibleLength(word) + 1 > longest) lines.push(word);
    else lines[lines.length - 1] = line ? `${line} ${word}` : word;
  }
  return lines.join("<br>");
}

function visibleLength(html) {
  return html.replace(/<[^>]*>/g, "").length;
}

// A dotted line for the recorded parameters. One entry of the legend stands for all of them.
function recordedLine([x, y], colour, inLegend) {
  return {
    x, y, type: "scatter", mode: y.length < 2 ? "markers" : "lines", hoverinfo: "skip", opacity: 0.8,
    name: "dotted: with the recorded parameters", legendgroup: "recorded", showlegend: inLegend,
    line: { color: colour, width: 1.5, dash: "dot" }, marker: { color: colour, size: 5, symbol: "circle-open" },
  };
}

function interval(x, low, high, colour, name) {
  return {
    x: [...x, ...[...x].reverse()], y: [...high, ...[...low].reverse()], type: "scatter", mode: "lines", fill: "toself",
    fillcolor: `${colour}30`, line: { width: 0 }, showlegend: false, hoverinfo: "skip", legendgroup: name,
  };
}
