// The six steps of the tour. Each has a title, a part of the page, and a function that measures what the step says: it
// returns the view (fields of the address) and the text.
import { element, formatNumber } from "../dom.js";
import { withTerms } from "../glossary.js";
import { headName, longLabel } from "../look/token_labels.js";

const PART = (label) => `section[aria-label="${label}"]`;

// A measured number. Its exact value is kept for those who check it.
function number(name, value, text = formatNumber(value)) {
  return element("b", { text, dataset: { name, value } });
}

function percent(name, value) {
  return number(name, value, `${Math.round(100 * value)} %`);
}

// A head by its name on the page; with a capital letter where it begins a sentence.
function headText(role, { layer, head, place }, begins = false) {
  const name = headName(layer, head);
  const text = begins ? name[0].toUpperCase() + name.slice(1) : name;
  return element("b", { text, dataset: { role, head: `${place}.${head}` } });
}

// Tokens are named with their positions, so that a sentence stays true if the reader locks other tokens.
function tokenText(description, index) {
  return longLabel(description, description.places[0], "queries", index);
}

// Why a token of the second copy is not a repeated one; empty if all are.
function differentTokens(description, firstCopy, length) {
  const texts = description.texts[description.places[0].queries];
  const reasons = [];
  for (let index = firstCopy; index < texts.length; index++) {
    const earlier = index - length;
    if (texts.slice(0, index).includes(texts[index])) continue;
    const space = texts[index] === ` ${texts[earlier]}` ? " with a space" : "";
    reasons.push(`${tokenText(description, index)}${space} is another token than ${tokenText(description, earlier)}`);
  }
  return reasons.length ? ` (${reasons.join("; ")})` : "";
}

function headSelector({ place, head }) {
  return `.head[data-place="${place}"][data-head="${head}"]`;
}

// The verb of a change; it is measured like everything else.
function verb(before, after) {
  if (after > before) return "rises";
  return after < before ? "falls" : "stays";
}

