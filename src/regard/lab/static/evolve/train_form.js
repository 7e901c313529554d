// The form that starts a run: a task and a few options.
import { get, post } from "../api.js";
import { element, sameNames, select, showMessage, slider } from "../dom.js";

const FIRST_TASK = "repeats"; // its induction heads arrive soonest
const LABELS = { steps: "steps", layers: "layers", heads: "heads per layer", rate: "learning rate", kind: "model" };

// `onStart(run)` is called once a run has started.
export function createTrainForm(onStart) {
  const box = element("section", { className: "panel train", "aria-label": "train a new model", hidden: true });
  let tasks = null;
  let task = null;
  let options = {};

  function showTask(name) {
    task = tasks.find((candidate) => candidate.name === name);
    options = {};
    const controls = element("div", { className: "options" });
    for (const [option, { value, values }] of Object.entries(task.options)) {
      options[option] = value;
      controls.append(optionControl(option, value, values));
    }
    const seed = element("input", { id: "evolve-seed", type: "number", min: 0, max: 2 ** 31 - 1, step: 1, value: 0 });
    controls.append(element("div", { className: "slider" }, element("label", { for: "evolve-seed", text: "seed" }), seed));
    const submit = element("button", { type: "submit", className: "main", text: "train" });
    const hint = "The model trains on this machine. You can stop it at any time.";
    const form = element("form", {},
      element("p", { className: "about", text: task.about }),
      controls,
      element("p", { className: "bar" }, submit, element("span", { className: "quiet", text: hint })));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      submit.disabled = true;
      try {
        const request = { task: task.name, seed: Math.round(Number(seed.value)), ...options };
        const { run } = await post("/api/evolve/train", request);
        box.hidden = true;
        await onStart(run);
      } catch (error) {
        showMessage(error.message, "error");
      } finally {
        submit.disabled = false;
      }
    });

    const names = tasks.map((candidate) => candidate.name);
    const taskList = select("task", sameNames(names), task.name, showTask);
    box.replaceChildren(element("div", { className: "bar" }, element("h2", { text: "Train a model" }), taskList), form);
    if (!box.hidden) taskList.querySelector("select").focus({ preventScroll: true });
  }

  function optionControl(option, value, values) {
    const change = (next) => {
      options[option] = next;
    };
    if (typeof value === "string") return select(LABELS[option], sameNames(values), value, change);
    const format = (number) => {
      if (option === "rate") return String(Number(number.toPrecision(3)));
      return number.toLocaleString("en");
    };
    return slider(LABELS[option], values, values.indexOf(value), format, change);
  }

  // Show or hide the form. Returns whether it is shown now.
  async function toggle() {
    if (!box.hidden) {
      box.hidden = true;
      return false;
    }
    tasks ??= (await get("/api/evolve/tasks")).tasks;
    box.hidden = false;
    showTask(task?.name ?? FIRST_TASK);
    return true;
  }

  return { box, toggle };
}
