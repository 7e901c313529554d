// Messages about a recording or a run that is closed, with a button that opens it again.
import { post } from "./api.js";
import { showMessage } from "./dom.js";

async function reopen(id, reopened) {
  try {
    await post("/api/workspace/undo", { item: id });
    await reopened(id);
  } catch (error) {
    showMessage(error.message, "error");
  }
}

// After this window closed an item. `kind` is "recording" or "run". `reopened(id)` is called once it is open again.
export function showClosed(kind, id, reopened) {
  showMessage(`The ${kind} is closed.`, "", { text: "Undo", run: () => reopen(id, reopened) });
}

// Another window closed an item that this window shows. The address says what is shown, so the page is loaded again.
export function offerToReopen() {
  window.addEventListener("item-closed", ({ detail }) => {
    showMessage(detail.message, "error", { text: "Open it again", run: () => reopen(detail.item, () => location.reload()) });
  });
}
