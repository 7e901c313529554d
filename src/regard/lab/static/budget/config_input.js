// A config.json: selected, dropped on the page, or pasted. The lab checks it.
import { post } from "../api.js";
import { element } from "../dom.js";

const LARGEST = 2 ** 20; // bytes

// `page.loadConfig(text, sharedConfig)` is called with a valid config, `page.unloadConfig()` when it is removed.
export function createConfigInput(page) {
  const errorText = element("p", { className: "error", role: "alert" });
  const file = element("input", {
    type: "file", accept: ".json,application/json", hidden: true, "aria-label": "config.json",
  });
  const selectButton = element("button", {
    type: "button", text: "config.json …", title: "select a config.json, or drop one on the page",
    on: { click: () => file.click() },
  });
  const text = element("textarea", {
    rows: 5, spellcheck: "false", "aria-label": "text of a config.json",
    placeholder: '{"model_type": "bert", "hidden_size": 768, …}',
  });
  const loadButton = element("button", { type: "button", text: "load", on: { click: () => load(text.value) } });
  const paste = element("details", {}, element("summary", { text: "paste JSON" }), text, loadButton);
  const title = element("strong");
  const removeButton = element("button", { type: "button", className: "quiet", text: "× custom sizes" });
  removeButton.addEventListener("click", () => {
    errorText.textContent = "";
    page.unloadConfig();
  });
  const loaded = element("p", { className: "loaded", hidden: true }, title, " from config.json ", removeButton);
  const bar = element("div", { className: "bar" }, selectButton, file, paste);
  const box = element("div", { className: "config" }, bar, loaded, errorText);

  file.addEventListener("change", () => {
    if (file.files[0]) readFile(file.files[0]);
    file.value = ""; // so that the same file can be selected again
  });

  async function readFile(selected) {
    if (selected.size > LARGEST) {
      const size = selected.size.toLocaleString("en");
      errorText.textContent = `${selected.name} must have at most 1 MiB, got ${size} bytes`;
      return;
    }
    await load(await selected.text());
  }

  async function load(config) {
    if (config.length > LARGEST) {
      errorText.textContent = "the text of a config.json must have at most 1 MiB";
      return;
    }
    if (!config.trim()) {
      errorText.textContent = "the text is empty; paste a config.json";
      return;
    }
    try {
      const response = await post("/api/budget/config", { config }, page.signal);
      errorText.textContent = "";
      paste.open = false;
      page.loadConfig(response.config || config, response.config);
    } catch (error) {
      if (error.name !== "AbortError") errorText.textContent = error.message;
    }
  }

  // Without this the browser would leave the page to show the file.
  function allowDrop(event) {
    if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
  }

  function dropFile(event) {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    readFile(event.dataTransfer.files[0]);
  }

  addEventListener("dragover", allowDrop);
  addEventListener("drop", dropFile);
  return {
    box,
    // The name of the loaded model, or null.
    show(name) {
      loaded.hidden = !name;
      title.textContent = name ?? "";
    },
    leave() {
      removeEventListener("dragover", allowDrop);
      removeEventListener("drop", dropFile);
    },
  };
}
