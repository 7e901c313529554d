// Starting a run: what is learned, and a few numbers.
import { get, post } from "../api.js";
import { element, note, select, slider } from "../dom.js";

const FIRST = "repeats"; // it shows induction heads soonest
const WORDS = { steps: "steps", layers: "layers", heads: "heads a layer", rate: "learning rate", kind: "model" };

// `started(run, job)` once a run is under way.
export function trainForm(started) {
  const box = element("section", { className: "panel train", "aria-label": "train a new model", hidden: true });
  let [tasks, task, chosen] = [null, null, {}];

  function show(name) {
    task = tasks.find((one) => one.name === name);
    chosen = Object.fromEntries(Object.entries(task.options).map(([option, { value }]) => [option, value]));
    const seed = element("input", { id: "evolve-seed", type: "number", min: 0, max: 2 ** 31 - 1, step: 1, value: 0 });
    const go = element("button", { type: "submit", className: "main", text: "train" });
    const form = element("form", {},
      element("p", { className: "about", text: task.about }),
      element("div", { className: "options" }, ...Object.entries(task.options).map(turned),
        element("div", { className: "slider" }, element("label", { for: "evolve-seed", text: "seed" }), seed)),
      element("p", { className: "bar" }, go, element("span", { className: "quiet", text: "It trains here, on this machine; you can stop it at any time." })));
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        const { run, job } = await post("/api/evolve/train", { task: task.name, seed: Math.round(Number(seed.value)), ...chosen });
        box.hidden = true;
        await started(run, job);
      } catch (error) {
        note(error.message, "error");
      } finally {
        go.disabled = false;
      }
    });
    const picker = select("task", tasks.map((one) => [one.name, one.name]), task.name, show);
    box.replaceChildren(element("div", { className: "bar" }, element("h2", { text: "Train a model" }), picker), form);
    if (box.contains(document.activeElement) || !box.hidden) picker.querySelector("select").focus({ preventScroll: true });
  }

  function turned([option, { values, value }]) {
    const change = (now) => { chosen[option] = now; };
    if (typeof value === "string") return select(WORDS[option], values.map((one) => [one, one]), value, change);
    const shown = (now) => (option === "rate" ? String(Number(now.toPrecision(3))) : now.toLocaleString("en"));
    return slider(WORDS[option], values, values.indexOf(value), shown, change);
  }

  return {
    box,
    async toggle() {
      if (!box.hidden) {
        box.hidden = true;
        return false;
      }
      tasks ??= (await get("/api/evolve/tasks")).tasks;
      box.hidden = false;
      show(task?.name ?? FIRST);
      return true;
    },
  };
}
