// The selected head: what it reads, and what the prediction becomes if the head, or one value that it reads, is replaced.
import { followJob, post, waitingText } from "../api.js";
import { element, formatNumber, showMessage } from "../dom.js";
import { exactText, tokenNames } from "../look/next_tokens.js";
import { signedNumber } from "./signed_colour.js";

const STRONGEST = 5; // tokens that are listed

export function createPatchPanel(signal) {
  const box = element("div");
  let current = null; // what is shown: a result of another head comes too late

  function show(question, answer, selection) {
    current = { question, answer, selection };
    if (!selection) {
      box.replaceChildren(element("h2", { text: "Patch a head" }), element("p", {
        className: "quiet", text: "Select a head, or a cell of its strip, to measure what the prediction owes to it.",
      }));
      return;
    }
    const row = answer.heads.find(({ layer, head }) => layer === selection.layer && head === selection.head);
    const status = element("span", { className: "quiet", role: "status" });
    const result = element("div", { className: "result" });
    const buttons = [];
    for (const [by, label] of [["zero", "by zero"], ["mean", "by its mean"]]) {
      const button = element("button", { type: "button", className: by === "zero" ? "main" : "", text: label });
      button.addEventListener("click", () => patch(row, by, buttons, status, result));
      buttons.push(button);
    }
    const what = selection.key === null
      ? "Replace its output at every token"
      : `Replace the value that it reads at ${tokenName(answer, selection.key)}`;
    box.replaceChildren(
      element("h2", { text: `Layer ${row.layer} · head ${row.head}` }),
      element("p", {}, "Contribution ", element("b", { text: signedNumber(row.contribution, formatNumber) }),
        row.direct === null ? "" : `, of the logit directly ${signedNumber(row.direct, formatNumber)}`, "."),
      strongestKeys(row, answer, question),
      element("div", { className: "bar" }, element("span", { text: `${what} ` }), ...buttons, status), result);
  }

  function tokenName(answer, key) {
    return `“${exactText(answer.tokens[key])}” ${key}`;
  }

  // The tokens that contribute most through this head; a button selects one of them.
  function strongestKeys(row, answer, question) {
    const order = row.keys.map((value, key) => [key, value]);
    order.sort((a, b) => Math.abs(b[1]) - Math.abs(a[1]));
    const bar = element("div", { className: "bar", role: "group", "aria-label": "tokens that the head reads" });
    bar.append(element("span", { className: "quiet", text: "it reads" }));
    for (const [key, value] of order.slice(0, STRONGEST)) {
      const pressed = key === current.selection.key;
      bar.append(element("button", {
        type: "button", "aria-pressed": String(pressed),
        text: `${tokenName(answer, key)}: ${signedNumber(value, formatNumber)}`,
        on: { click: () => show(question, answer, { layer: row.layer, head: row.head, key: pressed ? null : key }) },
      }));
    }
    return bar;
  }

  async function patch(row, by, buttons, status, result) {
    const shown = current;
    const { question, answer, selection } = shown;
    const request = {
      model: question.model, ids: answer.ids, path: row.path, head: row.head, by, position: answer.position,
      target: answer.target.id,
    };
    if (selection.key !== null) request.key = selection.key;
    if (answer.against) request.against = answer.against.id;
    for (const button of buttons) button.disabled = true;
    try {
      const job = await post("/api/attribution/patch", request, signal);
      const response = await followJob(job, (state) => {
        status.textContent = state.state === "queued" ? waitingText(state) : state.said || "running";
      }, signal);
      if (shown === current) showResult(row, by, selection, response, result);
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (error.cancelled) showMessage("The patch was cancelled.");
      else showMessage(error.message, "error");
    }
    status.textContent = "";
    for (const button of buttons) button.disabled = false;
  }

  function showResult(row, by, selection, { before, after, next }, result) {
    const change = after - before;
    const sentence = element("p", { dataset: { before, after } }, "Measured: ", element("b", { text: formatNumber(before) }),
      " → ", element("b", { text: formatNumber(after) }), ` (${signedNumber(change, formatNumber)}). `);
    if (by === "zero") {
      // Removing something changes the target by minus its contribution, to first order.
      const estimate = -(selection.key === null ? row.contribution : row.keys[selection.key]);
      sentence.append(element("span", {
        className: "quiet", text: `The gradient estimates ${signedNumber(estimate, formatNumber)}.`,
      }));
    }
    const names = tokenNames(next);
    const body = element("tbody");
    for (const [i, { before: first, after: second }] of next.slice(0, 8).entries()) {
      body.append(element("tr", {}, element("th", { scope: "row", text: names[i] }),
        element("td", { className: "number", text: `${(100 * first).toFixed(1)}%` }),
        element("td", { className: "number", text: `${(100 * second).toFixed(1)}%` })));
    }
    const header = element("tr", {}, element("th", { scope: "col", text: "next token" }),
      element("th", { scope: "col", className: "number", text: "before" }),
      element("th", { scope: "col", className: "number", text: "after" }));
    result.replaceChildren(sentence, element("table", {}, element("thead", {}, header), body));
  }

  return { box, show };
}
