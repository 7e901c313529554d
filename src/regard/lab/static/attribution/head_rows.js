// One row per head: its contribution, and a strip with the contribution of every token that it reads.
import { paintSigned } from "../colour.js";
import { checkbox, element, formatNumber, select } from "../dom.js";
import { exactText } from "../look/next_tokens.js";
import { largestSize, shadeOf, signedNumber } from "./signed_colour.js";

const SHOWN = 40; // heads, unless all are wanted

// `choose({ layer, head, key })` is called with a head, and with a token that it reads or null.
export function createHeadRows(choose) {
  let answer = null;
  let order = "contribution";
  let all = false;
  let marked = null;
  const sort = select("order", [["contribution", "largest first"], ["layer", "by layer"]], order, (value) => {
    order = value;
    draw();
  });
  const showAll = checkbox("all heads", false, (checked) => {
    all = checked;
    draw();
  });
  const readout = element("p", { className: "quiet readout", text: " " });
  const list = element("ul", { className: "heads" });
  const note = element("p", { className: "quiet" });
  const box = element("div", {}, element("div", { className: "bar" }, sort, showAll), readout, list, note);

  function sorted() {
    const rows = [...answer.heads];
    rows.sort((a, b) => Math.abs(b.contribution) - Math.abs(a.contribution));
    const shown = all ? rows : rows.slice(0, SHOWN);
    if (order === "layer") shown.sort((a, b) => a.layer - b.layer || a.head - b.head);
    return shown;
  }

  function draw() {
    if (!answer) return;
    const rows = sorted();
    const largest = largestSize(answer.heads.map((row) => row.contribution));
    const largestKey = largestSize(answer.heads.flatMap((row) => row.keys));
    list.replaceChildren(...rows.map((row) => headRow(row, largest, largestKey)));
    showAll.hidden = answer.heads.length <= SHOWN;
    const direct = answer.heads.some((row) => row.direct !== null);
    note.textContent = `${rows.length} of ${answer.heads.length} heads. The number is what a head contributes by all its `
      + `paths, to first order${direct ? "; in brackets, what it adds to the logit directly" : ""}. The strip has one `
      + `cell per token that the head reads, from −${formatNumber(largestKey)} to +${formatNumber(largestKey)}.`;
    mark(marked);
  }

  function headRow(row, largest, largestKey) {
    const name = `layer ${row.layer} · head ${row.head}`;
    const number = signedNumber(row.contribution, formatNumber);
    const direct = row.direct === null ? "" : ` (${signedNumber(row.direct, formatNumber)})`;
    const button = element("button", {
      type: "button", className: "name", "aria-label": `${name}, ${number}`,
      on: { click: () => choose({ layer: row.layer, head: row.head, key: null }) },
    }, element("span", { text: `${row.layer}.${row.head}` }));
    const value = element("span", { className: "value", text: number });
    Object.assign(value.style, shadeOf(row.contribution, largest));
    const canvas = element("canvas", { role: "img", "aria-label": `contributions of the tokens that ${name} reads` });
    paintSigned(canvas, row.keys, row.keys.length, 1, largestKey);
    const keyAt = (event) => {
      const frame = canvas.getBoundingClientRect();
      const key = Math.floor(((event.clientX - frame.left) / frame.width) * row.keys.length);
      return Math.max(0, Math.min(row.keys.length - 1, key));
    };
    canvas.addEventListener("pointermove", (event) => {
      const key = keyAt(event);
      readout.textContent = `${name} reads “${exactText(answer.tokens[key])}” ${key}: `
        + signedNumber(row.keys[key], formatNumber);
    });
    canvas.addEventListener("pointerleave", () => { readout.textContent = " "; });
    canvas.addEventListener("click", (event) => choose({ layer: row.layer, head: row.head, key: keyAt(event) }));
    return element("li", { dataset: { head: `${row.layer}.${row.head}` } }, button, value,
      element("span", { className: "direct quiet", text: direct }), canvas);
  }

  function mark(selection) {
    marked = selection;
    const name = selection ? `${selection.layer}.${selection.head}` : "";
    for (const item of list.children) {
      const isMarked = item.dataset.head === name;
      item.classList.toggle("marked", isMarked);
      item.querySelector(".name").setAttribute("aria-pressed", String(isMarked));
    }
  }

  return {
    box,
    mark,
    redraw: draw,
    show(shown) {
      answer = shown;
      marked = null;
      draw();
    },
  };
}
