// One claim: what it says, what was found, and its numbers as sliders.
import { get } from "../api.js";
import { element, note, slider } from "../dom.js";
import { run, runner } from "./check.js";
import { figures } from "./figure.js";
import { typeset } from "./typeset.js";
import { number, ROLES, verdict } from "./words.js";

// `chosen` are the numbers that differ from the recorded ones; `changed(chosen)` is told of others, `ran(result)` of
// what a run with the recorded numbers found.
export function page(one, chosen, { back, changed, ran }) {
  const status = element("p", { className: "status", role: "status" });
  const now = element("span", { className: "now" });
  const stop = element("button", { type: "button", text: "cancel", hidden: true, on: { click: () => runs.stop() } });
  const reset = element("button", { type: "button", text: "as recorded", on: { click: asRecorded } });
  const plots = element("div", { className: "figures" });
  const findings = element("div", { className: "findings" });
  const numbers = element("dl", { className: "numbers" });
  const code = element("pre", {}, element("code", {}));
  const details = element("details", { on: { toggle: showCode } }, element("summary", { text: "The code that runs" }), code);
  const sliders = new Map();
  let [recorded, last, left] = [null, null, false];
  const label = one.verdict === "holds if" ? "It holds if" : "What is true instead";
  const box = element("article", { className: "claim", "aria-label": one.id },
    element("p", { className: "back" }, element("button", { type: "button", className: "quiet", text: "← all claims", on: { click: back } })),
    element("header", {}, element("h2", { text: one.title }), verdict(one.verdict), element("span", { className: "quiet", text: `recorded · document ${one.sources.join(", ")}` })),
    element("p", { className: "statement" }, ...typeset(one.typeset.statement)),
    element("div", { className: "formula", role: "group", "aria-label": "formula" }, ...typeset(one.typeset.formula)),
    one.correction ? element("p", { className: "correction" }, element("b", { text: `${label}. ` }), ...typeset(one.typeset.correction)) : null,
    element("section", { className: "panel turn", "aria-label": "turn its numbers" },
      element("div", { className: "bar" }, element("h3", { text: "Turn its numbers" }), now, status, stop, reset),
      element("div", { className: "sliders" }, ...one.parameters.map(turned))),
    plots, findings, numbers,
    element("dl", { className: "why" },
      element("dt", { text: "What would refute it" }), element("dd", {}, ...typeset(one.typeset.refuted)),
      element("dt", { text: "Control" }), element("dd", {}, ...typeset(one.typeset.control))),
    details);

  function turned({ name, value, values }) {
    const at = values.includes(chosen[name]) ? chosen[name] : value;
    const all = values.includes(at) ? values : [...values, at].sort((a, b) => a - b);
    const made = slider(name.replaceAll("_", " "), all, all.indexOf(at), number, (next) => {
      if (next === value) delete chosen[name];
      else chosen[name] = next;
      reset.disabled = !Object.keys(chosen).length;
      runs.ask(one.id, { ...chosen });
      changed({ ...chosen });
    });
    sliders.set(name, made);
    return made;
  }

  function asRecorded() {
    for (const { name, value } of one.parameters) sliders.get(name).put(value);
    for (const name of Object.keys(chosen)) delete chosen[name];
    reset.disabled = true;
    changed({});
    runs.ask(one.id, {});
  }

  const runs = runner({
    began() {
      status.textContent = "runs …";
      status.classList.remove("error");
      stop.hidden = false;
      box.classList.remove("stale");
      box.classList.add("running");
    },
    told(job) {
      status.textContent = job.state === "queued" ? "waits for other work …" : "runs …";
    },
    done(wish, result, more) {
      if (left) return;
      const own = Object.keys(wish.parameters).length > 0;
      if (!own) known(result);
      show((last = result), own);
      if (!more) ended(`in ${result.seconds < 0.095 ? "under 0.1" : result.seconds.toFixed(1)} s`);
    },
    failed(wish, error) {
      if (left) return;
      ended(error.cancelled ? "cancelled" : error.message, !error.cancelled);
      now.replaceChildren();
      box.classList.add("stale"); // what is below is of other numbers
    },
  });

  function known(result) {
    recorded = result;
    ran(result);
  }

  function ended(text, bad = false) {
    status.textContent = text;
    status.classList.toggle("error", bad);
    stop.hidden = true;
    box.classList.remove("running");
  }

  function show(result, own) {
    now.replaceChildren(verdict(result.verdict), element("span", { className: result.as_recorded ? "good" : "bad", text: result.as_recorded ? (own ? "as recorded" : "reproduced") : "another verdict than recorded" }));
    findings.replaceChildren(...Object.entries(ROLES).map(([role, title]) => {
      const of = result.findings.filter((finding) => finding.role === role);
      return of.length ? element("section", {}, element("h3", { text: title }), element("ul", {}, ...of.map(answer))) : null;
    }).filter(Boolean));
    numbers.replaceChildren(...Object.entries(result.numbers).map(([name, value]) => element("div", {}, element("dt", { text: name }), element("dd", { text: number(value) }))));
    figures(plots, result.series, own ? recorded?.series : null).catch((error) => note(error.message, "error"));
  }

  function answer({ role, holds, said, typeset: shown }) {
    const good = holds !== (role === "control");
    return element("li", {}, element("span", { className: `answer ${good ? "good" : "bad"}`, text: holds ? "yes" : "no" }),
      element("div", {}, element("p", {}, ...typeset(shown.asked)), said ? element("p", { className: "quiet" }, ...typeset(shown.said)) : null));
  }

  async function showCode() {
    if (!details.open || code.firstChild.textContent) return;
    try {
      code.firstChild.textContent = (await get("/api/claims/code", { claim: one.id })).code;
    } catch (error) {
      note(error.message, "error");
    }
  }

  const own = Object.keys(chosen).length > 0;
  reset.disabled = !own;
  if (own) { // what is recorded is drawn behind
    run(one.id, {}, () => {}).then((result) => {
      if (left) return;
      known(result);
      if (last && Object.keys(chosen).length) show(last, true);
    }).catch(() => {});
  }
  runs.ask(one.id, { ...chosen });
  return {
    box,
    leave() {
      left = true;
      runs.leave();
      for (const figure of plots.children) figure.drawn?.();
    },
  };
}
