// The progress of a run that trains, with buttons that stop and continue it.
import { cancelJob, followJob, get, post, waitingText } from "../api.js";
import { element, showMessage } from "../dom.js";

const INTERVAL = 1000; // ms between two updates of a run that another program trains

// Whether a job of this lab trains a run, or waits to train it.
function isTraining({ state }) {
  return state === "training" || state === "waiting";
}

// What the page says about a run that does not train in this lab; empty if there is nothing to say.
function stateText({ state, error, done, of }) {
  if (state === "stopped") return `stopped at step ${done.toLocaleString("en")} of ${of.toLocaleString("en")}`;
  if (state === "unstarted") return "never started: it was stopped while it waited";
  if (state === "growing") return "another program trains this run";
  return state === "failed" ? error : "";
}

// `onProgress()` is called when there may be new records. It returns a promise of the run's new description.
export function createTrainingStatus(onProgress) {
  const bar = element("progress", { max: 1, value: 0, "aria-label": "progress of the training" });
  const status = element("span", { className: "said" });
  const stopButton = element("button", { type: "button", text: "stop", on: { click: stopTraining } });
  const continueButton = element("button", { type: "button", text: "continue", on: { click: continueTraining } });
  const box = element("div", { className: "bar live", role: "status", hidden: true },
    bar, status, stopButton, continueButton);
  let control = null; // of the run that is followed
  let run = null;
  let job = null;
  let timer = 0;

  async function stopTraining() {
    stopButton.disabled = true;
    showProgress(job);
    try {
      await cancelJob(job);
    } catch (error) {
      showMessage(error.message, "error");
    }
  }

  async function continueTraining() {
    continueButton.disabled = true;
    try {
      const response = await post("/api/evolve/continue", { run: run.id });
      await onProgress();
      follow({ ...run, state: "training", job: response.job.id });
    } catch (error) {
      showMessage(error.message, "error");
    } finally {
      continueButton.disabled = false;
    }
  }

  function showProgress(current) {
    job = current;
    bar.hidden = current.state === "queued";
    const parts = [];
    if (current.of) {
      bar.max = current.of;
      bar.value = current.done;
      parts.push(`step ${current.done.toLocaleString("en")} of ${current.of.toLocaleString("en")}`);
    }
    if (current.said) parts.push(current.said);
    if (stopButton.disabled && current.said !== "stopping") parts.push("stopping");
    status.textContent = current.state === "queued" ? waitingText(current) : parts.join(" · ");
  }

  function showState(next) {
    const { state, job: jobId, can_continue: canContinue } = next;
    const isActive = isTraining(next) && Boolean(jobId);
    status.textContent = stateText(next);
    box.hidden = !isActive && !status.textContent;
    bar.hidden = state !== "training" || !isActive;
    stopButton.hidden = !isActive;
    stopButton.disabled = false;
    continueButton.hidden = !canContinue || isActive;
    continueButton.textContent = state === "unstarted" ? "start" : "continue";
    status.classList.toggle("error", state === "failed");
  }

  // Show the state of a run, and update it while it trains.
  async function follow(next) {
    end();
    run = next;
    control = new AbortController();
    const { signal } = control;
    showState(next);
    if (next.state === "growing") {
      timer = setTimeout(async () => {
        const updated = await Promise.resolve(onProgress()).catch(() => null);
        if (!signal.aborted) follow(updated ?? next);
      }, INTERVAL);
    }
    if (!isTraining(next) || !next.job) return;

    // One update runs at a time, however often the job reports.
    let update = null;
    try {
      await followJob(await get(`/api/jobs/${next.job}`), (current) => {
        showProgress(current);
        update ??= Promise.resolve(onProgress()).catch(() => {}).finally(() => { update = null; });
      }, signal);
    } catch (error) {
      if (signal.aborted) return;
      if (!error.cancelled) showMessage(error.message, "error");
    }
    await update;
    if (signal.aborted) return;
    const updated = await onProgress();
    follow(updated ?? { ...next, state: "ended" });
  }

  function end() {
    control?.abort();
    clearTimeout(timer);
  }

  return { box, follow, end };
}
