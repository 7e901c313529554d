// What is attributed: a model, a text, the position of the prediction, the predicted token and one to compare it with.
import { cancelJob, waitingText } from "../api.js";
import { element, formatNumber, select, showMessage } from "../dom.js";
import { exactText, tokenNames } from "../look/next_tokens.js";

const SHOWN_CHOICES = 8; // next tokens that can be chosen

// `ask(changes)` is called when something else is to be attributed.
export function createPredictionForm(models, question, ask) {
  const text = element("textarea", { name: "text", rows: 4, maxlength: 65_536, spellcheck: "false" });
  const runButton = element("button", { className: "main", text: "Attribute" });
  const cancelButton = element("button", { type: "button", text: "Cancel", hidden: true });
  const status = element("span", { className: "quiet", role: "status" });
  const problem = element("p", { className: "error", role: "alert" });
  const options = models.map(({ id, title, type }) => [id, `${title} (${type})`]);
  const modelList = select("model", options, question.model, () => {});
  const box = element("form", { on: { submit: run } }, modelList,
    element("label", { className: "big" }, element("span", { text: "text" }), text),
    element("div", { className: "bar" }, runButton, cancelButton, status,
      element("span", { className: "quiet hint", text: "Ctrl+Enter runs it too." })), problem);
  const choices = element("div", { className: "choices" });
  box.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
  });

  function run(event) {
    event.preventDefault();
    if (!text.value.trim()) {
      showError("Write a text first: there is nothing to predict.");
      text.focus();
      return;
    }
    const model = modelList.querySelector("select").value;
    ask({ model, text: text.value, position: null, target: null, against: null });
  }

  function showQuestion() {
    text.value = question.text;
    modelList.querySelector("select").value = question.model;
  }

  function showError(message) {
    problem.textContent = message;
  }

  function setRunning(running) {
    runButton.disabled = running;
    if (running) problem.textContent = "";
    if (!running) {
      status.textContent = "";
      cancelButton.hidden = true;
    }
  }

  function follow(job) {
    cancelButton.hidden = false;
    cancelButton.onclick = () => cancelJob(job).catch((error) => showMessage(error.message, "error"));
  }

  function showProgress(job) {
    status.textContent = job.state === "queued" ? waitingText(job) : job.said || "running";
  }

  // The attributed number in words, as nodes.
  function describe(answer) {
    const name = (token) => element("b", { text: `“${exactText(token.token)}”` });
    const nodes = ["Logit of ", name(answer.target)];
    if (answer.against) nodes.push(" minus that of ", name(answer.against));
    const last = answer.position === answer.tokens.length - 1;
    const place = last ? "the last token" : `token ${answer.position}, “${exactText(answer.tokens[answer.position])}”`;
    nodes.push(` after ${place}: `, element("b", { text: formatNumber(answer.value) }), ".");
    return nodes;
  }

  // Buttons for the likeliest next tokens: one list for the target, one for the token that it is compared with.
  function showChoices(answer) {
    const tokens = [...answer.next.slice(0, SHOWN_CHOICES)];
    for (const token of [answer.target, answer.against]) {
      if (token && !tokens.some(({ id }) => id === token.id)) tokens.push(token);
    }
    const names = tokenNames(tokens);
    const targets = element("div", { className: "bar", role: "group", "aria-label": "predicted token" });
    const others = element("div", { className: "bar", role: "group", "aria-label": "compared with" });
    targets.append(element("span", { className: "quiet", text: "predicted token" }));
    others.append(element("span", { className: "quiet", text: "compared with" }));
    others.append(choice("nothing", !answer.against, () => ask({ against: null, target: answer.target.id })));
    for (const [i, token] of tokens.entries()) {
      const share = token.before === undefined ? "" : ` ${(100 * token.before).toFixed(1)}%`;
      const isTarget = token.id === answer.target.id;
      targets.append(choice(names[i] + share, isTarget, () => ask({ target: token.id, against: null })));
      if (!isTarget) {
        const isOther = token.id === answer.against?.id;
        others.append(choice(names[i], isOther, () => ask({ target: answer.target.id, against: token.id })));
      }
    }
    choices.replaceChildren(targets, others);
  }

  function choice(label, pressed, act) {
    return element("button", { type: "button", text: label, "aria-pressed": String(pressed), on: { click: act } });
  }

  showQuestion();
  return { box, choices, showQuestion, showError, setRunning, follow, showProgress, describe, showChoices };
}
