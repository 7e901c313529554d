// The scrubber: which recorded step is looked at; and playing them one after the other.
import { element } from "../dom.js";

const FRAME = 220; // milliseconds

export function scrubber(jump) {
  const play = element("button", { type: "button", className: "play", "aria-label": "play", text: "▶", on: { click: () => (timer ? pause() : start()) } });
  const range = element("input", { id: "evolve-step", type: "range", min: 0, max: 0, step: 1, value: 0 });
  const label = element("label", { for: range.id, text: "step" });
  const out = element("output", { for: range.id });
  const box = element("div", { className: "panel scrubber" }, play, label, range, out);
  let [timer, many] = [0, 0];

  range.addEventListener("input", () => { pause(); jump(Number(range.value)); });

  function start() {
    if (many < 2) return;
    play.textContent = "❚❚";
    play.setAttribute("aria-label", "pause");
    if (Number(range.value) === many - 1) jump(0);
    timer = setInterval(() => {
      const next = Number(range.value) + 1;
      if (next < many) jump(next);
      if (next >= many - 1) pause();
    }, FRAME);
  }

  function pause() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶";
    play.setAttribute("aria-label", "play");
  }

  return {
    box,
    pause,
    put(steps, at) {
      many = steps.length;
      box.hidden = !many;
      range.max = Math.max(0, many - 1);
      range.value = at;
      const step = steps[at] ?? 0;
      out.textContent = `${step.toLocaleString("en")}`;
      out.title = `record ${at + 1} of ${many}`;
      range.setAttribute("aria-valuetext", `step ${step}, record ${at + 1} of ${many}`);
      play.disabled = many < 2;
    },
  };
}
