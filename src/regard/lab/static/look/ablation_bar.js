// The heads that are selected for ablation, and buttons to ablate or clear them. They are beside the toolbar of the head;
// where the page is scrolled away from it, they float at the top of the window.
import { element } from "../dom.js";

// `heading` is the part of the toolbar that must be in view for the bar to stay at its place. Returns { slot, close }.
export function createAblationBar(view, heading) {
  const count = element("span", { role: "status" });
  const runButton = element("button", { type: "button", className: "main", on: { click: run } });
  const clearButton = element("button", { type: "button", text: "clear", title: "select no head for ablation" });
  clearButton.addEventListener("click", () => view.change({ ablated: [] }));
  const bar = element("div", { className: "bar ablate-now", role: "group", "aria-label": "selected for ablation" },
    count, runButton, clearButton);
  const slot = element("div", { className: "ablate-slot", hidden: true }, bar);
  const outOfView = new Set(); // of the toolbar and the button of the ablation panel
  let watched = null;

  function run() {
    if (view.ablationStatus === "done") view.ablation.reveal();
    else view.ablation.run();
  }

  function show() {
    const selected = view.ablated.length;
    const heads = selected === 1 ? "1 head" : `${selected} heads`;
    const status = view.ablationStatus;
    slot.hidden = selected === 0;
    count.textContent = status === "done" ? `${heads} ablated` : `${heads} selected`;
    runButton.textContent = { running: "Ablating …", done: "Show the result" }[status] ?? `Ablate ${heads}`;
    runButton.disabled = status === "running" || status === "";
    runButton.title = view.ablation?.button.title ?? "";
    watchPanel();
    place();
  }

  // The panel is created after the toolbar.
  function watchPanel() {
    if (watched || !view.ablation) return;
    watched = view.ablation.button;
    observer.observe(watched);
  }

  // A floating bar leaves its space empty, so that the page does not jump.
  function place() {
    const isAway = outOfView.has(heading) && outOfView.has(watched);
    const floats = isAway && !slot.hidden && view.ablationStatus !== "done";
    if (floats === bar.classList.contains("floating")) return;
    slot.style.minHeight = floats ? `${slot.offsetHeight}px` : "";
    bar.classList.toggle("floating", floats);
  }

  const observer = new IntersectionObserver((entries) => {
    for (const { target, isIntersecting } of entries) {
      if (isIntersecting) outOfView.delete(target);
      else outOfView.add(target);
    }
    place();
  }, { rootMargin: "-50px 0px 0px 0px" }); // the head of the window covers the rest
  observer.observe(heading);
  view.on("ablated ablationStatus description", show);
  show();
  return { slot, close: () => observer.disconnect() };
}
