// Heads taken out: what becomes of the next token, and of the loss.
import { cancel, followed, post } from "../api.js";
import { element, note, said, select } from "../dom.js";
import { headName, written } from "./words.js";

export function makeAblate(root, view) {
  const chosen = element("ul", { className: "chosen" });
  const go = element("button", { type: "button", className: "main", text: "Ablate", on: { click: run } });
  const stop = element("button", { type: "button", text: "Cancel", hidden: true });
  const by = select("replace their output by", [["zero", "zero"], ["mean", "its mean"]], view.by, (value) => view.change({ by: value }));
  const status = element("span", { className: "quiet", role: "status" });
  const result = element("div", { className: "result" });
  root.append(element("h3", { text: "Take heads out" }), chosen, element("div", { className: "bar" }, by, go, stop, status), result);
  let running = false;

  function show() {
    const rows = view.ablated.map((id) => {
      const [place, head] = id.split(".").map(Number);
      const at = view.found?.places.find((one) => one.place === place);
      return at ? element("li", {}, headName(at, head), element("button", {
        type: "button", className: "quiet", text: "×", "aria-label": `keep ${headName(at, head)}`,
        on: { click: () => view.change({ ablated: view.ablated.filter((one) => one !== id) }) },
      })) : null;
    }).filter(Boolean);
    const nothing = element("li", { className: "quiet", text: "Tick heads in the grid (x on the keyboard), or take out the one you look at." });
    chosen.replaceChildren(...(rows.length ? rows : [nothing]));
    by.querySelector("select").value = view.by;
    go.disabled = !rows.length || running || !view.found?.model;
    go.title = view.found?.model ? "" : "the recording's model is not open here";
  }

  async function run() {
    const { recording } = view;
    running = true;
    show();
    try {
      const job = await post("/api/look/ablate", { recording, heads: view.ablated.map((id) => id.split(".").map(Number)), by: view.by });
      stop.hidden = false;
      stop.onclick = () => cancel(job).catch((error) => note(error.message, "error"));
      const found = await followed(job, (now) => { status.textContent = now.state === "queued" ? "waiting" : now.said || "running"; }, view.gone);
      if (view.recording === recording) table(found);
    } catch (error) {
      if (error.name === "AbortError") return; // the room was left
      note(error.cancelled ? "The ablation was cancelled." : error.message, error.cancelled ? "" : "error");
    }
    running = false;
    stop.hidden = true;
    status.textContent = "";
    show();
  }

  function table({ next, loss }) {
    const most = Math.max(...next.flatMap((one) => [one.before, one.after]), 1e-9);
    const bar = (value, kind) => element("span", { className: `share ${kind}`, style: `--share: ${value / most}` });
    const rows = next.map(({ token, before, after }) => element("tr", {},
      element("th", { scope: "row", text: `“${written(token).trim() || "␣"}”` }),
      element("td", { className: "bars" }, bar(before, "before"), bar(after, "after")),
      element("td", { className: "number", text: said(before) }), element("td", { className: "number", text: said(after) })));
    const change = loss.before === null ? null : loss.after - loss.before; // a text of one token has no loss
    const head = ["next token", "", "before", "after"].map((text, i) => element("th", { scope: "col", text, className: i > 1 ? "number" : "" }));
    result.replaceChildren(...[
      change !== null && element("p", {}, "Loss on the text ", element("b", { text: said(loss.before) }), " → ", element("b", { text: said(loss.after) }),
        ` (${change >= 0 ? "+" : ""}${said(change)} nats a token)`),
      element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
    ].filter(Boolean));
    result.scrollIntoView({ block: "nearest" });
  }

  view.on("ablated by found", show);
  view.on("recording", () => result.replaceChildren());
  show();
}
