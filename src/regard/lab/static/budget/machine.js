// The machine: none, one by its published figures, or this one, which a job measures once.
import { cancel, followed, get, post } from "../api.js";
import { element, note, select } from "../dom.js";
import { machineOf } from "./form.js";
import { bytes, counted } from "./units.js";

const DTYPES = ["float32", "bfloat16", "float16", "float64"];

// `given.set(change)` changes what is asked about.
export function machine(given) {
  const { start } = given;
  let running = null;
  const names = [["", "none: count only"], ["this", "this machine"], ...start.machines.map((one) => [one.name, one.name])];
  const picked = select("machine", names, given.now.machine ?? "", (name) => choose(name || null));
  const about = element("p", { className: "quiet about" });
  const measure = element("button", { type: "button", className: "main", on: { click: () => run(start.this !== null) } });
  const bar = element("progress", { max: 1, value: 0, "aria-label": "measuring" });
  const stop = element("button", { type: "button", text: "cancel", on: { click: () => running && cancel(running) } });
  const work = element("div", { className: "bar", hidden: true }, bar, stop);
  const box = element("div", { className: "machine" }, picked, about, measure, work);

  function choose(name) {
    given.set((now) => {
      now.machine = name;
      const known = machineOf(given)?.dtypes;
      if (known && !known.includes(now.dtype)) now.dtype = DTYPES.find((x) => known.includes(x));
    });
    show();
  }

  async function run(again) {
    work.hidden = false;
    measure.hidden = true;
    try {
      running = await post("/api/budget/measure", { again });
      show();
      await followed(running, (job) => { if (job.of) bar.value = job.done / job.of; else bar.removeAttribute("value"); }, given.signal);
      start.this = (await get("/api/budget", {}, given.signal)).this;
      given.set(() => {});
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!error.cancelled) note(error.message, "error");
    }
    running = null;
    show();
  }

  function show() {
    const { now } = given;
    picked.querySelector("select").value = now.machine ?? "";
    const one = machineOf(given);
    const mine = now.machine === "this";
    work.hidden = running === null;
    measure.hidden = !mine || running !== null;
    measure.textContent = one ? "measure again" : "measure it (5 s)";
    measure.className = one ? "quiet" : "main";
    about.textContent = running ? "Measuring: matrix products, attention, bandwidth, what a call costs."
      : one ? said(one) : mine ? "Not measured yet: times need its figures." : "Times by part, and what fits, need a machine.";
  }
  show();
  return { box, show, leave: () => running && cancel(running) };
}

function said(one) {
  const dtype = DTYPES.find((x) => one.dtypes.includes(x));
  const source = one.measured ? `measured ${one.measured.slice(0, 10)}` : "published peaks: times are bounds";
  const name = one.measured ? `${one.name}: ` : "";
  return `${name}${counted(one.peak[dtype])}FLOP/s in ${dtype}, ${counted(one.bandwidth)}B/s, ${bytes(one.memory)}; ${source}.`;
}
