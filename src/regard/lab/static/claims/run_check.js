// Run checks: one claim with the parameters of its sliders, or all claims, one after the other.
import { cancelJob, followJob, post } from "../api.js";

// A run whose result is not needed any more may take this many ms. Cancelling it ends its process, and the next run
// has to wait until a new process has started.
const PATIENCE = 4000;

// Returns the result; `onChange(job)` is called meanwhile. `signal` also cancels the job.
export async function run(claim, parameters, onChange, signal) {
  // Without `signal`: if the request were aborted, the page would not know which job to cancel.
  const { result, job } = await post("/api/claims/run", { claim, parameters });
  if (result) return result;
  let current = job;
  const stop = () => cancelJob(current).catch(() => {});
  if (signal?.aborted) await stop();
  signal?.addEventListener("abort", stop);
  try {
    return await followJob(job, (next) => {
      current = next;
      onChange(next);
    });
  } finally {
    signal?.removeEventListener("abort", stop);
  }
}

// Runs the newest request. While one runs, later ones wait, and only the last of them is run.
export function runner({ onStart, onProgress, onResult, onError }) {
  let request = null;
  let control = null;
  let startedAt = 0;
  let timer = 0;

  // Cancel the present run when it has taken `PATIENCE` ms.
  function abandon() {
    const abandoned = control;
    const remaining = Math.max(0, PATIENCE - (performance.now() - startedAt));
    clearTimeout(timer);
    timer = setTimeout(() => {
      if (control === abandoned) abandoned?.abort();
    }, remaining);
  }

  async function work() {
    while (request) {
      const current = request;
      request = null;
      control = new AbortController();
      startedAt = performance.now();
      onStart(current);
      try {
        const result = await run(current.claim, current.parameters, onProgress, control.signal);
        onResult(current, result, Boolean(request));
      } catch (error) {
        if (!request) onError(current, error);
      }
      control = null;
    }
  }

  return {
    start(claim, parameters) {
      request = { claim, parameters };
      if (control) abandon();
      else work();
    },
    // The page is closed: nobody needs the result.
    leave() {
      request = null;
      if (control) abandon();
    },
    stop() {
      request = null;
      control?.abort();
    },
  };
}
