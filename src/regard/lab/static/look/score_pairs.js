// The score of the locked weight as a sum over pairs: a part of the model that adds to the query, and one that adds to
// the key. A job computes it when it is requested.
import { cancelJob, followJob, post, waitingText } from "../api.js";
import { element, formatNumber, select } from "../dom.js";
import { headName } from "./token_labels.js";
import { currentLayer, lockedToken, scoresChanged } from "./view_state.js";

const FIRST_ROWS = 8;
const SORTS = [["value", "size"], ["query", "query part"], ["key", "key part"]];
const ORDER = ["token embedding", "position embedding", "embedding", "head", "feed-forward", "other", "constant"];
const EXPLANATION = "Each part of the model adds to the query and to the key. With the scale of every norm frozen, the "
  + "score is the sum over all pairs of parts.";

export function createScorePairs(view) {
  const button = element("button", { type: "button", text: "Split the score into parts", on: { click: run } });
  const stopButton = element("button", { type: "button", text: "Cancel", hidden: true });
  const status = element("span", { className: "quiet", role: "status" });
  const reason = element("p", { className: "quiet" });
  const result = element("div", { className: "pair-table" });
  const root = element("section", { className: "pairs" },
    element("h4", { text: "Which parts make this score" }),
    element("p", { className: "quiet", text: EXPLANATION }),
    element("div", { className: "bar" }, button, stopButton, status), reason, result);
  let job = null; // the job that runs
  let sort = "value";
  let showsAll = false;

  function place() {
    return [view.recording, view.layerIndex, view.head, lockedToken(view, "row"), lockedToken(view, "key")].join(" ");
  }

  // Why the score cannot be split; an empty text if it can.
  function obstacle(steps) {
    if (!view.description?.model) return `The score cannot be split. ${view.description?.no_model ?? ""}`;
    if (currentLayer(view)?.cross) return "The score cannot be split: the layer reads another sequence.";
    if (currentLayer(view)?.grid) return "The score cannot be split: the model reads images.";
    if (view.batch) return "The score cannot be split: only the first text of a batch can.";
    if (steps.hidden_as_trained) return "There is no score to split: the mask hides this key.";
    return "";
  }

  // `steps` is the computation of the weight that is shown.
  function update(steps) {
    const text = obstacle(steps);
    reason.textContent = text;
    reason.hidden = !text;
    button.disabled = Boolean(text) || job !== null;
    if (result.dataset.place !== place()) clear();
  }

  function clear() {
    result.replaceChildren();
    delete result.dataset.place;
    delete result.dataset.score;
    showsAll = false;
  }

  async function run() {
    const started = place();
    const request = { recording: view.recording, place: view.layerIndex, head: view.head };
    request.row = lockedToken(view, "row");
    request.key = lockedToken(view, "key");
    button.disabled = true;
    reason.hidden = true;
    clear();
    try {
      job = await post("/api/look/pairs", request);
      stopButton.hidden = false;
      stopButton.onclick = () => cancelJob(job).catch(showError);
      const parts = await followJob(job, showProgress, view.signal);
      if (place() === started) showParts(parts);
    } catch (error) {
      if (error.name === "AbortError") return; // the page was left
      showError(error);
    }
    job = null;
    stopButton.hidden = true;
    status.textContent = "";
    button.disabled = false;
  }

  function showError(error) {
    reason.textContent = error.cancelled ? "The computation was cancelled." : `The score cannot be split: ${error.message}`;
    reason.hidden = false;
  }

  function showProgress(current) {
    const share = current.of ? ` ${Math.round((100 * current.done) / current.of)}%` : "";
    status.textContent = current.state === "queued" ? waitingText(current) : `${current.said || "running"}${share}`;
  }

  function showParts(parts) {
    result.dataset.place = place();
    result.dataset.score = parts.score;
    const notes = [`Score ${formatNumber(parts.score)} = sum of ${parts.count} pairs`];
    if (parts.softcap) notes.push(`before the softcap of ${parts.softcap}`);
    if (scoresChanged(view)) notes.push("of the head as trained");
    if (!parts.exact) notes.push("computed in float32, while the model ran in 16 bits");
    const sorting = select("sort by", SORTS, sort, (value) => {
      sort = value;
      showRows();
    });
    const rows = element("tbody");
    const header = element("tr", {},
      element("th", { scope: "col", text: "query part" }), element("th", { scope: "col", text: "key part" }),
      element("th", { scope: "col", text: "adds", className: "number" }));
    const more = element("button", { type: "button", className: "quiet", on: { click: () => {
      showsAll = !showsAll;
      showRows();
    } } });
    const largest = Math.max(...parts.pairs.map(({ value }) => Math.abs(value)), 1e-12);

    function showRows() {
      const sorted = sortedPairs(parts.pairs, sort);
      const shown = showsAll ? sorted : sorted.slice(0, FIRST_ROWS);
      rows.replaceChildren(...shown.map((pair) => pairRow(view, pair, largest)));
      const hidden = parts.count - shown.length;
      if (hidden > 0) {
        const sum = parts.score - shown.reduce((total, { value }) => total + value, 0);
        rows.append(element("tr", { className: "rest" },
          element("th", { scope: "row", colspan: 2, text: `${hidden} other pairs` }),
          element("td", { className: "number", text: signedNumber(sum) })));
      }
      more.hidden = parts.pairs.length <= FIRST_ROWS;
      more.textContent = showsAll ? "show fewer" : `show ${parts.pairs.length} pairs`;
    }

    showRows();
    result.replaceChildren(element("p", {}, `${notes.join(", ")}.`), element("div", { className: "bar" }, sorting),
      element("table", {}, element("thead", {}, header), rows), more);
  }

  return { root, update };
}

// The pairs by size, or by the place of one of their parts in the model. Equal parts are sorted by size.
export function sortedPairs(pairs, sort) {
  const bySize = [...pairs].sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  if (sort === "value") return bySize;
  return bySize.sort((a, b) => comparePlaces(a[sort], b[sort]));
}

function comparePlaces(a, b) {
  if (a === null || b === null) return Number(a === null) - Number(b === null);
  const byKind = ORDER.indexOf(a.kind) - ORDER.indexOf(b.kind);
  return byKind || a.path.localeCompare(b.path, "en", { numeric: true }) || (a.head ?? 0) - (b.head ?? 0);
}

function pairRow(view, pair, largest) {
  const share = Math.abs(pair.value) / largest;
  const bar = element("span", { className: pair.value < 0 ? "share after" : "share", style: `--share: ${share}` });
  return element("tr", {},
    element("td", {}, partName(view, pair.query)), element("td", {}, partName(view, pair.key)),
    element("td", { className: "number" }, signedNumber(pair.value), bar));
}

// The name of a part. A head that was recorded is a button that shows it.
function partName(view, part) {
  if (part === null) return "position bias";
  if (part.kind === "constant") return "biases";
  if (part.head === null) return element("span", { title: part.path, text: `${part.kind} ${part.block}`.trim() });
  const layer = view.description.places.find(({ path }) => path === part.path);
  if (!layer?.heads.includes(part.head)) return `${part.path} · head ${part.head}`;
  return element("button", { type: "button", className: "quiet part", text: headName(layer, part.head),
    title: "show this head", on: { click: () => view.change({ layerIndex: layer.place, head: part.head }) } });
}

function signedNumber(x) {
  return x < 0 ? formatNumber(x) : `+${formatNumber(x)}`;
}
