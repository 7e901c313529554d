// The tour of the bundled model: six steps, from a text and its tokens to the induction circuit. The step is in the
// address (tour=3), so a reload and the back button restore it.
import { debounce, element } from "./dom.js";
import { Measurements } from "./tour/measurements.js";
import { coversKept, isNarrow, placeCard } from "./tour/placement.js";
import { STEPS } from "./tour/steps.js";

// What a step does not set is as at the start, so that every step shows the same to everyone.
const OTHER_FIELDS = [
  "row", "key", "batch", "direction", "reading", "beta", "mask", "position", "sort", "ascending", "kind", "colour", "hide",
  "at", "pinned", "ablated", "by", "input",
];
// What the card must not cover beside the part that a step is about: the map, and the line with its weight.
const MAP_PARTS = ".map-part canvas.map, .map-part .readout";
const SETTLED = 120; // ms after the last scroll or change of size before the card is placed again
const PATIENCE = 20; // seconds to wait for a part of the page

// `startButton` is shown on the Look page. Returns { follow, button }.
export function createTour(startButton, state) {
  const style = element("style"); // marks the part of the page that a step is about, even if it is built again
  document.head.append(style);
  let card = null; // the parts of the card, while the tour is open
  let step = 0;
  let revealed = null; // the part that stays in view while the page changes, until the reader does something
  let entered = 0; // grows with each step, so that a slow one can see that another was entered

  startButton.addEventListener("click", () => go(1));

  function button() {
    return element("button", { type: "button", className: "main", text: "Take the tour", on: { click: () => go(1) } });
  }

  // Go to a step, or end the tour with step 0. The back button undoes it.
  function go(next) {
    state.push({ tour: next || "" });
    follow("look");
    if (next) card.next.focus();
  }

  function stepInAddress(page) {
    const value = state.number("tour", 0);
    return page === "look" && Number.isInteger(value) && value >= 1 && value <= STEPS.length ? value : 0;
  }

  // Show what the address says; called whenever it has changed.
  function follow(page) {
    startButton.hidden = page !== "look";
    const next = stepInAddress(page);
    if (next === step) return;
    step = next;
    entered += 1;
    style.textContent = "";
    if (!step) {
      close();
      return;
    }
    card ??= createCard();
    enter(entered);
  }

  function close() {
    card?.control.abort();
    card?.observer.disconnect();
    card?.box.remove();
    card = null;
    document.body.classList.remove("touring");
  }

  function createCard() {
    const title = element("h2", { id: "tour-title" });
    const count = element("span", { className: "quiet" });
    const text = element("div", { className: "text", role: "status" });
    const back = element("button", { type: "button", text: "Back", on: { click: () => go(step - 1) } });
    const next = element("button", { type: "button", className: "main" });
    next.addEventListener("click", () => go(step === STEPS.length ? 0 : step + 1));
    const end = element("button", { type: "button", className: "quiet", text: "End", on: { click: () => go(0) } });
    const box = element("section", { id: "tour-card", role: "dialog", "aria-labelledby": title.id },
      element("div", { className: "bar" }, title, count), text, element("div", { className: "bar" }, back, next, end));
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation(); // Escape also releases a locked token of the page
      go(0);
      startButton.focus();
    });
    document.body.append(box);
    document.body.classList.add("touring");
    const control = new AbortController();
    const report = (message) => {
      if (text.getAttribute("aria-busy") !== "true") return;
      text.replaceChildren(element("p", { className: "quiet", text: message }));
    };

    // The page changes its size while a step computes; a scroll may bring the map under the card.
    const observer = new ResizeObserver(debounce(() => {
      if (revealed?.isConnected) scrollTo(revealed);
      place();
    }, SETTLED));
    const options = { signal: control.signal, passive: true };
    const stopScrolling = () => {
      revealed = null;
    };
    for (const event of ["wheel", "touchmove", "pointerdown", "keydown"]) addEventListener(event, stopScrolling, options);
    addEventListener("resize", debounce(place, SETTLED), options);
    const placeIfCovering = debounce(() => {
      if (card && coversKept(card.box, keptElements())) place();
    }, SETTLED);
    document.addEventListener("scroll", placeIfCovering, { ...options, capture: true });
    const measurements = new Measurements(report, control.signal);
    return { box, title, count, text, back, next, end, control, observer, measurements };
  }

  // What the card must not cover: in a narrow window there is space for one part only.
  function keptElements() {
    const { part } = STEPS[step - 1];
    const marked = [...document.querySelectorAll(`#page ${part}`)];
    if (isNarrow()) return narrowParts(marked);
    return [...marked, ...document.querySelectorAll(`#page :is(${MAP_PARTS})`)];
  }

  // Of a long part a narrow window shows what the step says: the map and its weight, the result, or the heads.
  function narrowParts(marked) {
    const selectors = [MAP_PARTS, ".result > p, .result figure .plot, .loss-readout", ".heads", ".texts, .lines"];
    for (const selector of selectors) {
      const inside = marked.flatMap((node) => [...node.querySelectorAll(selector)]);
      if (inside.length) return inside;
    }
    return marked;
  }

  function place() {
    if (card && step) placeCard(card.box, keptElements());
  }

  async function enter(thisEntry) {
    const { title, part, measure } = STEPS[step - 1];
    const { text, measurements } = card;
    const isCurrent = () => entered === thisEntry;
    card.title.textContent = title;
    card.count.textContent = `step ${step} of ${STEPS.length}`;
    card.back.disabled = step === 1;
    card.next.textContent = step === STEPS.length ? "Finish" : "Next";
    card.box.dataset.step = step;
    text.setAttribute("aria-busy", "true");
    text.replaceChildren(element("p", { className: "quiet", text: "measuring …" }));
    try {
      const result = await measure(measurements);
      if (!isCurrent()) return;
      const fields = Object.fromEntries(OTHER_FIELDS.map((name) => [name, ""]));
      state.set({ ...fields, ...result.fields });
      state.refresh();
      text.replaceChildren(element("p", {}, ...result.text));
      mark(part, result.heads ?? []);
      const target = await waitFor(() => shownElement(part), isCurrent);
      if (target) reveal(target);
      if (!result.press) return;
      await press(part, result.press, result.fields.recording, isCurrent);
      const shown = await waitFor(() => shownElement(`${part} .result:not(:empty)`), isCurrent);
      if (shown) reveal(shown);
    } catch (error) {
      if (error.name === "AbortError" || !isCurrent()) return;
      text.replaceChildren(element("p", { className: "error", text: `This step cannot be shown: ${error.message}.` }));
    } finally {
      if (isCurrent()) text.setAttribute("aria-busy", "false");
    }
  }

  function mark(part, heads) {
    // The outline of a part is inside: the left column clips what is outside of it.
    const rules = [`#page ${part} { outline: 3px solid var(--asked); outline-offset: -3px; border-radius: 10px; }`];
    for (const head of heads) rules.push(`#page ${head} { outline: 3px solid var(--asked); outline-offset: 2px; }`);
    style.textContent = rules.join("\n");
  }

  function shownElement(selector) {
    const node = document.querySelector(`#page ${selector}`);
    return node?.offsetParent ? node : null;
  }

  // Wait until find() returns something. Returns null if it does not within a while, or if the step was left.
  async function waitFor(find, isCurrent) {
    const end = performance.now() + 1000 * PATIENCE;
    while (isCurrent() && performance.now() < end) {
      const result = find();
      if (result) return result;
      await new Promise((resolve) => { setTimeout(resolve, 50); });
    }
    return null;
  }

  // Scroll the part into view, to the top if the screen is narrow, and put the card where it covers nothing of it.
  function reveal(target) {
    revealed = target;
    scrollTo(target);
    card.observer.disconnect();
    for (const node of [target, document.getElementById("page")]) card.observer.observe(node);
    place();
  }

  function scrollTo(target) {
    target.scrollIntoView({ block: isNarrow() ? "start" : "nearest" });
  }

  // Press a button of the page, as a person would, once it can be pressed.
  async function press(part, label, recording, isCurrent) {
    const ready = await waitFor(() => {
      const buttons = [...(shownElement(part)?.querySelectorAll("button:not(.term)") ?? [])];
      const labelled = buttons.find((candidate) => candidate.textContent.trim() === label && !candidate.disabled);
      return state.get("recording") === recording ? labelled : null;
    }, isCurrent);
    ready?.click();
  }

  state.onChange(() => follow(state.get("page", "look")));
  return { follow, button };
}
