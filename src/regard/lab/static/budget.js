// The Budget page: change the sizes of a model and see its parameters, FLOPs, memory and time.
import { get, post } from "./api.js";
import { createComparison } from "./budget/comparison_panel.js";
import { createConfigInput } from "./budget/config_input.js";
import { createCostChart } from "./budget/cost_chart.js";
import { createFormulaPanel } from "./budget/formula_panel.js";
import { createMachinePanel } from "./budget/machine_panel.js";
import { createModelForm } from "./budget/model_form.js";
import { addressFields, makeConsistent, modelTitle, requestBody, settingsFromAddress } from "./budget/model_settings.js";
import { bottleneckPanel, memoryPanel, partsPanel, theoryPanel, totalCards } from "./budget/result_panels.js";
import { debounce, element } from "./dom.js";

export async function open(root, state) {
  const control = new AbortController(); // aborted when the page is left
  const options = await get("/api/budget", {}, control.signal);
  // What the parts of the page share. `plan` is the last result; `sharedConfig` is the config in the address.
  const page = {
    options,
    settings: settingsFromAddress(state, options),
    plan: null,
    sharedConfig: state.get("config"),
    signal: control.signal,
    changed,
    change,
    loadConfig,
    unloadConfig,
  };
  let request = null;
  let liveInput = ""; // the input whose slider is being moved or whose number is being typed

  const errorText = element("p", { className: "error", role: "alert" });
  const totals = element("div", { className: "head" });
  const panels = element("div", { className: "stack" });
  const costChart = createCostChart();
  const formulas = createFormulaPanel();
  const comparison = createComparison(page, state);
  const results = element("div", { className: "results" }, comparison.panel, panels, costChart, formulas);
  const form = createModelForm(page);
  const machines = createMachinePanel(page);
  const config = createConfigInput(page);
  const computeLater = debounce(compute, 90);

  // Each change is a step of the back button. `live` names an input that is still being moved or typed in: all that happens
  // until it is released is one step.
  function changed(live = "") {
    request?.abort(); // its results would belong to the previous settings
    const fields = { ...addressFields(page.settings, options, page.sharedConfig), against: comparison.address() };
    const differs = Object.entries(fields).some(([name, value]) => state.get(name) !== String(value ?? ""));
    if (differs && (live === "" || live !== liveInput)) state.push(fields);
    else state.set(fields);
    liveInput = live;
    computeLater();
  }

  // Change the settings with `call(settings)`.
  function change(call, live = "") {
    call(page.settings);
    makeConsistent(page.settings, options);
    form.show();
    changed(live);
  }

  // Show what the address says, after the back or forward button.
  function restore() {
    request?.abort();
    page.settings = settingsFromAddress(state, options);
    page.sharedConfig = state.get("config");
    page.plan = null; // it belongs to other settings
    // An input does not change its own text while it is typed in.
    const focused = document.activeElement;
    focused?.blur();
    comparison.restore();
    form.show();
    machines.show();
    focused?.focus({ preventScroll: true });
    computeLater();
  }

  function loadConfig(text, sharedConfig) {
    page.sharedConfig = sharedConfig;
    page.plan = null; // it belongs to another model
    change((settings) => {
      settings.config = text;
      settings.tokens = null;
      settings.source = null;
    });
  }

  function unloadConfig() {
    change((settings) => {
      settings.config = null;
      settings.source = null;
    });
  }

  async function compute() {
    request?.abort();
    request = new AbortController();
    const { signal } = request;
    const body = requestBody(page.settings);
    if (body.machine === "this" && !options.this) delete body.machine; // it was not measured: only counts are known
    try {
      page.plan = await post("/api/budget/plan", body, signal);
      showPlan();
      const [, costs, formulaTexts] = await Promise.all([
        comparison.show(body, signal),
        post("/api/budget/costs", body, signal),
        post("/api/budget/formulas", body, signal),
      ]);
      formulas.show(formulaTexts);
      root.dataset.counted = JSON.stringify(body);
      await costChart.show(costs);
    } catch (error) {
      if (error.name !== "AbortError") showError(error);
    }
  }

  function showPlan() {
    const { plan, settings } = page;
    errorText.textContent = "";
    totals.classList.remove("old");
    results.classList.remove("old");
    totals.replaceChildren(totalCards(plan));
    panels.replaceChildren(bottleneckPanel(plan), partsPanel(plan), memoryPanel(plan));
    const theory = theoryPanel(plan);
    if (theory) panels.prepend(theory);
    form.show();
    machines.show();
    config.show(settings.config === null ? null : modelTitle(settings, options, plan));
  }

  // The results of the last valid sizes stay, but are marked as old.
  function showError(error) {
    errorText.textContent = error.message;
    totals.classList.add("old");
    results.classList.add("old");
    machines.show();
  }

  const modelPanel = element("div", { className: "panel" },
    form.kinds, element("div", { className: "bar first" }, form.preset), comparison.control, config.box, form.sizes, form.more);
  const runPanel = element("div", { className: "panel" }, form.run, machines.box, errorText);
  root.append(totals, element("div", { className: "controls" }, modelPanel, runPanel), results);
  form.show();
  const stopListening = state.onChange(restore);
  // A slider is released, or a number is complete.
  root.addEventListener("change", () => { liveInput = ""; }, { signal: control.signal });
  await compute();
  return () => {
    control.abort();
    request?.abort();
    machines.leave();
    config.leave();
    costChart.leave();
    stopListening();
  };
}
