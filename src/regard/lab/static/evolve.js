// The Evolve page: a training run, step by step. One slider selects the step of everything that is shown.
import { get, post } from "./api.js";
import { showClosed } from "./closed_item.js";
import { HEAD_TYPE_COLOURS } from "./colour.js";
import { debounce, element, onPlainClick, showMessage } from "./dom.js";
import { RunData } from "./evolve/run_data.js";
import { createRunView } from "./evolve/run_view.js";
import { createStepSlider } from "./evolve/step_slider.js";
import { createTrainForm } from "./evolve/train_form.js";
import { createTrainingStatus } from "./evolve/training_status.js";
import { onTheme } from "./theme.js";

// What the list of runs says about a run that has not ended.
const STATE_NOTES = {
  training: "training", growing: "training", waiting: "waiting", stopped: "stopped", unstarted: "never started", failed: "failed",
};
const NO_RUNS = "No run is open yet. Train a small model here, and see how its heads learn.";

// The address fields that open the model of a run on the Look page: with the run's recording, or with the input form
// if there is none.
function lookFields({ model, recording }) {
  if (recording) return { page: "look", recording };
  return { page: "look", model: model ?? "", input: 1 };
}

export async function open(root, state) {
  const runList = element("select", { id: "evolve-run", on: { change: () => openRun(runList.value) } });
  const facts = element("p", { className: "facts" });
  const lookLink = element("a", { className: "look-at", text: "inspect this model", hidden: true });
  const trainButton = element("button", { type: "button", text: "train a model", "aria-expanded": "false" });
  const closeButton = element("button", { type: "button", className: "quiet", text: "close", hidden: true });
  const runField = element("div", { className: "field" }, element("label", { for: runList.id, text: "run" }), runList);
  const selection = {
    data: null, record: 0, head: 0, valueName: "entropy", content: "map", headFilter: "all", linearSteps: false,
    colourBy: "", // a head type whose confidence colours the heads; "": the most confident type
  };
  const form = createTrainForm(async (run) => {
    trainButton.setAttribute("aria-expanded", "false");
    await loadRuns();
    await openRun(run);
  });
  const status = createTrainingStatus(updateRun);
  const slider = createStepSlider(selectRecord);
  const view = createRunView({ selectRecord, change });
  const setAddressLater = debounce((fields) => state.set(fields), 200);
  let openCount = 0; // grows with each openRun, so that one that waits for data can see that a later one has started
  let followsEnd = true; // whether new records of a run that trains are selected

  trainButton.addEventListener("click", async () => {
    try {
      trainButton.setAttribute("aria-expanded", String(await form.toggle()));
    } catch (error) {
      showMessage(error.message, "error");
    }
  });

  closeButton.addEventListener("click", async () => {
    try {
      const { undo } = await post("/api/evolve/close", { run: selection.data.id });
      await showFirstRun();
      if (undo) {
        showClosed("run", undo, async (run) => {
          await loadRuns();
          await openRun(run);
        });
      }
    } catch (error) {
      showMessage(error.message, "error");
    }
  });

  function selectRecord(record, head = null) {
    const { data } = selection;
    if (!data?.steps.length) return;
    const last = data.steps.length - 1;
    selection.record = Math.max(0, Math.min(record, last));
    followsEnd = selection.record === last;
    if (head !== null) selection.head = head;
    slider.show(data.steps, selection.record);
    view.drawSelected(selection, head !== null);
    const step = followsEnd ? null : data.steps[selection.record];
    setAddressLater({ step, head: selection.head || null });
  }

  function change(values) {
    Object.assign(selection, values);
    state.set({
      value: selection.valueName === "entropy" ? null : selection.valueName,
      which: selection.headFilter === "all" ? null : selection.headFilter,
      colour: selection.colourBy || null,
      time: selection.linearSteps ? "even" : null,
      of: values.content ?? state.get("of"),
    });
    view.draw(selection);
  }

  async function loadRuns() {
    const { runs } = await get("/api/evolve/runs");
    runList.replaceChildren();
    for (const run of runs) {
      const note = STATE_NOTES[run.state];
      const text = note ? `${run.title} (${note})` : run.title;
      runList.append(element("option", { value: run.id, text }));
    }
    runList.disabled = !runs.length;
    return runs;
  }

  async function openRun(id) {
    openCount += 1;
    const thisOpen = openCount;
    slider.pause();
    status.end();
    const data = new RunData(id);
    try {
      await data.update();
    } catch (error) {
      if (thisOpen === openCount) showMessage(error.message, "error");
      return;
    }
    if (thisOpen !== openCount) return;
    const isFirst = selection.data === null; // the address describes the first run that is shown
    runList.value = id;
    selection.data = data;
    selection.content = data.run.on_grid && state.get("of", "profile") !== "map" ? "profile" : "map";

    const names = data.measures.flatMap((group) => group.measures.map((measure) => measure.name));
    if (isFirst) selection.valueName = state.get("value", "entropy");
    if (names.length && !names.includes(selection.valueName)) selection.valueName = "entropy";

    let step = null;
    selection.head = 0;
    if (isFirst) {
      selection.headFilter = state.get("which", "all");
      const type = state.get("colour", "");
      selection.colourBy = Object.hasOwn(HEAD_TYPE_COLOURS, type) ? type : "";
      selection.linearSteps = state.get("time") === "even";
      selection.head = Math.max(0, Math.min(state.number("head", 0), data.heads.length - 1));
      step = state.number("step", null);
    }
    followsEnd = step === null;
    if (followsEnd) selection.record = data.steps.length - 1;
    else selection.record = Math.max(0, data.steps.findLastIndex((recorded) => recorded <= step));
    state.set({ run: id, step, head: selection.head || null });
    slider.show(data.steps, selection.record);
    showFacts();
    view.draw(selection);
    status.follow(data.run);
  }

  // Show the run of an id, or else the first one; the form if there is none.
  async function showFirstRun(id = null) {
    const runs = await loadRuns();
    if (runs.length) {
      await openRun((runs.find((run) => run.id === id) ?? runs[0]).id);
      return;
    }
    selection.data = null;
    facts.textContent = "";
    closeButton.hidden = true;
    lookLink.hidden = true;
    slider.show([], 0);
    view.showEmpty(NO_RUNS);
    if (form.box.hidden) trainButton.click();
  }

  // Load what is new of the shown run. Returns its new description.
  async function updateRun() {
    const { data } = selection;
    const oldState = data.run.state;
    const hasNews = await data.update();
    if (selection.data !== data) return data.run;
    if (hasNews) {
      if (followsEnd) selection.record = Math.max(0, data.steps.length - 1);
      const prefersOffsets = data.run.on_grid && state.get("of") !== "map";
      if (prefersOffsets && selection.content === "map") selection.content = "profile";
      slider.show(data.steps, selection.record);
      view.draw(selection);
    }
    showFacts();
    if (oldState !== data.run.state) {
      await loadRuns();
      runList.value = data.id;
    }
    return data.run;
  }

  function showFacts() {
    const { run, heads } = selection.data;
    facts.textContent = "";
    if (heads.length) {
      facts.textContent = `${heads.length} heads, ${run.records}`;
      const best = run.result?.best;
      const name = run.score ?? "loss";
      if (best) {
        facts.textContent += ` · held-out ${name} ${best.scores[name]?.toFixed(3)} at step ${best.step.toLocaleString("en")}`;
      }
      if (typeof run.model_step === "number") {
        facts.textContent += ` · the model has the weights of step ${run.model_step.toLocaleString("en")}`;
      }
    }
    closeButton.hidden = !run.made || run.state === "training" || run.state === "waiting";
    closeButton.title = "close this run; Undo brings it back";
    lookLink.hidden = !run.model;
    lookLink.href = `?${new URLSearchParams(lookFields(run))}`;
  }

  onPlainClick(lookLink, () => state.leaveFor(lookFields(selection.data.run)));

  // Arrow keys change the step, unless the focused control uses them.
  function handleKey(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !selection.data) return;
    if (event.target.closest?.("input, select, textarea, [role=group]")) return;
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    selectRecord(selection.record + step);
  }

  const top = element("div", { className: "bar top" }, runField, closeButton, facts, lookLink, trainButton);
  root.append(top, form.box, status.box, slider.box, view.box);
  addEventListener("keydown", handleKey);
  const stopTheme = onTheme(() => {
    if (selection.data) view.draw(selection);
  });
  const stopListening = state.onChange(() => openRun(state.get("run") || runList.value));
  try {
    await showFirstRun(state.get("run"));
  } catch (error) {
    showMessage(error.message, "error");
  }
  return () => {
    openCount += 1;
    removeEventListener("keydown", handleKey);
    slider.pause();
    status.end();
    view.stop();
    stopTheme();
    stopListening();
  };
}
