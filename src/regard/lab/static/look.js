// The Look page: all heads of a recording, the map of one of them, and the computation of a single weight.
import { followJob, get, post } from "./api.js";
import { element, showMessage } from "./dom.js";
import { createAblation } from "./look/ablation.js";
import { loadDescription } from "./look/recording_cache.js";
import { createHeadBar } from "./look/head_toolbar.js";
import { createHeadDetails } from "./look/head_details.js";
import { createHeadGrid, defaultHead } from "./look/head_grid.js";
import { createHeadNumbersLoader } from "./look/head_numbers.js";
import { createInputForm } from "./look/input_form.js";
import { createMapPanel } from "./look/map_panel.js";
import { createScoreSettings } from "./look/score_settings.js";
import { createTextPanel } from "./look/text_panel.js";
import { createView, wholeMap } from "./look/view_state.js";
import { createWeightLoader } from "./look/selected_weights.js";
import { createWeightSteps } from "./look/weight_steps.js";

// Head types by model. Other recordings of the model, loaded before its types were known, get them from here.
const typesByModel = new Map();

function section(className, label) {
  return element("section", { className, "aria-label": label });
}

function hasHead(description, id) {
  const [layerIndex, head] = id.split(".").map(Number);
  return description.places.some((layer) => layer.place === layerIndex && layer.heads.includes(head));
}

export async function open(root, state) {
  const input = section("input", "input and recordings");
  const grid = section("panel overview", "all heads");
  const ablation = section("panel ablate", "ablation");
  const headBar = section("head-line", "selected head");
  const scores = section("panel scores bar", "score settings");
  const maps = section("map-part", "map of weights");
  const steps = section("panel why", "computation of the weight");
  const text = section("panel reading", "weights on the text");
  const details = section("details", "details of the head");
  const typeProgress = element("p", { className: "quiet naming", role: "status", hidden: true });
  // The text stands beside the map, so that the computation of a weight, below them, is visible at the same time.
  const left = element("div", { className: "left" }, input, grid, ablation);
  const around = element("div", { className: "around" }, text, maps);
  const more = element("div", { className: "more" }, steps, details);
  const right = element("div", { className: "right" }, headBar, around, scores, more);
  const body = element("div", { className: "body" }, left, right);
  root.append(body);
  const recordingParts = [grid, ablation, right]; // shown only if there is a recording
  showParts(false);

  function showParts(hasRecording) {
    for (const part of recordingParts) part.hidden = !hasRecording;
  }

  const view = createView(state);
  const control = new AbortController(); // aborted when the page is left
  view.signal = control.signal;
  view.workspace = { models: [], recordings: [], runs: [] };

  async function reloadWorkspace() {
    view.change({ workspace: await get("/api/workspace", {}, control.signal) });
  }

  // If the recording in the address is not open, select the newest one. If the address has none, its head is kept.
  function ensureRecording() {
    const { recordings } = view.workspace;
    if (recordings.some((recording) => recording.id === view.recording)) return;
    // An address that names only a model shows its newest recording, or the input form if it has none.
    const isForModel = view.model && !view.recording;
    const candidates = isForModel ? recordings.filter((recording) => recording.model === view.model) : recordings;
    const newest = { recording: candidates.at(-1)?.id ?? "" };
    if (view.recording) {
      showMessage("This recording is not open any more.");
      newest.layerIndex = null;
      newest.head = null;
    }
    view.change(newest);
  }

  async function showRecording() {
    // The tour, or another window, may have made the recording after the list was loaded.
    const isListed = view.workspace.recordings.some((recording) => recording.id === view.recording);
    if (view.recording && !isListed) await reloadWorkspace().catch(() => {});
    ensureRecording();
    const { recording } = view;
    if (!recording) {
      showParts(false);
      view.change({ description: null, inputOpen: true });
      return;
    }
    try {
      const description = await loadDescription(recording, control.signal);
      if (view.recording !== recording) return; // another recording was selected meanwhile
      showParts(true);
      const changes = { description, hover: null, ablated: view.ablated.filter((id) => hasHead(description, id)) };
      if (!hasHead(description, `${view.layerIndex}.${view.head}`)) Object.assign(changes, defaultHead(description));
      view.change(changes);
      findHeadTypes(description);
    } catch (error) {
      if (error.name !== "AbortError") showMessage(error.message, "error");
    }
  }

  // Finding the head types takes a while, so the heads are shown before their types are known.
  async function findHeadTypes(description) {
    const { model } = description;
    if (!description.kinds && typesByModel.has(model)) Object.assign(description, typesByModel.get(model));
    if (description.kinds || !model || description.findingTypes) {
      view.change({ headTypes: description.kinds });
      return;
    }
    description.findingTypes = true;
    typeProgress.hidden = false;
    try {
      const job = await post("/api/look/kinds", { model }, control.signal);
      const types = await followJob(job, (current) => {
        const percent = current.of ? `${Math.round((100 * current.done) / current.of)} %` : "";
        typeProgress.textContent = `finding head types on probes … ${percent}`;
      }, control.signal); // kinds, kind_source and kind_counts
      typesByModel.set(model, types);
      Object.assign(description, types);
      if (view.description === description) view.change({ headTypes: types.kinds });
    } catch (error) {
      if (error.name !== "AbortError" && !error.cancelled) {
        showMessage(`The head types could not be found: ${error.message}`, "error");
      }
    }
    description.findingTypes = false;
    typeProgress.hidden = true;
  }

  function handleEscape(event) {
    const isTyping = event.target.closest?.("input, textarea, select, details[open]");
    if (event.key === "Escape" && !isTyping) view.lock?.(null);
  }

  await reloadWorkspace().catch((error) => showMessage(error.message, "error"));
  let lastRecording = view.recording;
  view.on("recording", () => {
    // Another text has other tokens, so nothing is locked in it. The recording that is shown first keeps the locked cell
    // of the address, even if the address does not name the recording.
    if (lastRecording && !view.reloading) view.change({ row: null, key: null, weights: null, window: wholeMap() });
    lastRecording = view.recording;
    showRecording();
  });
  createInputForm(input, view, reloadWorkspace);
  const mapPanel = createMapPanel(maps, view);
  const closeGrid = createHeadGrid(grid, view);
  grid.append(typeProgress);
  const closeHeadBar = createHeadBar(headBar, view, mapPanel.map);
  createScoreSettings(scores, view);
  const closeSteps = createWeightSteps(steps, view);
  const closeText = createTextPanel(text, view);
  const closeDetails = createHeadDetails(details, view);
  const closeLoader = createWeightLoader(view);
  const closeNumbers = createHeadNumbersLoader(view);
  createAblation(ablation, view);
  document.addEventListener("keydown", handleEscape);
  const stopListening = state.onChange(() => view.reload());
  await showRecording();
  return () => {
    control.abort();
    view.close();
    mapPanel.close();
    closeGrid();
    closeHeadBar();
    closeSteps();
    closeText();
    closeDetails();
    closeLoader();
    closeNumbers();
    stopListening();
    document.removeEventListener("keydown", handleEscape);
  };
}
