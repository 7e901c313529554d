// More about the selected head: its profile, its entropy along the text, its numbers on this text, and its head types,
// which come from probes. All but the types follow the score settings.
import { paint } from "../colour.js";
import { element, formatNumber, svgElement } from "../dom.js";
import { onTheme } from "../theme.js";
import { MEANINGS, typeColour, typesOf } from "./head_types.js";
import { currentLayer, lockedToken, scoresChanged, scoreText } from "./view_state.js";

// Sizes of the charts, in units of their SVG.
const WIDTH = 320;
const HEIGHT = 92;
const BASE = HEIGHT - 16; // the horizontal axis
const TALLEST = HEIGHT - 30;

const TEXT_SCORES = {
  previous: "weight on the token before the query",
  induction: "weight on the token after an earlier occurrence of the present token",
  duplicate: "weight on earlier occurrences of the present token",
};

function sum(values) {
  return values.reduce((total, value) => total + value, 0);
}

// A share of the weight in percent. What is left of a sum of rounded numbers is not exactly 0.
function formatShare(share) {
  if (share < 0.0005) return "Less than 0.1 %";
  return `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
}

function formatOffset(offset) {
  return offset < 0 ? `−${-offset}` : String(offset);
}

// Which scores the numbers of the head belong to, in words; empty for a trained head.
export function scoreNote(view) {
  const { headNumbers } = view;
  if (!headNumbers || !scoresChanged(view)) return "";
  if (headNumbers.as_trained) return `as trained, because ${headNumbers.as_trained}`;
  return `with ${scoreText(view)}`;
}

export function createHeadDetails(root, view) {
  const profile = element("figure", { className: "panel" });
  const entropy = element("figure", { className: "panel" });
  const numbers = element("section", { className: "panel" });
  const types = element("section", { className: "panel" });
  root.append(profile, entropy, numbers, types);

  function show() {
    const layer = currentLayer(view);
    const details = view.headNumbers;
    root.classList.toggle("waiting", !details);
    if (!layer) return;
    showTypes(layer);
    if (!details) return;
    profile.replaceChildren(caption("Profile: mean weight by offset"), ...profileChart(details.profile, layer));
    const subject = layer.grid ? "image" : "text";
    entropy.replaceChildren(caption(`Entropy along the ${subject}`), entropyChart(details.line, details.positions));
    showNumbers(details);
  }

  function caption(text) {
    return element("figcaption", {}, text, " ", element("span", { className: "quiet note", text: scoreNote(view) }));
  }

  function showNumbers(details) {
    const pinned = view.pinnedNumbers?.numbers ?? null;
    const list = element("dl", { className: pinned ? "numbers compared" : "numbers" });
    if (pinned) {
      list.append(element("dt"), element("dd", { text: "B" }), element("dd", { text: "A" }));
    }
    function addNumber(name, value, valueOfA, meaning) {
      list.append(element("dt", { text: name }), element("dd", { text: formatNumber(value) }));
      if (pinned) list.append(element("dd", { className: "of-a", text: formatNumber(valueOfA) }));
      list.append(element("dd", { className: "quiet", text: meaning }));
    }
    const { grid, meanings } = currentLayer(view);
    for (const [name, usual] of Object.entries(view.description.columns)) {
      const meaning = meanings[name] ?? usual;
      // Without this, uniform attention would seem to have a spread below 1 for no reason.
      const { rows, one_key: oneKey } = details;
      const note = name === "spread" && oneKey ? `; ${oneKey} of ${rows} rows see only one key and count as 0` : "";
      addNumber(name, details.numbers[name], pinned?.numbers[name], meaning + note);
    }
    const { reason } = details.on_text;
    for (const [name, meaning] of Object.entries(grid ? {} : TEXT_SCORES)) { // patches are not tokens of a text
      const score = details.on_text[name];
      let note = "no row has such a key";
      if (!score) note = `unknown: ${reason}`;
      else if (score.rows) note = `mean of ${score.rows} rows`;
      addNumber(name, score?.value, pinned?.on_text[name]?.value, `${meaning} (${note})`);
    }
    const title = view.description.image ? "On this image" : "On this text";
    const note = element("span", { className: "quiet note", text: scoreNote(view) });
    numbers.replaceChildren(element("h3", {}, `${title} `, note), list);
  }

  function showTypes(layer) {
    const headTypes = typesOf(view.description, layer.path, view.head);
    types.hidden = !headTypes;
    if (!headTypes) return;
    const title = element("h3", {}, "Head type, from probes ");
    title.append(element("span", { className: "quiet", text: "confidence of each, on other texts than this one" }));
    types.replaceChildren(title);

    // The types of the head come first: another type may have a higher confidence and yet too low a score.
    const sorted = Object.keys(headTypes.confidence).sort((a, b) => headTypes.confidence[b] - headTypes.confidence[a]);
    const others = sorted.filter((type) => !headTypes.labels.includes(type));
    if (headTypes.labels.length) types.append(typeList(headTypes, headTypes.labels));
    const name = headTypes.labels.length ? "Not types of this head" : "No type of this head is clear";
    if (others.length) types.append(element("h4", { text: name }), typeList(headTypes, others));
  }

  function typeList(headTypes, names) {
    const list = element("dl", { className: "sureness" });
    for (const type of names) {
      const confidence = headTypes.confidence[type];
      const style = `--share: ${confidence}; --kind: ${typeColour(type)}`;
      const bar = element("span", { className: "share", style });
      const percent = element("span", { text: `${Math.round(100 * confidence)} %` });
      const entry = element("dd", {}, bar, percent);
      const reason = headTypes.labels.includes(type) ? "" : reasonAgainst(headTypes, type);
      if (reason) entry.append(element("small", { text: reason }));
      list.append(element("dt", { text: type, title: MEANINGS[type], dataset: { type } }), entry);
    }
    return list;
  }

  // Why a type is not one of the head's types.
  function reasonAgainst({ score, confidence }, type) {
    const { kind_least: least } = view.description;
    if (!least || typeof score?.[type] !== "number") return "";
    const { [type]: leastScore } = least.score;
    if (score[type] < leastScore) return `score ${score[type].toFixed(3).replace("-", "−")}, needs ${leastScore}`;
    if (confidence[type] < least.confidence) return `needs ${Math.round(100 * least.confidence)} %`;
    return "";
  }

  function profileChart(data, layer) {
    const reason = layer.cross ? layer.meanings.offset : "No profile was observed here.";
    if (!data) return [element("p", { className: "quiet", text: reason })];
    const isImage = Array.isArray(data.values[0]);
    return isImage ? imageProfile(data) : textProfile(data, Math.max(layer.n, layer.m) - 1);
  }

  // How much weight is at offsets that a chart does not show. `shown` is the sum of the shares of the shown offsets. A
  // recording need not have what is needed to tell.
  function missingWeight({ total }, shown, range) {
    const text = typeof total === "number"
      ? `${formatShare(total - shown)} of the weight is at offsets beyond ${range}, which are not shown.`
      : `Weight at offsets beyond ${range} is not shown; how much there is was not observed.`;
    return element("p", { className: "quiet beyond", text, dataset: { share: total === null ? "" : total - shown } });
  }

  // Bars around offset 0, of at most `longest`. Far offsets without visible weight are left out.
  function textProfile(data, longest) {
    const { values, shares, radius } = data;
    const largest = Math.max(...values, 0);
    let farthest = 8;
    for (const [i, weight] of values.entries()) {
      if (weight > 0 && weight > 0.02 * largest) farthest = Math.max(farthest, Math.abs(i - radius));
    }
    farthest = Math.min(radius, farthest, 64);
    const shown = values.slice(radius - farthest, radius + farthest + 1);
    const peak = formatOffset(values.indexOf(largest) - radius);
    const range = `mean weight at offsets −${farthest} to ${farthest}`;
    const svg = createChart(`${range}; the largest of these, ${formatNumber(largest)}, is at ${peak}`);
    const barWidth = WIDTH / shown.length;
    for (const [i, weight] of shown.entries()) {
      const height = (weight / (largest || 1)) * TALLEST;
      const title = svgElement("title", {}, `offset ${i - farthest}: ${formatNumber(weight)}`);
      svg.append(svgElement("rect", {
        class: "plus",
        x: (i * barWidth + barWidth * 0.08).toFixed(2),
        y: (BASE - height).toFixed(2),
        width: (barWidth * 0.84).toFixed(2),
        height: Math.max(height, 0.4).toFixed(2),
      }, title));
    }
    addText(svg, 0, HEIGHT - 2, `−${farthest}`, "start");
    addText(svg, WIDTH / 2, HEIGHT - 2, "0", "middle");
    addText(svg, WIDTH, HEIGHT - 2, `+${farthest}`, "end");
    addText(svg, WIDTH, 10, `${formatNumber(largest)} at ${peak}`, "end");
    if (!shares || farthest >= longest) return [svg]; // the text has no offsets beyond
    const shownShares = shares.slice(radius - farthest, radius + farthest + 1);
    return [svg, missingWeight(data, sum(shownShares), `±${farthest}`)];
  }

  // Patches of an image have an offset in rows and one in columns.
  function imageProfile(data) {
    const { values, shares, radii } = data;
    const rows = values.length;
    const columns = values[0].length;
    const label = `mean weight by offset, up to ${radii[0]} rows and ${radii[1]} columns in each direction`;
    const canvas = element("canvas", { className: "profile", role: "img", "aria-label": label });
    const weights = Float32Array.from(values.flat(), (weight) => weight ?? NaN);
    let largest = 1e-12;
    for (const weight of weights) {
      if (weight > largest) largest = weight;
    }
    paint(canvas, weights, columns, rows, largest);
    const position = `left: ${(100 * radii[1]) / columns}%; top: ${(100 * radii[0]) / rows}%`;
    const style = `${position}; width: ${100 / columns}%; height: ${100 / rows}%`;
    const query = element("i", { style, title: "the query itself" });
    const box = element("div", { className: "two-ways", style: `aspect-ratio: ${columns} / ${rows}` }, canvas, query);
    if (!shares) return [box];
    return [box, missingWeight(data, sum(shares.flat()), `±${radii[0]} rows and ±${radii[1]} columns`)];
  }

  // The entropy of the queries. A click locks the query there.
  function entropyChart(points, positions) {
    if (!points?.length) return element("p", { className: "quiet", text: "No entropy was observed here." });
    const largest = Math.max(...points.map((value) => value ?? 0), 0);
    const svg = createChart(`entropy of ${positions} queries, at most ${formatNumber(largest)} nats`);
    let path = "";
    for (const [i, value] of points.entries()) {
      if (value === null) continue; // the line is interrupted
      const x = ((i + 0.5) / points.length) * WIDTH;
      const y = BASE - (value / (largest || 1)) * TALLEST;
      const command = path && points[i - 1] !== null ? "L" : "M";
      path += `${command}${x.toFixed(1)} ${y.toFixed(1)}`;
    }
    svg.append(svgElement("path", { d: path, class: "curve" }));
    const query = lockedToken(view, "row");
    if (query !== null) {
      const x = ((query + 0.5) / positions) * WIDTH;
      svg.append(svgElement("line", { x1: x, x2: x, y1: 12, y2: BASE, class: "mark" }));
    }
    addText(svg, 0, HEIGHT - 2, "0", "start");
    addText(svg, WIDTH, HEIGHT - 2, String(positions - 1), "end");
    addText(svg, WIDTH, 10, `${formatNumber(largest)} nats`, "end");
    svg.addEventListener("click", (event) => {
      const box = svg.getBoundingClientRect();
      const row = Math.floor(((event.clientX - box.left) / box.width) * positions);
      view.change({ direction: "from", row: Math.max(0, Math.min(positions - 1, row)), key: null });
    });
    return svg;
  }

  function createChart(label) {
    const svg = svgElement("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
    svg.append(svgElement("line", { x1: 0, x2: WIDTH, y1: BASE, y2: BASE, class: "base" }));
    return svg;
  }

  function addText(svg, x, y, text, anchor) {
    svg.append(svgElement("text", { x, y, "text-anchor": anchor }, text));
  }

  view.on("description row headTypes headNumbers pinnedNumbers", show);
  const stopTheme = onTheme(show);
  show();
  return stopTheme;
}
