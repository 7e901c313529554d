// Running checks: one claim with other numbers as sliders turn, or all of them, one after the other.
import { cancel, followed, post } from "../api.js";

const LONG = 4000; // milliseconds after which a run is given up for the sake of the next

// Resolves to the result; `tell(job)` meanwhile. `signal` stops the job too.
export async function run(claim, parameters, tell, signal) {
  const { result, job } = await post("/api/claims/run", { claim, parameters }, signal);
  if (result) return result;
  let now = job;
  const stop = () => cancel(now).catch(() => {});
  if (signal?.aborted) await stop();
  signal?.addEventListener("abort", stop);
  try {
    return await followed(job, (next) => tell((now = next)));
  } finally {
    signal?.removeEventListener("abort", stop);
  }
}

// Runs the newest wish: while one runs, later ones wait, and only the last of them is run.
export function runner({ began, told, done, failed }) {
  let [wish, control, since] = [null, null, 0];

  async function work() {
    while (wish) {
      const mine = wish;
      wish = null;
      control = new AbortController();
      since = performance.now();
      began(mine);
      try {
        const result = await run(mine.claim, mine.parameters, told, control.signal);
        if (!mine.dropped) done(mine, result, Boolean(wish));
      } catch (error) {
        if (!mine.dropped && !wish) failed(mine, error);
      }
      control = null;
    }
  }

  return {
    ask(claim, parameters) {
      wish = { claim, parameters, dropped: false };
      if (!control) work();
      else if (performance.now() - since > LONG) control.abort();
    },
    stop() {
      wish = null;
      control?.abort();
    },
  };
}
