// How far attention is off the convolution, against α, beside the bound; asked for in small pieces, once a setting.
import { post } from "../api.js";
import { element } from "../dom.js";
import { plot } from "../plot.js";

export const ALPHAS = [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16, 22, 32];
const PIECE = 3;

export function chart() {
  const box = element("div", { className: "chart", role: "img", "aria-label": "largest difference against α" });
  const panel = element("section", { className: "panel" }, element("h2", { text: "Difference against α" }), box);
  let clear = null;
  let drawn = "";
  let asking = null;
  let told = null;
  let alpha = null;

  async function draw() {
    if (!told?.alphas.length) return;
    const positive = (ys) => ys.map((y) => (y > 0 ? y : null));
    const now = alpha ?? null;
    const shapes = now === null ? [] : [{ type: "line", x0: now, x1: now, y0: 0, y1: 1, yref: "paper", line: { color: "#7f7f7f", dash: "dash", width: 1.5 } }];
    clear = await plot(box, [
      { x: told.alphas, y: positive(told.bounds), name: "bound", mode: "lines", line: { dash: "dot", color: "#7f7f7f" }, hovertemplate: "α = %{x}: at most %{y:.2e}<extra></extra>" },
      { x: told.alphas, y: positive(told.errors), name: "largest difference", mode: "lines+markers", line: { color: "#d55e00" }, hovertemplate: "α = %{x}: %{y:.2e}<extra></extra>" },
    ], { height: 300, shapes, margin: { l: 62, r: 14, t: 10, b: 44 }, legend: { orientation: "h", y: -0.24 },
      xaxis: { type: "log", title: { text: "α (∞: no difference at all)" }, tickvals: [0.25, 0.5, 1, 2, 4, 8, 16, 32], range: [Math.log10(0.22), Math.log10(36)] },
      yaxis: { type: "log", title: { text: "difference" }, exponentformat: "power", nticks: 7 } });
  }

  // `setting`: everything but α.
  panel.show = async (setting, at) => {
    alpha = at;
    const key = JSON.stringify(setting);
    if (key === drawn) return draw();
    drawn = key;
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    told = { alphas: [], errors: [], bounds: [] };
    panel.removeAttribute("data-done");
    try {
      for (let i = 0; i < ALPHAS.length; i += PIECE) {
        const piece = await post("/api/convolution/errors", { ...setting, alphas: ALPHAS.slice(i, i + PIECE) }, signal);
        for (const name of Object.keys(told)) told[name].push(...piece[name]);
        await draw();
      }
      panel.dataset.done = "yes";
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
    return undefined;
  };
  panel.leave = () => { asking?.abort(); clear?.(); };
  return panel;
}
