// Charts by Plotly, which is loaded when the first is drawn, in the page's own colours.
import { isDark, onTheme } from "./theme.js";

let loading = null;

function loaded() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => {
      loading = null; // the next chart tries again
      reject(new Error("the charts' script could not be loaded"));
    };
    document.head.append(script);
  });
  return loading;
}

export const SERIES = ["#1f77b4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b"];

function dressed(layout) {
  const ink = isDark() ? "#e7eaf0" : "#1a1d24";
  const rule = isDark() ? "#2b313d" : "#d9dde4";
  const axis = (given) => ({ gridcolor: rule, zerolinecolor: rule, linecolor: rule, automargin: true, ...given });
  const axes = Object.fromEntries(
    Object.entries(layout).filter(([name]) => /^[xy]axis/.test(name)).map(([name, given]) => [name, axis(given)]),
  );
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", colorway: SERIES,
    font: { color: ink, size: 12, family: "system-ui, sans-serif" }, margin: { l: 48, r: 12, t: 28, b: 40 },
    legend: { orientation: "h", y: -0.2 }, hoverlabel: { align: "left" },
    xaxis: axis({}), yaxis: axis({}), ...layout, ...axes,
  };
}

// Draws into `box`, and again when the theme changes or it is called anew. Returns how to take it away.
export async function plot(box, traces, layout = {}) {
  const Plotly = await loaded();
  box.drawn?.();
  const options = { responsive: true, displaylogo: false, displayModeBar: false };
  const draw = () => Plotly.react(box, traces, dressed(layout), options);
  await draw();
  const stop = onTheme(draw);
  box.drawn = () => { stop(); box.drawn = null; };
  return () => { box.drawn?.(); Plotly.purge(box); };
}

// The chart as a file: "svg" or "png".
export async function picture(box, format) {
  const Plotly = await loaded();
  return (await fetch(await Plotly.toImage(box, { format, width: 900, height: 560 }))).blob();
}