function mean(values) {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

function view(description, { place, head }, fields = {}) {
  return { recording: description.id, place, head, ...fields };
}

// The largest weight of a query, and its key.
function largestOf({ values, n }, query) {
  let key = 0;
  for (let j = 1; j < n; j++) {
    if (values[n * query + j] > values[n * query + key]) key = j;
  }
  return { key, weight: values[n * query + key] };
}

async function textAndTokens(measurements) {
  const description = await measurements.recording("once");
  const { other } = await measurements.heads();
  const { n } = description.places[0];
  const shown = [1, 2, 3].map((index) => tokenText(description, index)).join(", ");
  return {
    fields: view(description, other, { row: n - 1 }),
    text: [
      ...withTerms("A model reads a text as [[token|tokens]]: words, or parts of words. This text has "),
      number("tokens", n, String(n)), ` of them; after the first come ${shown}. Click a token: the shades show which `,
      "tokens it attends to.",
    ],
  };
}

async function oneMap(measurements) {
  const description = await measurements.recording("once");
  const { other, count } = await measurements.heads();
  const weights = await measurements.weights("once", other);
  const query = weights.n - 1;
  const { key, weight } = largestOf(weights, query);
  return {
    fields: view(description, other, { row: query, key }),
    text: [
      ...withTerms("Each [[head]] decides for every token how much it takes from itself and from each token before. "
        + "The model has "),
      number("heads", count, String(count)), " heads. In the map of ", headText("other", other),
      ", a row is a token that looks, and a column is a token it looks at. There the row ", tokenText(description, query),
      ...withTerms(" puts its largest [[weight]], "), number("weight", weight), `, on ${tokenText(description, key)}.`,
    ],
  };
}

async function previousToken(measurements) {
  const description = await measurements.recording("once");
  const { previous } = await measurements.heads();
  const scores = await measurements.onText("once", previous);
  const query = description.places[0].n - 2;
  return {
    fields: view(description, previous, { row: query, key: query - 1 }),
    text: [
      headText("previous", previous, true), ...withTerms(" is a [[previous-token head]] (confidence "),
      percent("previous-confidence", previous.confidence.previous),
      "): its map is a line just below the diagonal. On this text it puts, on average over ",
      number("previous-rows", scores.previous.rows, String(scores.previous.rows)), " tokens, ",
      number("previous", scores.previous.value), " of its weight on the token before.",
    ],
  };
}

async function repeatedText(measurements) {
  const description = await measurements.recording("twice");
  const { induction } = await measurements.heads();
  const firstCopy = await measurements.firstCopy();
  const scores = await measurements.onText("twice", induction);
  const { values, n } = await measurements.weights("twice", induction);

  // Of the second copy, lock the token that attends most to what followed it in the first copy.
  const length = n - firstCopy;
  let query = firstCopy;
  const target = (i) => i - length + 1;
  for (let i = firstCopy; i < n; i++) {
    if (values[n * i + target(i)] > values[n * query + target(query)]) query = i;
  }
  const key = target(query);
  return {
    fields: view(description, induction, { row: query, key }),
    text: [
      "The same text twice. In the second copy, ", headText("induction", induction),
      ...withTerms(", an [[induction head]] (confidence "),
      percent("induction-confidence", induction.confidence.induction),
      "), finds the earlier occurrence of a token and attends to what followed it: with ",
      number("induction", scores.induction.value), " of its weight, on average over ",
      number("induction-rows", scores.induction.rows, String(scores.induction.rows)), " repeated tokens",
      `${differentTokens(description, firstCopy, length)}. `, tokenText(description, query), " puts ", number("weight", values[n * query + key]),
      ` on ${tokenText(description, key)}, which followed it in the first copy.`,
    ],
  };
}

async function withoutTheHead(measurements) {
  const description = await measurements.recording("twice");
  const { induction } = await measurements.heads();
  const firstCopy = await measurements.firstCopy();
  const { before, after } = await measurements.ablation();

  // losses[i] is the loss of token i + 1.
  const lossBefore = mean(before.slice(firstCopy - 1));
  const lossAfter = mean(after.slice(firstCopy - 1));
  let index = firstCopy;
  const change = (i) => Math.exp(-before[i]) - Math.exp(-after[i]);
  for (let i = firstCopy; i < before.length; i++) {
    if (change(i) > change(index)) index = i;
  }
  const likelyBefore = Math.exp(-before[index]);
  const likelyAfter = Math.exp(-after[index]);
  return {
    fields: view(description, induction, { row: index, ablated: `${induction.place}.${induction.head}`, by: "zero" }),
    press: "Ablate",
    text: [
      ...withTerms("Now [[ablation|ablate]] it: the output of "), headText("induction", induction),
      ...withTerms(" is set to 0. The [[loss]] of the second copy "), verb(lossBefore, lossAfter), " from ",
      number("loss-before", lossBefore), " to ", number("loss-after", lossAfter),
      " nats per token. After ", tokenText(description, index), ", the probability of the right next token, ",
      tokenText(description, index + 1), `, ${verb(likelyBefore, likelyAfter)} from `,
      number("probability-before", likelyBefore), " to ", number("probability-after", likelyAfter), ".",
    ],
  };
}

async function circuit(measurements) {
  const description = await measurements.recording("twice");
  const { induction, previous, earlier } = await measurements.heads();
  const { before, after } = await measurements.sources();
  const index = earlier.indexOf(previous);
  const others = after.filter((_, i) => i !== index);
  const lowest = Math.min(...others);
  const claim = after[index] < before / 2 ? "Both heads are one [[circuit]]." : "Are both heads one [[circuit]]?";
  return {
    fields: view(description, induction),
    heads: [headSelector(previous), headSelector(induction)],
    text: [
      ...withTerms(`${claim} To find what followed a token, the induction head must know at each position which token `
        + "came before. "), headText("previous", previous, true), " can write that there, for ",
      headText("induction", induction), " in a later layer to read. The test: without ", headText("previous", previous),
      ", the weight of the induction head on what followed ", verb(before, after[index]), " from ",
      number("circuit-before", before), " to ", number("circuit-after", after[index]),
      ". Without any other single head of the ",
      number("earlier", others.length, String(others.length)), " in earlier layers it is at least ",
      number("circuit-others", lowest), ".",
    ],
  };
}

export const STEPS = [
  { title: "A text and its tokens", part: PART("weights on the text"), measure: textAndTokens },
  { title: "The map of one head", part: PART("map of weights"), measure: oneMap },
  { title: "A head that looks at the token before", part: PART("map of weights"), measure: previousToken },
  { title: "The text again: an induction head", part: PART("map of weights"), measure: repeatedText },
  { title: "The model without this head", part: PART("ablation"), measure: withoutTheHead },
  { title: "The induction circuit", part: PART("all heads"), measure: circuit },
];
