// Ablation: how the loss of each token, and the next token at the locked position, change without the selected heads.
import { cancelJob, followJob, post, waitingText } from "../api.js";
import { element, formatNumber, select, showMessage } from "../dom.js";
import { createLossChart, signed } from "./loss_chart.js";
import { tokenNames } from "./next_tokens.js";
import { headName, longLabel, tokenTexts } from "./token_labels.js";
import { lockedToken } from "./view_state.js";

const NO_HEADS = "Tick heads in the grid (x on the keyboard), or select the shown head for ablation.";

export function createAblation(root, view) {
  const heads = element("ul", { className: "chosen" });
  const runButton = element("button", { type: "button", className: "main", text: "Ablate", on: { click: run } });
  const stopButton = element("button", { type: "button", text: "Cancel", hidden: true });
  const replacements = [["zero", "zero"], ["mean", "its mean"]];
  const replacement = select("replace their output by", replacements, view.replacement,
    (value) => view.change({ replacement: value }));
  const status = element("span", { className: "quiet", role: "status" });
  const result = element("div", { className: "result" });
  const noModel = element("p", { className: "quiet", hidden: true });
  root.append(element("h3", { text: "Ablate heads" }), heads,
    element("div", { className: "bar" }, replacement, runButton, stopButton, status), noModel, result);
  const next = element("div", { className: "next" });
  let running = false;
  let comparison = null; // the last result
  let chart = null; // its chart of losses

  // The toolbar of the head has a button that does the same, because this panel may be out of view.
  view.ablation = { run, reveal, button: runButton };
  view.ablationStatus = "";

  function showStatus() {
    let state = "";
    if (running) state = "running";
    else if (comparison) state = "done";
    else if (!runButton.disabled) state = "ready";
    view.change({ ablationStatus: state });
  }

  function show() {
    heads.replaceChildren();
    for (const id of view.ablated) {
      const [layerIndex, head] = id.split(".").map(Number);
      const layer = view.description?.places.find((candidate) => candidate.place === layerIndex);
      if (!layer) continue;
      const name = headName(layer, head);
      const keepButton = element("button", { type: "button", className: "quiet", text: "×", "aria-label": `keep ${name}` });
      keepButton.addEventListener("click", () => view.change({ ablated: view.ablated.filter((other) => other !== id) }));
      heads.append(element("li", {}, name, keepButton));
    }
    const hasHeads = heads.children.length > 0;
    if (!hasHeads) heads.append(element("li", { className: "quiet", text: NO_HEADS }));
    replacement.querySelector("select").value = view.replacement;
    const hasModel = Boolean(view.description?.model);
    runButton.disabled = !hasHeads || running || !hasModel;
    noModel.hidden = hasModel || !view.description;
    noModel.textContent = `Heads of this recording cannot be ablated. ${view.description?.no_model ?? ""}`;
    showStatus();
  }

  async function run() {
    const { recording, ablated } = view;
    running = true;
    show();
    try {
      const ids = view.ablated.map((id) => id.split(".").map(Number));
      const request = { recording, heads: ids, by: view.replacement };
      const position = lockedToken(view, "row");
      if (position !== null) request.position = position;
      const job = await post("/api/look/ablate", request);
      stopButton.hidden = false;
      stopButton.onclick = () => cancelJob(job).catch((error) => showMessage(error.message, "error"));
      const response = await followJob(job, showProgress, view.signal);
      const isCurrent = view.recording === recording && view.ablated === ablated && view.replacement === request.by;
      if (isCurrent) showResult(response);
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (error.cancelled) showMessage("The ablation was cancelled.");
      else showMessage(error.message, "error");
    }
    running = false;
    stopButton.hidden = true;
    status.textContent = "";
    show();
  }

  function showProgress(job) {
    status.textContent = job.state === "queued" ? waitingText(job) : job.said || "running";
  }

  function showResult(response) {
    comparison = response;
    result.replaceChildren();
    if (comparison.loss.before.tokens.length) { // a text of one token has no loss
      const layer = layerOfText();
      const texts = layer && tokenTexts(view.description, layer, "queries");
      const lockRow = (row) => view.change({ direction: "from", row, key: null });
      chart = createLossChart(comparison.loss, texts, tokenName, lockRow);
      result.append(lossText(comparison.loss), chart.figure);
    }
    result.append(next);
    showPosition();
    reveal();
  }

  function clearResult() {
    comparison = null;
    chart = null;
    result.replaceChildren();
    showStatus();
  }

  function reveal() {
    result.scrollIntoView({ block: "nearest" });
  }

  // What depends on the locked position (else the last one): the marked token of the chart, and the next token.
  function showPosition() {
    if (!comparison) return;
    const last = comparison.loss.before.tokens.length;
    const locked = lockedToken(view, "row");
    const position = Math.min(locked ?? last, last);
    chart?.setPosition(locked === null ? null : position);
    const rows = comparison.next.positions[position - comparison.next.first];
    next.replaceChildren(element("p", { className: "at" }, "Next token after ", element("b", { text: tokenName(position) }),
      rows ? "" : ": not compared that far from the token that was locked; ablate again to see it"));
    if (rows) next.append(probabilityTable(rows));
  }

  // The first layer whose queries are the whole text.
  function layerOfText() {
    const count = comparison.loss.before.tokens.length + 1;
    return view.description.places.find((candidate) => candidate.n === count);
  }

  function tokenName(position) {
    const layer = view.description.places.find((candidate) => candidate.n > position);
    return layer ? longLabel(view.description, layer, "queries", position) : String(position);
  }

  function lossText({ before, after }) {
    const count = before.tokens.length;
    const change = (after.total - before.total) / count;
    return element("p", { dataset: { before: before.total, after: after.total } },
      `Loss of ${count} tokens: total `,
      element("b", { text: formatNumber(before.total) }), " → ", element("b", { text: formatNumber(after.total) }),
      " nats, per token ", element("b", { text: formatNumber(before.total / count) }), " → ",
      element("b", { text: formatNumber(after.total / count) }), ` (${signed(change)})`);
  }

  function probabilityTable(rows) {
    let largest = 1e-9;
    for (const { before, after } of rows) largest = Math.max(largest, before, after);
    const bar = (probability, className) => {
      return element("span", { className: `share ${className}`, style: `--share: ${probability / largest}` });
    };
    const names = tokenNames(rows);
    const body = element("tbody");
    for (const [i, { before, after }] of rows.entries()) {
      body.append(element("tr", {},
        element("th", { scope: "row", text: names[i] }),
        element("td", { className: "bars" }, bar(before, "before"), bar(after, "after")),
        element("td", { className: "number", text: formatNumber(before) }),
        element("td", { className: "number", text: formatNumber(after) })));
    }
    const header = element("tr", {},
      element("th", { scope: "col", text: "next token" }),
      element("th", { scope: "col", text: "" }),
      element("th", { scope: "col", text: "before", className: "number" }),
      element("th", { scope: "col", text: "after", className: "number" }));
    return element("table", {}, element("thead", {}, header), body);
  }

  view.on("ablated replacement description", show);
  view.on("row", showPosition);
  // A result belongs to the heads that were ablated.
  view.on("recording ablated replacement", clearResult);
  show();
}
