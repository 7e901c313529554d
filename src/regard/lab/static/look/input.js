// What is read: choose a model, give it a text or a picture, run it; and the recordings there are.
import { cancel, followed, get, post } from "../api.js";
import { element, note, select } from "../dom.js";
import { forget } from "./pinned.js";

const LARGEST = 8 * 2 ** 20; // bytes of a picture

export function makeInput(root, view, reload) {
  const recordings = element("div", { className: "field" });
  const toggle = element("button", { type: "button", "aria-controls": "look-input", on: { click: () => view.change({ input: !view.input }) } });
  const close = element("button", { type: "button", className: "quiet", text: "close", title: "close this recording", on: { click: shut } });
  const about = element("span", { className: "quiet about" });
  const form = element("form", { id: "look-input", className: "panel", on: { submit: run } });
  const job = element("div", { className: "job bar", role: "status", hidden: true });
  root.append(element("div", { className: "bar" }, recordings, about, close, toggle), form, job);
  let model = null;
  let image = null;
  let running = null;

  const label = (text, made) => element("label", { className: "big" }, element("span", { text }), made);
  const area = (name, placeholder, rows) => element("textarea", { name, rows, placeholder, maxlength: 2_000_000, spellcheck: "false" });
  const text = area("text", "Type or paste a text.", 4);
  const target = area("target", "Left empty, the model writes its own answer.", 2);
  const file = element("input", { type: "file", accept: "image/png,image/jpeg,image/webp", on: { change: () => take(file.files[0]) } });
  const preview = element("img", { alt: "the picture to be read", hidden: true });
  const drop = element("div", { className: "drop" }, element("label", {}, "Drop a picture here, or choose one: ", file), preview);
  const fields = element("div", { className: "fields" });
  const models = element("div");
  const tokens = element("input", { type: "number", name: "tokens", min: 1, max: 131072, placeholder: "all", "aria-label": "read at most so many tokens" });
  const layers = element("input", { type: "text", name: "layers", maxlength: 120, placeholder: "all", size: 10, "aria-label": "watch only these layers, e.g. *.1.*" });
  const go = element("button", { className: "main", text: "Run" });
  form.append(models, fields, element("div", { className: "bar" }, go,
    element("div", { className: "field" }, element("label", { text: "tokens at most" }), tokens),
    element("div", { className: "field" }, element("label", { text: "layers" }), layers),
    element("span", { className: "quiet", text: "Ctrl+Enter runs it too." })));

  function show() {
    const { models: all, recordings: made } = view.workspace;
    const title = (one) => `${one.title}${one.tokens ? ` · ${one.tokens} tokens` : ""}`;
    const newest = [...made].reverse();
    recordings.replaceChildren();
    if (newest.length) recordings.append(...select("recording", newest.map((one) => [one.id, title(one)]), view.recording, (id) => view.change({ recording: id }, true)).childNodes);
    const now = made.find((one) => one.id === view.recording);
    about.textContent = now ? now.model_name : "Nothing is recorded yet: run a model.";
    close.hidden = !now;
    close.title = now?.made ? "close this recording and remove it" : "close this recording";
    models.replaceChildren();
    if (!all.length) models.append(element("p", { className: "quiet", text: "No model is open. Start the lab with a model's folder: regard lab FOLDER." }));
    model = all.find((one) => one.id === (model?.id ?? (view.model || now?.model))) ?? all[0] ?? null;
    if (model) models.append(select("model", all.map((one) => [one.id, `${one.title} (${one.type})`]), model.id, (id) => { model = all.find((one) => one.id === id); kind(); }));
    kind();
    opened();
  }

  function kind() {
    const reads = model?.reads;
    go.disabled = !model || running !== null;
    if (reads === "image") fields.replaceChildren(drop);
    else if (reads === "pair") fields.replaceChildren(label("source", text), label("target", target));
    else fields.replaceChildren(label("text", text));
    const plain = reads !== "image";
    tokens.closest(".field").hidden = !plain;
  }

  function opened() {
    form.hidden = !view.input;
    toggle.textContent = view.input ? "hide input" : model?.reads === "image" ? "new picture" : "new text";
    toggle.setAttribute("aria-expanded", String(view.input));
  }

  function take(given) {
    if (!given) return;
    if (!/^image\/(png|jpeg|webp)$/.test(given.type)) return note("A picture must be PNG, JPEG or WebP.", "error");
    if (given.size > LARGEST) return note("The picture is larger than 8 MB.", "error");
    const reader = new FileReader();
    reader.addEventListener("load", () => {
      image = reader.result;
      preview.src = image;
      preview.hidden = false;
    });
    reader.readAsDataURL(given);
  }

  async function run(event) {
    event.preventDefault();
    if (running || !model) return;
    const body = { model: model.id };
    if (model.reads === "image") {
      if (!image) return note("Choose a picture first.", "error");
      body.image = image;
    } else {
      if (!text.value.trim()) return text.focus();
      body.text = text.value;
      if (model.reads === "pair" && target.value.trim()) body.target = target.value;
      if (tokens.value) body.tokens = Number(tokens.value);
    }
    if (layers.value.trim()) body.layers = layers.value.trim();
    try {
      await follow(await post("/api/look", body));
    } catch (error) {
      note(error.message, "error");
    }
  }

  // A job's progress, and what it has made once it is done.
  async function follow(started) {
    const bar = element("progress", { "aria-label": "progress" });
    const said = element("span");
    const stop = element("button", { type: "button", text: "Cancel", on: { click: () => cancel(running).catch((error) => note(error.message, "error")) } });
    job.replaceChildren(bar, said, stop);
    job.hidden = false;
    running = started;
    go.disabled = true;
    try {
      const { recording } = await followed(started, (now) => {
        said.textContent = now.state === "queued" ? "waiting" : now.said || "running";
        if (now.of) Object.assign(bar, { max: now.of, value: now.done });
        else bar.removeAttribute("value");
      }, view.gone);
      await reload();
      view.change({ recording, input: false }, true);
    } catch (error) {
      if (error.name === "AbortError") return; // the room was left
      note(error.cancelled ? "The run was cancelled." : error.message, error.cancelled ? "" : "error");
    } finally {
      running = null;
      job.hidden = true;
      go.disabled = !model;
    }
  }

  // A run that was started before the page was loaded anew.
  async function resume() {
    const { jobs } = await get("/api/jobs", {}, view.gone);
    const last = jobs.filter((one) => one.kind === "look" && (one.state === "queued" || one.state === "running")).at(-1);
    if (last && !running) await follow(last);
  }

  async function shut() {
    try {
      await post("/api/look/close", { recording: view.recording });
      forget(view.recording);
      await reload();
      view.change({ recording: view.workspace.recordings.at(-1)?.id ?? "" });
      show();
    } catch (error) {
      note(error.message, "error");
    }
  }

  form.addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) run(event); });
  for (const name of ["dragover", "drop"]) {
    drop.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragover");
      if (name === "drop") take(event.dataTransfer.files[0]);
    });
  }
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  view.on("workspace recording", show);
  view.on("input", () => { opened(); if (view.input) form.querySelector("textarea, input[type=file]")?.focus(); });
  show();
  resume().catch((error) => { if (error.name !== "AbortError") note(error.message, "error"); });
}
