// Which words of a page's labels are terms of the glossary. The same word may have another meaning on another page.

// The labels that are searched. A term becomes a button in its label. A <label> without `for` belongs to the first
// control inside it, which could be this button. label.switch is safe: its checkbox comes before the text.
export const ELEMENTS = "dt, th, figcaption, h2, h3, h4, caption, label[for], label.switch, .facts";

const HEAD_TYPE_TERMS = {
  sink: "sink head",
  previous: "previous-token head",
  positional: "positional head",
  convolution: "convolution head",
  averaging: "averaging head",
  induction: "induction head",
  duplicate: "duplicate head",
  content: "content head",
};

// Longer words come before words that they contain.
const TERMS = {
  look: {
    "head type": "head type",
    types: "head type",
    entropy: "entropy",
    spread: "spread",
    peak: "peak",
    distance: "distance",
    profile: "profile",
    offset: "offset",
    sinks: "sink (observable)",
    sink: "sink (observable)",
    local: "local",
    lse: "lse",
    "row max": "row_max, row_sum",
    softcap: "softcap",
    "β": "scale (inverse temperature β)",
    scale: "scale (inverse temperature β)",
    bias: "bias",
    mask: "mask",
    position: "position encoding",
    previous: "previous-token head",
    induction: "induction head",
    duplicate: "duplicate head",
    "max. tokens": "token",
    loss: "loss",
  },
  evolve: {
    arrival: "arrival",
    "all heads": "head",
    film: "film",
    records: "record",
  },
  budget: {
    bottleneck: "bottleneck",
    crossover: "crossover (n*)",
    overtakes: "crossover (n*)",
    "FLOPs": "FLOPs",
    activations: "activations",
    "linear layers": "linear layers",
    "Longest n": "longest n",
    "k, v heads": "grouped queries",
    "tiled attention": "tile",
    peak: "peak (memory)",
  },
  convolution: {
    offsets: "offset",
    kernel: "kernel (convolution)",
    "α": "sharpness (α)",
  },
  claims: {
    evidence: "evidence",
    findings: "finding",
    verdict: "verdict",
    correction: "correction",
    corrected: "correction",
    claims: "claim",
  },
};

// Patterns that match whole words only. They do not use \b, which knows only ASCII letters and would fail for β.
function patterns(terms) {
  return Object.entries(terms).map(([word, id]) => {
    const escaped = word.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
    return [new RegExp(`(?<![\\p{L}\\p{N}_])${escaped}(?![\\p{L}\\p{N}_])`, "iu"), id];
  });
}

const PAGE_PATTERNS = Object.fromEntries(Object.entries(TERMS).map(([page, terms]) => [page, patterns(terms)]));
const HEAD_TYPE_PATTERNS = patterns(HEAD_TYPE_TERMS);

// The [pattern, id] pairs for a label. In the list of head types, a name is a type and not an observable.
export function pageTerms(page, node) {
  if (node.matches("dt") && node.closest(".sureness")) return HEAD_TYPE_PATTERNS;
  return PAGE_PATTERNS[page] ?? [];
}
