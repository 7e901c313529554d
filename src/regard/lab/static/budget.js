// The room «budget»: turn a model's sizes and see at once what it costs, why, and when that changes.
import { get, post } from "./api.js";
import { element, settled } from "./dom.js";
import { chart } from "./budget/chart.js";
import { config } from "./budget/config.js";
import { form } from "./budget/form.js";
import { formulas } from "./budget/formulas.js";
import { machine } from "./budget/machine.js";
import { asked, fitting, fromState, toState } from "./budget/model.js";
import { bottleneck, cards, memory, parts, theory } from "./budget/results.js";

export async function open(root, state) {
  const leaving = new AbortController();
  const start = await get("/api/budget", {}, leaving.signal);
  const given = { start, now: fromState(state, start), answer: null, shared: state.get("config"), signal: leaving.signal };
  let asking = null;

  const why = element("p", { className: "error", role: "alert" });
  const head = element("div", { className: "head" });
  const counts = element("div", { className: "stack" });
  const lines = chart();
  const written = formulas();
  const results = element("div", { className: "results" }, counts, lines, written);

  given.changed = () => {
    toState(state, given.now, start, given.shared);
    count();
  };
  given.set = (change) => {
    change(given.now);
    fitting(given.now, start);
    controls.show();
    given.changed();
  };
  given.load = (text, title, shared) => {
    given.shared = shared;
    given.answer = null;
    given.set((now) => Object.assign(now, { config: text, tokens: null, source: null }));
  };
  given.unload = () => given.set((now) => Object.assign(now, { config: null, source: null }));
  const controls = form(given);
  const machines = machine(given);
  const configs = config(given);

  async function answer() {
    asking?.abort();
    asking = new AbortController();
    const { signal } = asking;
    const body = asked(given.now);
    if (body.machine === "this" && !start.this) delete body.machine;  // counts need no machine
    try {
      const plan = await post("/api/budget/plan", body, signal);
      given.answer = plan;
      why.textContent = "";
      for (const part of [head, results]) part.classList.remove("old");
      head.replaceChildren(cards(plan));
      counts.replaceChildren(...[theory(plan), bottleneck(plan), parts(plan), memory(plan)].filter(Boolean));
      controls.show();
      machines.show();
      configs.show(given.now.config === null ? null : plan.model);
      const [drawn, said] = await Promise.all([post("/api/budget/costs", body, signal), post("/api/budget/formulas", body, signal)]);
      written.show(said);
      root.dataset.counted = JSON.stringify(body);
      await lines.show(drawn);
    } catch (error) {
      if (error.name !== "AbortError") refused(error.message);
    }
  }
  function refused(line) {
    why.textContent = line;
    for (const part of [head, results]) part.classList.add("old");  // what is shown is of the last sizes that fitted
    machines.show();
  }
  const count = settled(answer, 90);

  root.append(
    head,
    element("div", { className: "controls" },
      element("div", { className: "panel" }, controls.kinds, element("div", { className: "bar first" }, controls.preset), configs.box, controls.sizes, controls.more),
      element("div", { className: "panel" }, controls.runs, machines.box, why)),
    results,
  );
  controls.show();
  const stop = state.onChange(() => {
    given.now = fromState(state, start);
    given.shared = state.get("config");
    controls.show();
    count();
  });
  await answer();
  return () => {
    leaving.abort();
    asking?.abort();
    machines.leave();
    configs.leave();
    lines.leave();
    stop();
  };
}
