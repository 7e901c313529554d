// A run that goes on: how far it is, a button that stops it, and asking for what is new.
import { cancel, followed, get, post } from "../api.js";
import { element, note } from "../dom.js";

const EVERY = 1000; // milliseconds between two looks at a run that another program trains

// `changed()` is called when there may be something new; it may return a promise.
export function live(changed) {
  const bar = element("progress", { max: 1, value: 0, "aria-label": "how far the training is" });
  const said = element("span", { className: "said" });
  const stop = element("button", { type: "button", text: "stop", on: { click: stopped } });
  const on = element("button", { type: "button", text: "go on", on: { click: goOn } });
  const box = element("div", { className: "bar live", role: "status", hidden: true }, bar, said, stop, on);
  let [following, run, job, timer] = [null, null, null, 0];

  async function stopped() {
    stop.disabled = true;
    tell(job);
    try {
      await cancel(job);
    } catch (error) {
      note(error.message, "error");
    }
  }

  async function goOn() {
    on.disabled = true;
    try {
      const { job: started } = await post("/api/evolve/continue", { run: run.id });
      await changed();
      follow({ ...run, state: "training", job: started.id });
    } catch (error) {
      note(error.message, "error");
    } finally {
      on.disabled = false;
    }
  }

  function tell(now) {
    job = now;
    bar.hidden = false;
    if (now.of) [bar.max, bar.value] = [now.of, now.done];
    const step = now.of ? `step ${now.done.toLocaleString("en")} of ${now.of.toLocaleString("en")}` : "";
    said.textContent = now.state === "queued" ? "waits for the run before it" : [step, now.said, stop.disabled && now.said !== "stopping" ? "stopping" : ""].filter(Boolean).join(" · ");
  }

  // What is new is asked for while the job goes on, one question at a time.
  async function follow(told) {
    end();
    run = told;
    const control = (following = new AbortController());
    const active = told.state === "training" && told.job;
    box.hidden = !active && !(told.made && told.state === "stopped") && told.state !== "growing" && told.state !== "failed";
    [bar.hidden, stop.hidden, stop.disabled] = [!active, !active, false];
    on.hidden = !(told.made && told.state === "stopped");
    said.textContent = { stopped: "stopped before its end", growing: "another program trains this run", failed: told.error }[told.state] ?? "";
    said.classList.toggle("error", told.state === "failed");
    if (told.state === "growing") timer = setTimeout(async () => { if (!control.signal.aborted) await again(told, control); }, EVERY);
    if (!active) return;
    let asking = null;
    try {
      await followed(await get(`/api/jobs/${told.job}`), (now) => {
        tell(now);
        asking ??= Promise.resolve(changed()).catch(() => {}).finally(() => { asking = null; });
      }, control.signal);
    } catch (error) {
      if (control.signal.aborted) return;
      if (!error.cancelled) note(error.message, "error");
    }
    await asking;
    if (!control.signal.aborted) follow((await changed()) ?? { ...told, state: "ended" });
  }

  async function again(told, control) {
    const now = await Promise.resolve(changed()).catch(() => null);
    if (!control.signal.aborted) follow(now ?? told);
  }

  function end() {
    following?.abort();
    clearTimeout(timer);
  }

  return { box, follow, end };
}
