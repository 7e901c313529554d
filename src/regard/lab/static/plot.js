// Charts by Plotly, in the colours of the page. Plotly is loaded when the first chart is drawn.
import { isDark, onTheme } from "./theme.js";

let loading = null;

function loadPlotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = null; // so that the next chart tries again
      reject(new Error("the script for charts could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

export const SERIES = ["#1f77b4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b"];

function themedLayout(layout) {
  const ink = isDark() ? "#e7eaf0" : "#1a1d24";
  const lines = isDark() ? "#2b313d" : "#d9dde4";
  const axis = (options) => ({ gridcolor: lines, zerolinecolor: lines, linecolor: lines, automargin: true, ...options });
  const axes = {};
  for (const [name, options] of Object.entries(layout)) {
    if (/^[xy]axis/.test(name)) axes[name] = axis(options);
  }
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: SERIES,
    font: { color: ink, size: 12, family: "system-ui, sans-serif" }, margin: { l: 48, r: 12, t: 28, b: 40 },
    legend: { orientation: "h", y: -0.2 }, hoverlabel: { align: "left" },
    xaxis: axis({}), yaxis: axis({}), ...layout, ...axes,
  };
}

// Give the chart the width of its box. Plotly draws 700 pixels wide if the box has no width yet, for example because it is
// not on the page, and by itself it measures the box again only if the size of the window changes.
function keepFitting(box, Plotly) {
  const observer = new ResizeObserver(() => {
    const drawn = box._fullLayout?.width;
    if (drawn && box.clientWidth > 0 && drawn !== box.clientWidth) Plotly.Plots.resize(box);
  });
  observer.observe(box);
  return () => observer.disconnect();
}

// Draw into `box`, and again when the theme or the width of the box changes. A second call replaces the first chart.
// Returns a function that removes the chart.
export async function plot(box, traces, layout = {}) {
  const Plotly = await loadPlotly();
  box.stopDrawing?.();
  const options = { displaylogo: false, displayModeBar: false };
  const draw = () => Plotly.react(box, traces, themedLayout(layout), options);
  await draw();
  box.stopDrawing?.(); // of a call that began after this one and has drawn before it
  const stopTheme = onTheme(draw);
  const stopFitting = keepFitting(box, Plotly);
  box.stopDrawing = () => {
    stopTheme();
    stopFitting();
    box.stopDrawing = null;
  };
  return () => {
    box.stopDrawing?.();
    Plotly.purge(box);
  };
}
