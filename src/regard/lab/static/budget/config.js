// A config.json: chosen, dropped on the page, or pasted. The lab reads it with the library's own checks.
import { post } from "../api.js";
import { element } from "../dom.js";

const LARGEST = 2 ** 20;

// `given.load(text, title, short)`: it is read; `given.unload()`: back to sizes.
export function config(given) {
  const why = element("p", { className: "error", role: "alert" });
  const file = element("input", { type: "file", accept: ".json,application/json", hidden: true, "aria-label": "config.json" });
  const choose = element("button", { type: "button", text: "config.json …", title: "choose a config.json, or drop one on the page",
    on: { click: () => file.click() } });
  const text = element("textarea", { rows: 5, spellcheck: "false", "aria-label": "text of a config.json",
    placeholder: '{"model_type": "bert", "hidden_size": 768, …}' });
  const paste = element("details", {}, element("summary", { text: "paste one" }), text,
    element("button", { type: "button", text: "read it", on: { click: () => take(text.value) } }));
  const title = element("strong");
  const away = element("button", { type: "button", className: "quiet", text: "× sizes of your own", on: { click: () => { why.textContent = ""; given.unload(); } } });
  const loaded = element("p", { className: "loaded", hidden: true }, title, " from config.json ", away);
  const box = element("div", { className: "config" }, element("div", { className: "bar" }, choose, file, paste), loaded, why);
  file.addEventListener("change", () => { if (file.files[0]) read(file.files[0]); file.value = ""; });

  async function read(one) {
    if (one.size > LARGEST) return refuse(`${one.name} has ${one.size.toLocaleString("en")} bytes; a config.json has at most 1 MiB`);
    return take(await one.text());
  }

  async function take(written) {
    if (written.length > LARGEST) return refuse("this text is longer than 1 MiB; a config.json is not");
    if (!written.trim()) return refuse("there is no text yet; paste a config.json");
    try {
      const found = await post("/api/budget/config", { config: written }, given.signal);
      why.textContent = "";
      paste.open = false;
      given.load(found.config || written, found.title, found.config);
    } catch (error) {
      if (error.name !== "AbortError") refuse(error.message);
    }
  }

  function refuse(line) {
    why.textContent = line;
  }

  const over = (event) => { if (event.dataTransfer?.types.includes("Files")) event.preventDefault(); };
  const drop = (event) => {
    if (!event.dataTransfer?.files.length) return;
    event.preventDefault();
    read(event.dataTransfer.files[0]);
  };
  addEventListener("dragover", over);
  addEventListener("drop", drop);
  return {
    box,
    show(name) { loaded.hidden = !name; title.textContent = name ?? ""; },
    leave() { removeEventListener("dragover", over); removeEventListener("drop", drop); },
  };
}
