// The room «Evolve»: a training run, step by step; one scrubber moves all that is shown.
import { get } from "./api.js";
import { element, note, settled } from "./dom.js";
import { onTheme } from "./theme.js";
import { RunData } from "./evolve/data.js";
import { live } from "./evolve/live.js";
import { scrubber } from "./evolve/scrubber.js";
import { stage } from "./evolve/stage.js";
import { trainForm } from "./evolve/train.js";

export async function open(root, state) {
  const picker = element("select", { id: "evolve-run", on: { change: () => go(picker.value) } });
  const facts = element("p", { className: "facts" });
  const look = element("a", { className: "look-at", text: "look at this model", hidden: true });
  const fresh = element("button", { type: "button", text: "train a model", "aria-expanded": "false" });
  const top = element("div", { className: "bar top" },
    element("div", { className: "field" }, element("label", { for: picker.id, text: "run" }), picker), facts, look, fresh);
  const shown = { data: null, at: 0, head: 0, value: "entropy", of: "map", which: "all", even: false };
  const keep = settled((fields) => state.set(fields), 200);
  const form = trainForm(async (run) => {
    fresh.setAttribute("aria-expanded", "false");
    await list();
    await go(run);
  });
  const growing = live(grown);
  const time = scrubber(jump);
  const view = stage({ jump, change });
  let turn = 0; // which run was asked for last
  let following = true; // whether the scrubber goes along with a run that grows

  fresh.addEventListener("click", async () => {
    try {
      fresh.setAttribute("aria-expanded", String(await form.toggle()));
    } catch (error) {
      note(error.message, "error");
    }
  });

  function jump(record, head = null) {
    const { data } = shown;
    if (!data?.steps.length) return;
    shown.at = Math.max(0, Math.min(record, data.steps.length - 1));
    following = shown.at === data.steps.length - 1;
    if (head !== null) shown.head = head;
    time.put(data.steps, shown.at);
    view.move(shown, head !== null);
    keep({ step: following ? null : data.steps[shown.at], head: shown.head || null });
  }

  function change(what) {
    Object.assign(shown, what);
    state.set({
      value: shown.value === "entropy" ? null : shown.value, which: shown.which === "all" ? null : shown.which,
      time: shown.even ? "even" : null, of: what.of ?? state.get("of"),
    });
    view.draw(shown);
  }

  async function list() {
    const { runs } = await get("/api/evolve/runs");
    picker.replaceChildren(...runs.map((run) => element("option", { value: run.id, text: run.state === "training" ? `${run.title} (trains)` : run.title })));
    picker.disabled = !runs.length;
    return runs;
  }

  async function go(id) {
    const mine = ++turn;
    time.pause();
    growing.end();
    const data = new RunData(id);
    try {
      await data.grow();
    } catch (error) {
      if (mine === turn) note(error.message, "error");
      return;
    }
    if (mine !== turn) return;
    const first = shown.data === null; // the address tells of the first run that is shown
    const names = data.names.flatMap((group) => group.names);
    picker.value = id;
    shown.data = data;
    shown.of = data.told.on_grid && state.get("of", "profile") !== "map" ? "profile" : "map";
    const wanted = first ? state.get("value", "entropy") : shown.value;
    shown.value = names.length && !names.includes(wanted) ? "entropy" : wanted;
    if (first) [shown.which, shown.even] = [state.get("which", "all"), state.get("time") === "even"];
    const step = first ? state.number("step", null) : null;
    shown.at = step === null ? data.steps.length - 1 : Math.max(0, data.steps.findLastIndex((one) => one <= step));
    shown.head = first ? Math.max(0, Math.min(state.number("head", 0), data.heads.length - 1)) : 0;
    following = step === null;
    state.set({ run: id, step, head: shown.head || null });
    time.put(data.steps, shown.at);
    tell();
    view.draw(shown);
    growing.follow(data.told);
  }

  // What is new of the run that is shown; says how it stands.
  async function grown() {
    const { data } = shown;
    const before = data.told.state;
    const more = await data.grow();
    if (shown.data !== data) return data.told;
    if (more) {
      if (following) shown.at = Math.max(0, data.steps.length - 1);
      if (data.told.on_grid && shown.of === "map" && state.get("of") !== "map") shown.of = "profile";
      time.put(data.steps, shown.at);
      view.draw(shown);
    }
    tell();
    if (before !== data.told.state) {
      await list();
      picker.value = data.id;
    }
    return data.told;
  }

  function tell() {
    const { told, steps, heads } = shown.data;
    const best = told.result?.best;
    const score = best ? ` · ${told.score ?? "loss"} ${best.scores[told.score ?? "loss"]?.toFixed(3)} held out` : "";
    facts.textContent = heads.length ? `${heads.length} heads, ${steps.length} records to step ${steps.at(-1).toLocaleString("en")}${score}` : "";
    look.hidden = !told.model;
    look.href = `?${new URLSearchParams(lookAt(told))}`;
  }

  look.addEventListener("click", (event) => {
    if (event.metaKey || event.ctrlKey || event.shiftKey) return;
    event.preventDefault();
    state.leaveFor(lookAt(shown.data.told));
  });

  // Arrows go through the steps from wherever nothing else takes them.
  function keys(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || event.target.closest?.("input, select, textarea, [role=group]")) return;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by === undefined || !shown.data) return;
    event.preventDefault();
    jump(shown.at + by);
  }

  root.append(top, form.box, growing.box, time.box, view.box);
  addEventListener("keydown", keys);
  const stops = [onTheme(() => shown.data && view.draw(shown)), state.onChange(() => go(state.get("run") || picker.value))];
  try {
    const runs = await list();
    const asked = state.get("run");
    if (runs.length) await go(runs.some((run) => run.id === asked) ? asked : runs[0].id);
    else {
      view.empty("No run is open yet. Train a small model here, and watch its heads as they learn.");
      fresh.click();
    }
  } catch (error) {
    note(error.message, "error");
  }
  return () => {
    turn++;
    removeEventListener("keydown", keys);
    time.pause();
    growing.end();
    view.stop();
    for (const stop of stops) stop();
  };
}

// The room «Look» at a run's model: at what was recorded of it last, or at its input where nothing was.
function lookAt({ model, recording }) {
  return recording ? { room: "look", recording } : { room: "look", model: model ?? "", input: 1 };
}
