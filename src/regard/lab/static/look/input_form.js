// The input: select a model, enter a text or an image, and run it; and the list of recordings.
import { cancelJob, followJob, get, post, waitingText } from "../api.js";
import { showClosed } from "../closed_item.js";
import { element, select, showMessage } from "../dom.js";
import { forgetDescription } from "./recording_cache.js";

const LARGEST_IMAGE = 8 * 2 ** 20; // bytes

const showError = (error) => showMessage(error.message, "error");

function textArea(name, placeholder, rows) {
  return element("textarea", { name, rows, placeholder, maxlength: 2_000_000, spellcheck: "false" });
}

function labelled(label, area) {
  return element("label", { className: "big" }, element("span", { text: label }), area);
}

export function createInputForm(root, view, reloadWorkspace) {
  const recordings = element("div", { className: "field" });
  const toggle = element("button", {
    type: "button", "aria-controls": "look-input", on: { click: () => view.change({ inputOpen: !view.inputOpen }) },
  });
  const closeButton = element("button", {
    type: "button", className: "quiet", text: "close", title: "close this recording", on: { click: closeRecording },
  });
  const about = element("span", { className: "quiet about" });
  const form = element("form", { id: "look-input", className: "panel", on: { submit: run } });
  const progress = element("div", { className: "job bar", role: "status", hidden: true });
  const unknownTokens = element("p", { className: "error unknown", role: "note", hidden: true });
  root.append(element("div", { className: "bar" }, recordings, about, closeButton, toggle), unknownTokens, form, progress);
  let model = null;
  let image = null;
  let runningJob = null;

  const text = textArea("text", "Type or paste a text, then run the model on it.", 3);
  const target = textArea("target", "If this is empty, the model generates the target.", 2);
  const file = element("input", { type: "file", accept: "image/png,image/jpeg,image/webp" });
  file.addEventListener("change", () => readImage(file.files[0]));
  const preview = element("img", { alt: "the selected image", hidden: true });
  const drop = element("div", { className: "drop" },
    element("label", {}, "Drop an image here, or select one: ", file), preview);
  const inputs = element("div", { className: "fields" });
  const models = element("div");
  const tokens = element("input", {
    type: "number", name: "tokens", min: 1, max: 131072, placeholder: "all", "aria-label": "maximum number of tokens",
  });
  const layers = element("input", {
    type: "text", name: "layers", maxlength: 120, placeholder: "all", size: 10,
    "aria-label": "observe only these layers, for example *.1.*",
  });
  const runButton = element("button", { className: "main", text: "Run" });
  form.append(models, inputs, element("div", { className: "bar" }, runButton,
    element("div", { className: "field" }, element("label", { text: "max. tokens" }), tokens),
    element("div", { className: "field" }, element("label", { text: "layers" }), layers),
    element("span", { className: "quiet", text: "Ctrl+Enter runs it too." })));

  function show() {
    const current = view.workspace.recordings.find((recording) => recording.id === view.recording);
    showRecordings();
    about.textContent = aboutRecording(current);
    showUnknownTokens();
    closeButton.hidden = !current;
    closeButton.title = current?.made ? "close this recording; Undo brings it back" : "close this recording";
    showModels(current);
    showInputs();
    showOpen();
  }

  // The title of a model tells two runs of one architecture apart.
  function aboutRecording(current) {
    if (current) return [current.model_title, current.model_name].filter(Boolean).join(" · ");
    if (view.workspace.recordings.length) return "Run this model on an input to see its heads.";
    return "There are no recordings yet: run a model.";
  }

  function showUnknownTokens() {
    const { description } = view;
    const isCurrent = description && description.id === view.recording;
    unknownTokens.textContent = (isCurrent && description.unknown_tokens) || "";
    unknownTokens.hidden = !unknownTokens.textContent;
  }

  function showRecordings() {
    recordings.replaceChildren();
    const options = [];
    for (const { id, title, tokens: tokenCount } of view.workspace.recordings) {
      const size = tokenCount ? ` · ${tokenCount} tokens` : "";
      options.unshift([id, `${title}${size}`]); // the newest first
    }
    if (!options.length) return;
    if (!view.recording) options.unshift(["", "none of this model"]);
    const list = select("recording", options, view.recording, (id) => view.change({ recording: id }, true));
    recordings.append(...list.childNodes);
  }

  function showModels(currentRecording) {
    const open = view.workspace.models;
    const id = model?.id ?? (view.model || currentRecording?.model);
    model = open.find((candidate) => candidate.id === id) ?? open[0] ?? null;
    models.replaceChildren();
    if (!model) {
      const hint = "No model is open. Start the lab with the folder of a model: regard lab FOLDER.";
      models.append(element("p", { className: "quiet", text: hint }));
      return;
    }
    const options = open.map((candidate) => [candidate.id, `${candidate.title} (${candidate.type})`]);
    models.append(select("model", options, model.id, (selected) => {
      model = open.find((candidate) => candidate.id === selected);
      showInputs();
    }));
  }

  // The inputs that the model reads: an image, a source and a target, or a text.
  function showInputs() {
    const reads = model?.reads;
    runButton.disabled = !model || runningJob !== null;
    if (reads === "image") inputs.replaceChildren(drop);
    else if (reads === "pair") inputs.replaceChildren(labelled("source", text), labelled("target", target));
    else inputs.replaceChildren(labelled("text", text));
    tokens.closest(".field").hidden = reads === "image";
  }

  function showOpen() {
    form.hidden = !view.inputOpen;
    if (view.inputOpen) toggle.textContent = "hide input";
    else toggle.textContent = model?.reads === "image" ? "new image" : "new text";
    toggle.setAttribute("aria-expanded", String(view.inputOpen));
  }

  function readImage(selected) {
    if (!selected) return;
    if (!/^image\/(png|jpeg|webp)$/.test(selected.type)) {
      showMessage("The image must be a PNG, JPEG or WebP file.", "error");
      return;
    }
    if (selected.size > LARGEST_IMAGE) {
      showMessage("The image must not be larger than 8 MB.", "error");
      return;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      image = reader.result;
      preview.src = image;
      preview.hidden = false;
    });
    reader.readAsDataURL(selected);
  }

  async function run(event) {
    event.preventDefault();
    if (runningJob || !model) return;
    const request = { model: model.id };
    if (model.reads === "image") {
      if (!image) {
        showMessage("Select an image first.", "error");
        return;
      }
      request.image = image;
    } else {
      if (!text.value.trim()) {
        showMessage("Write a text first: there is nothing to run.", "error");
        text.focus();
        return;
      }
      request.text = text.value;
      if (model.reads === "pair" && target.value.trim()) request.target = target.value;
      if (tokens.value) request.tokens = Number(tokens.value);
    }
    if (layers.value.trim()) request.layers = layers.value.trim();
    try {
      await follow(await post("/api/look", request));
    } catch (error) {
      showError(error);
    }
  }

  // Show the progress of a job, and its recording once it is done.
  async function follow(job) {
    const bar = element("progress", { "aria-label": "progress" });
    const status = element("span");
    const cancel = element("button", { type: "button", text: "Cancel" });
    cancel.addEventListener("click", () => cancelJob(runningJob).catch(showError));
    progress.replaceChildren(bar, status, cancel);
    progress.hidden = false;
    runningJob = job;
    runButton.disabled = true;
    try {
      const { recording } = await followJob(job, (current) => {
        status.textContent = current.state === "queued" ? waitingText(current) : current.said || "running";
        if (current.of) {
          bar.max = current.of;
          bar.value = current.done;
        } else {
          bar.removeAttribute("value");
        }
      }, view.signal);
      await reloadWorkspace();
      view.change({ recording }, true);
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      if (error.cancelled) showMessage("The run was cancelled.");
      else showError(error);
    } finally {
      runningJob = null;
      progress.hidden = true;
      runButton.disabled = !model;
    }
  }

  // Follow a run that was started before the page was reloaded.
  async function resume() {
    const { jobs } = await get("/api/jobs", {}, view.signal);
    const active = jobs.filter((job) => job.kind === "look" && (job.state === "queued" || job.state === "running"));
    if (active.length && !runningJob) await follow(active.at(-1));
  }

  async function closeRecording() {
    try {
      const { undo } = await post("/api/look/close", { recording: view.recording });
      forgetDescription(view.recording);
      await reloadWorkspace();
      view.change({ recording: view.workspace.recordings.at(-1)?.id ?? "" });
      show();
      if (undo) showClosed("recording", undo, reopenRecording);
    } catch (error) {
      showError(error);
    }
  }

  async function reopenRecording(recording) {
    await reloadWorkspace();
    view.change({ recording }, true);
    show();
  }

  form.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event);
  });
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    readImage(event.dataTransfer.files[0]);
  });
  view.on("workspace recording", show);
  view.on("description", showUnknownTokens);
  view.on("inputOpen", () => {
    showOpen();
    if (view.inputOpen) form.querySelector("textarea, input[type=file]")?.focus();
  });
  show();
  resume().catch((error) => {
    if (error.name !== "AbortError") showError(error);
  });
}
