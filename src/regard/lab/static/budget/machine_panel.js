// The panel that selects a machine: none, one with published figures, or this machine, which a job measures.
import { cancelJob, followJob, get, post } from "../api.js";
import { element, select, showMessage } from "../dom.js";
import { DTYPES, GIB, memoryLimit, selectedMachine } from "./model_settings.js";
import { formatBytes, formatCount } from "./units.js";

// `page.change(call, live)` changes the settings; `live` names an input that is being typed in.
export function createMachinePanel(page) {
  const { options } = page;
  let runningJob = null;
  let isCancelled = false; // a click on "cancel" may come before the lab has told which job it started
  const names = [["", "none: counts only"], ["this", "this machine"]];
  for (const { name } of options.machines) names.push([name, name]);
  const list = select("machine", names, page.settings.machine ?? "", (name) => selectMachine(name || null));
  const memoryInput = element("input", {
    id: "memory-limit", type: "number", min: 0.1, max: 2 ** 20, step: "any", inputmode: "decimal",
  });
  const memory = element("div", { className: "field" },
    element("label", { for: "memory-limit", text: "memory, GiB" }), memoryInput);
  memoryInput.addEventListener("input", () => {
    if (memoryInput.value !== "" && memoryLimit(memoryInput.value) === null) return; // the browser marks it as invalid
    page.change((settings) => { settings.memory_limit = memoryLimit(memoryInput.value); }, memoryInput.id);
  });
  const about = element("p", { className: "quiet about" });
  const measureButton = element("button", { type: "button", className: "main" });
  measureButton.addEventListener("click", () => measure(options.this !== null));
  const bar = element("progress", { max: 1, value: 0, "aria-label": "progress of the measurement" });
  const cancelButton = element("button", { type: "button", text: "cancel", on: { click: cancel } });
  const progress = element("div", { className: "bar", hidden: true }, bar, cancelButton);
  const box = element("div", { className: "machine" }, list, memory, about, measureButton, progress);

  // If the machine does not have the selected data type, select one that it has.
  function selectMachine(name) {
    page.change((settings) => {
      settings.machine = name;
      const dtypes = selectedMachine(settings, options)?.dtypes;
      if (dtypes && !dtypes.includes(settings.dtype)) settings.dtype = DTYPES.find((dtype) => dtypes.includes(dtype));
    });
    show();
  }

  function cancel() {
    isCancelled = true;
    if (runningJob) cancelJob(runningJob).catch((error) => showMessage(error.message, "error"));
  }

  async function measure(again) {
    isCancelled = false;
    progress.hidden = false;
    measureButton.hidden = true;
    try {
      runningJob = await post("/api/budget/measure", { again });
      if (isCancelled) cancel();
      show();
      await followJob(runningJob, (job) => {
        if (job.of) bar.value = job.done / job.of;
        else bar.removeAttribute("value");
      }, page.signal);
      options.this = (await get("/api/budget", {}, page.signal)).this;
      page.change(() => {}); // times can be computed now
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (!error.cancelled) showMessage(error.message, "error");
    }
    runningJob = null;
    show();
  }

  function show() {
    const { settings } = page;
    const machine = selectedMachine(settings, options);
    const isThisMachine = settings.machine === "this";
    list.querySelector("select").value = settings.machine ?? "";
    const available = machine ? String(Number((machine.memory / GIB).toPrecision(4))) : "none";
    memoryInput.placeholder = available;
    if (document.activeElement !== memoryInput) {
      memoryInput.value = settings.memory_limit === null ? "" : settings.memory_limit / GIB;
    }
    progress.hidden = runningJob === null;
    measureButton.hidden = !isThisMachine || runningJob !== null;
    measureButton.textContent = machine ? "measure again" : "measure (5 s)";
    measureButton.className = machine ? "quiet" : "main";
    if (runningJob) about.textContent = "Measuring matrix products, attention, bandwidth and the cost of a call.";
    else if (machine) about.textContent = machineText(machine, settings.dtype);
    else if (isThisMachine) about.textContent = "This machine has not been measured yet. Measure it to see times.";
    else about.textContent = "Select a machine to see times, or enter a memory size to see what fits.";
  }

  show();
  return { box, show, leave: cancel };
}

// The figures that the times are computed with: the peak is that of the data type in use.
function machineText(machine, selected) {
  const dtype = machine.dtypes.includes(selected) ? selected : DTYPES.find((name) => machine.dtypes.includes(name));
  const rate = `${formatCount(machine.peak[dtype])}FLOP/s in ${dtype}`;
  const figures = `${rate}, ${formatCount(machine.bandwidth)}B/s, ${formatBytes(machine.memory)}`;
  if (machine.measured) return `${machine.name}: ${figures}; ${machine.measurement}.`;
  return `${figures}; published peaks: times are lower bounds.`;
}
