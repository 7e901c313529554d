// The slider over the recorded steps, and a button that plays them.
import { element } from "../dom.js";

const FRAME = 220; // ms per record

// `select(record)` is called with the index of a record.
export function createStepSlider(select) {
  const playButton = element("button", { type: "button", className: "play", "aria-label": "play", text: "▶" });
  const range = element("input", { id: "evolve-step", type: "range", min: 0, max: 0, step: 1, value: 0 });
  const label = element("label", { for: range.id, text: "step" });
  const output = element("output", { for: range.id });
  const box = element("div", { className: "panel scrubber" }, playButton, label, range, output);
  let timer = 0;
  let recordCount = 0;

  playButton.addEventListener("click", () => {
    if (timer) pause();
    else play();
  });
  range.addEventListener("input", () => {
    pause();
    select(Number(range.value));
  });

  function play() {
    if (recordCount < 2) return;
    playButton.textContent = "❚❚";
    playButton.setAttribute("aria-label", "pause");
    if (Number(range.value) === recordCount - 1) select(0);
    timer = setInterval(() => {
      const next = Number(range.value) + 1;
      if (next < recordCount) select(next);
      if (next >= recordCount - 1) pause();
    }, FRAME);
  }

  function pause() {
    clearInterval(timer);
    timer = 0;
    playButton.textContent = "▶";
    playButton.setAttribute("aria-label", "play");
  }

  function show(steps, record) {
    recordCount = steps.length;
    box.hidden = !recordCount;
    range.max = Math.max(0, recordCount - 1);
    range.value = record;
    const step = steps[record] ?? 0;
    const position = `record ${record + 1} of ${recordCount}`;
    output.textContent = step.toLocaleString("en");
    output.title = position;
    range.setAttribute("aria-valuetext", `step ${step}, ${position}`);
    playButton.disabled = recordCount < 2;
  }

  return { box, pause, show };
}
