// One claim: its statement, its evidence, and its parameters as sliders.
import { get, waitingText } from "../api.js";
import { element, onPlainClick, showMessage, slider } from "../dom.js";
import { run, runner } from "./run_check.js";
import { figures } from "./figure.js";
import { brokenRules, removeRefused } from "./parameters.js";
import { typeset } from "./safe_mathml.js";
import { number, ROLES, unbrokenNumbers, verdict, whatHolds } from "./words.js";

// `chosen`: the parameters that differ from the recorded ones. `changed(chosen)` is called when a slider moves, and
// `ran(result)` with the result of a run with the recorded parameters.
export function page(claim, chosen, { back, changed, ran }) {
  const holds = claim.verdict === "holds";
  const refused = removeRefused(claim, chosen); // values from the address that are not accepted
  const refusal = element("p", { className: "refusal error", role: "alert" });
  const status = element("p", { className: "status", role: "status" });
  const outcome = element("span", { className: "now" });
  const difference = element("div", { className: "difference" }); // why the verdict is not the recorded one
  const stopButton = element("button", { type: "button", text: "cancel", hidden: true, on: { click: () => runs.stop() } });
  const resetButton = element("button", {
    type: "button", text: "reset", title: "run with the recorded parameters", on: { click: reset },
  });
  const plots = element("div", { className: "figures" });
  const findings = element("div", { className: "findings" });
  const numbers = element("dl", { className: "numbers" });
  const code = element("code", {});
  const source = element("details", { on: { toggle: loadCode } },
    element("summary", { text: "The code that runs" }), element("pre", {}, code));
  const sliders = new Map();
  let recordedResult = null; // with the recorded parameters; drawn behind other results
  let lastResult = null;
  let closed = false;

  const box = element("article", { className: "claim", "aria-label": claim.id },
    element("p", { className: "back" },
      element("button", { type: "button", className: "quiet", text: "← all claims", on: { click: back } })),
    element("header", {}, element("h2", {}, ...typeset(claim.typeset.title)), verdict(claim.verdict)),
    whatHolds(claim),
    element("div", { className: "stated" },
      element("h3", { text: holds ? "The statement" : "As the document states it" }),
      element("p", { className: "statement" }, ...typeset(claim.typeset.statement)),
      element("div", { className: "formula", role: "group", "aria-label": "formula" }, ...typeset(claim.typeset.formula)),
      element("p", { className: "quiet" }, "stated in ", ...sourceLinks())),
    correction(),
    element("section", { className: "panel turn", "aria-label": "change its parameters" },
      element("div", { className: "bar" },
        element("h3", { text: "Change its parameters" }), outcome, status, stopButton, resetButton),
      refusal, difference,
      element("div", { className: "sliders" }, ...claim.parameters.map(parameterSlider))),
    plots, findings, numbers,
    element("dl", { className: "why" },
      element("dt", { text: "What would refute it" }), element("dd", {}, ...typeset(claim.typeset.refuted)),
      element("dt", { text: "Control" }), element("dd", {}, ...typeset(claim.typeset.control))),
    origins(),
    source);

  // The documents in a few words; each leads to its full description below.
  function sourceLinks() {
    const links = claim.citations.map(({ label, section }) => element("a", { href: "#origins", text: `${label}, ${section}` }));
    for (const { short } of claim.papers) links.push(element("a", { href: "#origins", text: short }));
    for (const link of links) onPlainClick(link, () => box.querySelector("#origins").scrollIntoView({ block: "center" }));
    return links.flatMap((link, index) => (index ? ["; ", link] : [link]));
  }

  function origins() {
    const items = [];
    for (const { title, kind, section, heading } of claim.citations) {
      items.push(element("li", {}, element("cite", { text: title }), `, ${section} “${heading}” `,
        element("span", { className: "quiet", text: `(${kind})` })));
    }
    for (const { text, address } of claim.papers) {
      items.push(element("li", {}, element("a", { href: address, target: "_blank", rel: "noopener noreferrer", text })));
    }
    return element("section", { className: "origins", id: "origins" },
      element("h3", { text: "Where it is stated" }), element("ul", {}, ...items));
  }

  function correction() {
    if (!claim.correction) return null;
    const label = claim.verdict === "holds conditionally" ? "Holds if: " : "In detail: ";
    return element("p", { className: "correction" }, element("b", { text: label }), ...typeset(claim.typeset.correction));
  }

  function parameterSlider({ name, label, value, values, typeset: typesetLabel }) {
    const start = chosen[name] ?? value;
    // A value from the address need not be one of the steps of the slider.
    const steps = values.includes(start) ? values : [...values, start].sort((a, b) => a - b);
    const control = slider(label, steps, steps.indexOf(start), number, (next) => {
      if (next === value) delete chosen[name];
      else chosen[name] = next;
      resetButton.disabled = !Object.keys(chosen).length;
      changed({ ...chosen });
      startRun();
    });
    control.querySelector("label").replaceChildren(...typeset(typesetLabel));
    sliders.set(name, control);
    return control;
  }

  // Run the check with the chosen parameters, unless they break a rule together.
  function startRun() {
    const [broken] = brokenRules(claim, chosen);
    refusal.textContent = broken?.reason ?? "";
    if (!broken) {
      runs.start(claim.id, { ...chosen });
      return;
    }
    runs.leave();
    finish("not run");
    outcome.replaceChildren();
    difference.replaceChildren();
    box.classList.add("stale"); // the evidence below belongs to other parameters
  }

  function reset() {
    refusal.textContent = "";
    for (const { name, value } of claim.parameters) sliders.get(name).put(value);
    for (const name of Object.keys(chosen)) delete chosen[name];
    resetButton.disabled = true;
    changed({});
    runs.start(claim.id, {});
  }

  const runs = runner({
    onStart() {
      status.textContent = "running …";
      status.classList.remove("error");
      stopButton.hidden = false;
      box.classList.remove("stale");
      box.classList.add("running");
    },
    onProgress(job) {
      status.textContent = job.state === "queued" ? waitingText(job) : "running …";
    },
    onResult(request, result, more) {
      if (closed || brokenRules(claim, chosen).length) return;
      const changedParameters = Object.keys(request.parameters).length > 0;
      if (!changedParameters) setRecorded(result);
      lastResult = result;
      show(result, changedParameters);
      const seconds = result.seconds < 0.095 ? "under 0.1" : result.seconds.toFixed(1);
      if (!more) finish(`in ${seconds} s`);
    },
    onError(request, error) {
      if (closed) return;
      finish(error.cancelled ? "cancelled" : error.message, !error.cancelled);
      outcome.replaceChildren();
      difference.replaceChildren();
      box.classList.add("stale"); // the evidence below belongs to other parameters
    },
  });

  function setRecorded(result) {
    recordedResult = result;
    ran(result);
  }

  function finish(text, failed = false) {
    status.textContent = text;
    status.classList.toggle("error", failed);
    stopButton.hidden = true;
    box.classList.remove("running");
  }

  function show(result, changedParameters) {
    const text = result.as_recorded ? "as recorded" : "another verdict than recorded";
    const className = result.as_recorded ? "good" : "bad";
    outcome.replaceChildren(verdict(result.verdict), element("span", { className, text }));
    explainDifference(result);

    findings.replaceChildren();
    for (const [role, title] of Object.entries(ROLES)) {
      const items = result.findings.filter((finding) => finding.role === role).map(findingItem);
      if (items.length) findings.append(element("section", {}, element("h3", { text: title }), element("ul", {}, ...items)));
    }
    numbers.replaceChildren();
    for (const [name, value] of Object.entries(result.numbers)) {
      const label = typeset(result.typeset[name] ?? name);
      numbers.append(element("div", {}, element("dt", {}, ...label), element("dd", {}, ...unbrokenNumbers(value))));
    }
    const behind = changedParameters ? recordedResult?.series : null;
    figures(plots, result, behind).catch((error) => showMessage(error.message, "error"));
  }

  // List the findings that a run with the recorded verdict would have answered otherwise.
  function explainDifference(result) {
    difference.replaceChildren();
    if (result.as_recorded) return;
    const unexpected = result.findings.filter(({ role, holds: answer }) => {
      if (role === "stated" && !holds) return false; // the statement may fail, because it does not hold as it stands
      return answer === (role === "control");
    });
    let text = `Recorded is “${claim.verdict}”. With these parameters, every finding about the statement is “yes”.`;
    if (unexpected.length) text = `Recorded is “${claim.verdict}”. These findings have another answer with these parameters:`;
    const items = unexpected.map(({ holds: answer, typeset: texts }) =>
      element("li", {}, ...typeset(texts.asked), element("b", { text: answer ? " yes" : " no" })));
    difference.append(element("p", { text }), element("ul", {}, ...items));
  }

  function findingItem({ role, holds, said, typeset: texts }) {
    const good = holds !== (role === "control"); // a control must fail
    return element("li", {},
      element("span", { className: `answer ${good ? "good" : "bad"}`, text: holds ? "yes" : "no" }),
      element("div", {},
        element("p", {}, ...typeset(texts.asked)),
        said ? element("p", { className: "quiet" }, ...typeset(texts.said)) : null));
  }

  async function loadCode() {
    if (!source.open || code.textContent) return;
    try {
      code.textContent = (await get("/api/claims/code", { claim: claim.id })).code;
    } catch (error) {
      showMessage(error.message, "error");
    }
  }

  const startsChanged = Object.keys(chosen).length > 0;
  resetButton.disabled = !startsChanged;
  if (refused.length) {
    refusal.textContent = `${refused.join("; ")}. The recorded value is used instead.`;
    changed({ ...chosen });
  }
  if (startsChanged) {
    // The recorded result is drawn behind the result of the changed parameters.
    run(claim.id, {}, () => {}).then((result) => {
      if (closed) return;
      setRecorded(result);
      if (lastResult && Object.keys(chosen).length) show(lastResult, true);
    }).catch(() => {});
  }
  runs.start(claim.id, { ...chosen });
  return {
    box,
    leave() {
      closed = true;
      runs.leave();
      for (const figure of plots.children) figure.stopDrawing?.();
    },
  };
}
