// The ledger as a list: found by words, source and verdict.
import { element } from "../dom.js";
import { verdict, VERDICTS } from "./words.js";

export function list(ledger, state, pick) {
  const search = element("input", { type: "search", placeholder: "find", "aria-label": "find claims by words", value: state.get("q"), on: { input: filter } });
  const sources = [...new Set(ledger.claims.flatMap((one) => one.sources))].sort();
  const source = element("select", { "aria-label": "source", on: { change: filter } },
    element("option", { value: "", text: "all sources" }), ...sources.map((name) => element("option", { value: name, text: `document ${name}` })));
  source.value = sources.includes(state.get("source")) ? state.get("source") : "";
  const chips = Object.keys(VERDICTS).filter((name) => ledger.claims.some((one) => one.verdict === name)).map((name) => {
    const many = ledger.claims.filter((one) => one.verdict === name).length;
    const chip = element("button", { type: "button", className: "chip", "aria-pressed": String(state.get("verdict") === name), dataset: { verdict: name } }, verdict(name), ` ${many}`);
    chip.addEventListener("click", () => {
      const on = chip.getAttribute("aria-pressed") !== "true";
      for (const other of chips) other.setAttribute("aria-pressed", String(on && other === chip));
      filter();
    });
    return chip;
  });
  const count = element("p", { className: "quiet", role: "status" });
  const items = new Map();
  const parts = Object.entries(ledger.parts).map(([part, names]) => {
    const rows = names.map((name) => {
      const one = ledger.claims.find((claim) => claim.id === name);
      const ran = element("span", { className: "ran" });
      const link = element("a", { href: `?room=claims&claim=${name}` }, element("span", { className: "id", text: one.title }), ran, verdict(one.verdict));
      link.addEventListener("click", (event) => {
        if (event.metaKey || event.ctrlKey || event.shiftKey) return;
        event.preventDefault();
        pick(name);
      });
      const row = element("li", {}, link);
      items.set(name, { row, link, ran, one, words: `${name} ${one.title} ${one.statement} ${one.correction} ${one.latex}`.toLowerCase() });
      return row;
    });
    return { box: element("section", {}, element("h3", { text: part }), element("ul", {}, ...rows)), names };
  });
  const box = element("div", { className: "ledger" },
    element("div", { className: "filters" }, search, source, element("div", { className: "chips", role: "group", "aria-label": "verdict" }, ...chips)),
    count, element("div", { className: "parts" }, ...parts.map((part) => part.box)));

  function filter() {
    const words = search.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = chips.find((chip) => chip.getAttribute("aria-pressed") === "true")?.dataset.verdict ?? "";
    let many = 0;
    for (const { row, one, words: text } of items.values()) {
      row.hidden = !(words.every((word) => text.includes(word)) && (!source.value || one.sources.includes(source.value)) && (!wanted || one.verdict === wanted));
      many += row.hidden ? 0 : 1;
    }
    for (const { box: part, names } of parts) part.hidden = names.every((name) => items.get(name).row.hidden);
    count.textContent = many === items.size ? `${many} claims` : many ? `${many} of ${items.size} claims` : "No claim is like that.";
    state.set({ q: search.value.trim(), source: source.value, verdict: wanted });
  }

  filter();
  return {
    box,
    mark(name) {
      for (const [id, { link }] of items) {
        if (id === name) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    show(name) { items.get(name)?.row.scrollIntoView({ block: "nearest" }); },
    // What a run with the recorded numbers found.
    ran(name, result) {
      const { ran } = items.get(name);
      ran.textContent = result === null ? "…" : result.error ? "!" : result.as_recorded ? "reproduced" : "changed";
      ran.className = `ran ${result === null ? "" : result.error || !result.as_recorded ? "bad" : "good"}`;
      ran.title = result === null ? "" : result.error ?? (result.as_recorded ? `in ${result.seconds.toFixed(1)} s` : `now: ${result.verdict}`);
    },
    clear(name) {
      items.get(name).ran.textContent = "";
    },
    visible: () => [...items].filter(([, { row }]) => !row.hidden).map(([name]) => name),
  };
}
