// A short introduction above each page: what it shows, and three things to try. It can be hidden, which is remembered
// per page, and opened again with the button "About this page".
import { readSetting, writeSetting } from "./browser_storage.js";
import { element } from "./dom.js";
import { withTerms } from "./glossary.js";

// The texts of all pages. A term in [[double brackets]] is explained by tap.
export const INTRODUCTIONS = {
  look: {
    about: "Every [[head]] of a model on one text. A small square is the [[map]] of a head: rows are the tokens that "
      + "look ([[query, key, value|queries]]), columns are those they look at (keys), and a strong colour is a "
      + "large [[weight]] for this head.",
    steps: [
      "Type a text and press Run.",
      "Select a head, then click a [[token]]: the text and the map show what it attends to.",
      "Tick a head and press Ablate, to see how much worse the model predicts without it.",
    ],
  },
  attribution: {
    about: "What a prediction owes to each [[token]] and each [[head]]: contributions from gradients, and what changes "
      + "if a head is really replaced.",
    steps: [
      "Choose another predicted token, or one to compare it with.",
      "Click a head, or a cell of its strip, then replace it by zero: is the change what the gradient estimates?",
      "Compare a head's contribution with what it adds to the logit directly.",
    ],
  },
  evolve: {
    about: "A training [[run (training)|run]], step by step: what each [[head]] did at every [[record|recorded]] step, "
      + "and when it took its [[head type|type]].",
    steps: [
      "Move the slider, or press ▶, to go through the training.",
      "Click a head: the curves, the types and its [[film]] show it.",
      "Press “train a model” to train a small one here, and watch its heads form.",
    ],
  },
  budget: {
    about: "What a model needs before it exists: parameters, [[FLOPs]], memory and time, and which part is the "
      + "[[bottleneck]].",
    steps: [
      "Start from a known model, or load its config.json.",
      "Move a slider, for example tokens n, and see which part grows.",
      "Find the [[crossover (n*)|crossover]]: the length from which attention costs more than everything else.",
    ],
  },
  convolution: {
    about: "A convolution, computed by attention. Each [[tap]] of the kernel is one [[head]] that attends to one "
      + "[[offset]]; α makes the heads sharper.",
    steps: [
      "Choose a kernel and an image, or draw your own.",
      "Move α from soft to ∞: the difference from the convolution vanishes.",
      "Point at a pixel of a result, to see which pixels it came from.",
    ],
  },
  claims: {
    about: "The statements of the theory, each with a check that runs here. A [[verdict]] says whether the statement "
      + "holds as it is written.",
    steps: [
      "Select a claim and read its [[evidence]].",
      "Change its parameters and run the check again.",
      "Look for “false as stated”: each has a counterexample and a [[correction]].",
    ],
  },
};

function isHidden(page) {
  return readSetting(`introduction ${page}`) === "hidden";
}

function rememberHidden(page, hidden) {
  writeSetting(`introduction ${page}`, hidden ? "hidden" : null);
}

// `box` is filled with the introduction of a page, and `button` shows or hides it. Returns a function that is called
// with the page that was opened, and with further buttons for its introduction.
export function createIntroduction(box, button) {
  let page = "";
  let actions = [];
  let isOpen = false;

  function show() {
    button.setAttribute("aria-expanded", String(isOpen));
    box.hidden = !isOpen;
    box.replaceChildren();
    if (!isOpen) return;
    const { about, steps } = INTRODUCTIONS[page];
    const list = element("ol", { id: "introduction-steps" });
    for (const step of steps) list.append(element("li", {}, ...withTerms(step)));
    // On a narrow screen the steps are folded at first.
    const unfold = element("button", {
      type: "button", className: "unfold", text: "What to try", "aria-expanded": "false", "aria-controls": list.id,
    });
    unfold.addEventListener("click", () => {
      unfold.setAttribute("aria-expanded", String(box.classList.toggle("unfolded")));
    });
    box.classList.remove("unfolded");
    const hideButton = element("button", { type: "button", text: "Hide", title: "“About this page” shows it again" });
    hideButton.addEventListener("click", () => change(false));
    box.append(
      element("p", {}, ...withTerms(about)),
      element("div", { className: "bar" }, unfold, ...actions, hideButton),
      list);
  }

  function change(open) {
    isOpen = open;
    rememberHidden(page, !open);
    show();
    // The button "Hide" is gone once it was pressed, so the focus goes to the button that brings it back.
    if (!open) button.focus();
    else box.scrollIntoView({ block: "nearest" });
  }

  button.addEventListener("click", () => change(!isOpen));

  return (name, elements = []) => {
    page = name;
    actions = elements;
    isOpen = !isHidden(page);
    show();
  };
}
