// The Attribution page: what a prediction owes to each token and each head, and what changes if a head is patched.
import { followJob, get, post } from "./api.js";
import { createHeadRows } from "./attribution/head_rows.js";
import { createPatchPanel } from "./attribution/patch_panel.js";
import { createPredictionForm } from "./attribution/prediction_form.js";
import { createLogitParts } from "./attribution/logit_parts.js";
import { createTokenStrip } from "./attribution/token_strip.js";
import { element, showMessage } from "./dom.js";
import { onTheme } from "./theme.js";

// A text that repeats itself, so that the heads of the induction circuit decide.
const EXAMPLE = "Return the mean of xs.\n\nReturn the mean of";
const LONGEST_IN_ADDRESS = 1500; // characters of a text in the address; longer ones are not restored by a reload

export async function open(root, state) {
  const control = new AbortController(); // aborted when the page is left
  const { models } = await get("/api/workspace", {}, control.signal);
  const textModels = models.filter((model) => model.reads === "text");
  if (!textModels.length) {
    const hint = "No language model is open. Start the lab with the folder of one: regard lab FOLDER.";
    root.append(element("p", { className: "quiet", text: hint }));
    return null;
  }

  // What is asked for, and the answer that is shown. `selected` is a head, and a key of it or null.
  const question = questionFromAddress();
  let answer = null;
  let selected = null;
  let runNumber = 0;

  const form = createPredictionForm(textModels, question, ask);
  const summary = element("p", { className: "summary", role: "status" });
  const strip = createTokenStrip((position) => ask({ position, target: null, against: null }));
  const parts = createLogitParts();
  const heads = createHeadRows(select);
  const patching = createPatchPanel(control.signal);
  const results = element("div", { className: "results", hidden: true },
    element("section", { className: "panel" }, element("h2", { text: "Prediction" }), summary, form.choices, strip.box),
    element("section", { className: "panel" }, element("h2", { text: "Heads and the tokens they read" }), heads.box),
    element("section", { className: "panel patching" }, patching.box),
    element("section", { className: "panel" }, parts.box));
  root.append(element("section", { className: "panel asking" }, form.box), results);

  function questionFromAddress() {
    const model = textModels.find(({ id }) => id === state.get("model")) ?? textModels[0];
    const number = (name) => (state.get(name) === "" ? null : Math.max(0, Math.trunc(state.number(name, 0))));
    return {
      model: model.id, text: state.get("text") || EXAMPLE, position: number("position"),
      target: number("target"), against: number("against"),
    };
  }

  function writeAddress() {
    const { model, text, position, target, against } = question;
    state.set({
      model: model === textModels[0].id ? "" : model,
      text: text === EXAMPLE || text.length > LONGEST_IN_ADDRESS ? "" : text,
      position, target, against,
      head: selected ? `${selected.layer}.${selected.head}` : "",
      key: selected?.key ?? "",
    });
  }

  // Ask again with some things changed. Only the last of several questions is answered.
  async function ask(changes = {}) {
    Object.assign(question, changes);
    const number = ++runNumber;
    const request = { model: question.model, text: question.text };
    for (const name of ["position", "target", "against"]) {
      if (question[name] !== null) request[name] = question[name];
    }
    form.setRunning(true);
    results.classList.add("old");
    try {
      const job = await post("/api/attribution", request, control.signal);
      form.follow(job);
      const result = await followJob(job, form.showProgress, control.signal);
      if (number === runNumber) show(result);
    } catch (error) {
      if (error.name === "AbortError" || number !== runNumber) return;
      form.setRunning(false);
      if (error.cancelled) showMessage("The attribution was cancelled.");
      else form.showError(error.message);
    }
  }

  function show(result) {
    answer = result;
    form.setRunning(false);
    results.hidden = false;
    results.classList.remove("old");
    const wanted = selectionFromAddress();
    selected = null;
    summary.replaceChildren(...form.describe(answer));
    form.showChoices(answer);
    strip.show(answer);
    heads.show(answer);
    parts.show(answer);
    if (wanted) select(wanted);
    else patching.show(question, answer, null);
    writeAddress();
    root.dataset.shown = JSON.stringify({ value: answer.value, position: answer.position, target: answer.target.id });
  }

  function selectionFromAddress() {
    const [layer, head] = state.get("head").split(".").map(Number);
    const row = answer.heads.find((candidate) => candidate.layer === layer && candidate.head === head);
    if (!row) return null;
    const key = state.get("key") === "" ? null : state.number("key", 0);
    return { layer, head, key: key !== null && key < answer.tokens.length ? key : null };
  }

  function select(selection) {
    selected = selection;
    heads.mark(selected);
    patching.show(question, answer, selected);
    writeAddress();
  }

  const stopTheme = onTheme(() => {
    strip.redraw();
    heads.redraw();
  });
  const stopListening = state.onChange(() => {
    Object.assign(question, questionFromAddress());
    form.showQuestion();
    ask();
  });
  await ask();
  return () => {
    control.abort();
    stopTheme();
    stopListening();
  };
}
