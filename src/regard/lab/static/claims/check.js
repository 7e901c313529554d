// Running checks: one claim with other numbers as sliders turn, or all of them, one after the other.
import { cancel, followed, post } from "../api.js";

const LONG = 4000; // milliseconds that a run which nobody waits for any more may go on: to end one costs a new process

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
  let [wish, control, since, timer] = [null, null, 0, 0];

  // What runs is given up, once it has had its time.
  function giveUp() {
    const old = control;
    clearTimeout(timer);
    timer = setTimeout(() => { if (control === old) old?.abort(); }, Math.max(0, LONG - (performance.now() - since)));
  }

  async function work() {
    while (wish) {
      const mine = wish;
      wish = null;
      control = new AbortController();
      since = performance.now();
      began(mine);
      try {
        const result = await run(mine.claim, mine.parameters, told, control.signal);
        done(mine, result, Boolean(wish));
      } catch (error) {
        if (!wish) failed(mine, error);
      }
      control = null;
    }
  }

  return {
    ask(claim, parameters) {
      wish = { claim, parameters };
      if (control) giveUp();
      else work();
    },
    // Nobody looks any more.
    leave() {
      wish = null;
      if (control) giveUp();
    },
    stop() {
      wish = null;
      control?.abort();
    },
  };
}
