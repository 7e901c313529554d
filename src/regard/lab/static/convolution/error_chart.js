// The difference between attention and convolution against α, with its bound.
import { post } from "../api.js";
import { element } from "../dom.js";
import { plot } from "../plot.js";

export const ALPHAS = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16, 22, 32];
const ALPHAS_PER_REQUEST = 3; // so that the chart grows while the rest is computed

// A logarithmic axis cannot show 0.
const positive = (values) => values.map((value) => (value > 0 ? value : null));

export function createErrorChart() {
  const box = element("div", { className: "chart", role: "img", "aria-label": "largest difference against α" });
  const panel = element("section", { className: "panel" }, element("h2", { text: "Difference against α" }), box);
  let removeChart = null;
  let shownSettings = "";
  let request = null;
  let results = null;
  let selectedAlpha = null;

  async function draw() {
    if (!results?.alphas.length) return;
    const traces = [
      {
        x: results.alphas, y: positive(results.bounds), name: "bound", mode: "lines",
        line: { dash: "dot", color: "#7f7f7f" }, hovertemplate: "α = %{x}: at most %{y:.2e}<extra></extra>",
      },
      {
        x: results.alphas, y: positive(results.errors), name: "largest difference", mode: "lines+markers",
        line: { color: "#d55e00" }, hovertemplate: "α = %{x}: %{y:.2e}<extra></extra>",
      },
    ];
    const shapes = [];
    if (selectedAlpha !== null) {
      shapes.push({
        type: "line", x0: selectedAlpha, x1: selectedAlpha, y0: 0, y1: 1, yref: "paper",
        line: { color: "#7f7f7f", dash: "dash", width: 1.5 },
      });
    }
    removeChart = await plot(box, traces, {
      height: 300, shapes, margin: { l: 62, r: 14, t: 10, b: 44 }, legend: { orientation: "h", y: -0.24 },
      xaxis: {
        type: "log", title: { text: "α (∞: the difference is 0)" }, tickvals: [0.25, 0.5, 1, 2, 4, 8, 16, 32],
        range: [Math.log10(0.22), Math.log10(36)],
      },
      yaxis: { type: "log", title: { text: "difference" }, exponentformat: "power", nticks: 7 },
    });
  }

  // `settings` is everything but α. The differences are requested once per settings.
  panel.show = async (settings, alpha) => {
    selectedAlpha = alpha;
    const key = JSON.stringify(settings);
    if (key === shownSettings) {
      await draw();
      return;
    }
    shownSettings = key;
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    const collected = { alphas: [], errors: [], bounds: [] };
    results = collected;
    panel.removeAttribute("data-done");
    try {
      for (let i = 0; i < ALPHAS.length; i += ALPHAS_PER_REQUEST) {
        const alphas = ALPHAS.slice(i, i + ALPHAS_PER_REQUEST);
        const response = await post("/api/convolution/errors", { ...settings, alphas }, signal);
        for (const name of Object.keys(collected)) collected[name].push(...response[name]);
        await draw();
      }
      panel.dataset.done = "yes";
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  };
  panel.leave = () => {
    request?.abort();
    removeChart?.();
  };
  return panel;
}
