// The room «Claims»: the ledger with its verdicts; each check can be run again, with other numbers.
import { get } from "./api.js";
import { element, note } from "./dom.js";
import { run } from "./claims/check.js";
import { list } from "./claims/list.js";
import { page } from "./claims/page.js";
import { verdict, VERDICTS } from "./claims/words.js";

const PREFIX = "p."; // of the address's fields that are a claim's numbers

export async function open(root, state) {
  let ledger = null;
  const waiting = element("p", { className: "loading", text: "opening the ledger …" });
  root.append(waiting);
  try {
    ledger = await get("/api/claims/ledger");
  } catch (error) {
    waiting.replaceWith(element("p", { className: "error", text: error.message }));
    return undefined;
  }
  if (!waiting.isConnected) return undefined; // somebody went to another room meanwhile
  waiting.remove();
  const all = element("button", { type: "button", text: "run all", on: { click: runAll } });
  const bar = element("progress", { max: 1, value: 0, hidden: true, "aria-label": "how many claims were run" });
  const told = element("span", { className: "quiet", role: "status" });
  const names = list(ledger, state, (name) => { state.push(fields(name, {})); show(); });
  const side = element("aside", { "aria-label": "the ledger" }, element("div", { className: "bar" }, element("h2", { text: "Claims" }), all, bar, told), names.box);
  const place = element("div", { className: "place" });
  let [shown, running] = [null, null];

  // All fields of a claim's numbers; those that it does not have are taken away.
  function fields(name, chosen) {
    const given = [...new URLSearchParams(location.search).keys()].filter((key) => key.startsWith(PREFIX));
    return { claim: name, ...Object.fromEntries(given.map((key) => [key, null])), ...Object.fromEntries(Object.entries(chosen).map(([key, value]) => [PREFIX + key, value])) };
  }

  function show() {
    const one = ledger.claims.find((claim) => claim.id === state.get("claim"));
    shown?.leave();
    shown = null;
    names.mark(one?.id);
    root.classList.toggle("opened", Boolean(one));
    if (!one) {
      place.replaceChildren(summary());
      return;
    }
    const chosen = {};
    for (const { name, value } of one.parameters) {
      const given = state.number(PREFIX + name, value);
      if (given !== value) chosen[name] = given;
    }
    shown = page(one, chosen, {
      back: () => { state.push(fields(null, {})); show(); },
      changed: (now) => state.set(fields(one.id, now)),
      ran: (result) => names.ran(one.id, result),
    });
    place.replaceChildren(shown.box);
    names.show(one.id);
    if (matchMedia("(max-width: 900px)").matches) scrollTo(0, 0);
  }

  function summary() {
    const counts = Object.keys(VERDICTS).map((name) => [name, ledger.claims.filter((one) => one.verdict === name).length]).filter(([, many]) => many);
    return element("div", { className: "panel intro" },
      element("h2", { text: `${ledger.claims.length} statements of the theory, executed` }),
      element("p", { text: "Each is a check that runs here: it asks the statement as written, the same where its condition is met or as corrected, and a control that must fail. The verdict follows from the answers." }),
      element("p", { className: "bar" }, ...counts.map(([name, many]) => element("span", {}, verdict(name), ` ${many}`))),
      element("p", { className: "quiet", text: "Pick one to see what was found, and turn its numbers." }));
  }

  async function runAll() {
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    const { signal } = running;
    const wanted = names.visible();
    let [good, done] = [0, 0];
    [all.textContent, bar.hidden, bar.max, bar.value] = ["cancel", false, Math.max(1, wanted.length), 0];
    for (const name of wanted) {
      told.textContent = `${done} of ${wanted.length}`;
      names.ran(name, null);
      try {
        const result = await run(name, {}, () => {}, signal);
        names.ran(name, result);
        good += result.as_recorded ? 1 : 0;
      } catch (error) {
        if (signal.aborted) {
          names.clear(name);
          break;
        }
        names.ran(name, { error: error.message });
      }
      bar.value = ++done;
    }
    told.textContent = `${good} of ${done} reproduced${signal.aborted ? ", then cancelled" : ""}`;
    [all.textContent, bar.hidden, running] = ["run all", true, null];
  }

  root.append(side, place);
  show();
  const stop = state.onChange(show);
  return () => {
    stop();
    running?.abort();
    shown?.leave();
    root.classList.remove("opened");
  };
}
