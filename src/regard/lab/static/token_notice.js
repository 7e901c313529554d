// The notice of a tab that has lost its lab: the lab refuses its requests, because it was started again with a new token.
import { element } from "./dom.js";

const EXPLANATION =
  "The lab at this address was started again and has a new token. Open the address that it printed in its terminal " +
  "(The lab is at …?token=…), then try again here. If the terminal is gone, the command regard lab says how to open it.";

// Show the notice below the header after the first request that is refused. It stays until the page is loaded again.
export function noticeMissingToken() {
  let isShown = false;
  window.addEventListener("token-needed", () => {
    if (isShown) return;
    isShown = true;
    const again = { type: "button", className: "main", text: "Try again", on: { click: () => location.reload() } };
    const text = element("p", {}, element("strong", { text: "This tab needs the lab's token. " }), EXPLANATION);
    const notice = element("section", { id: "token-needed", role: "alert" }, text, element("button", again));
    document.getElementById("top").after(notice);
  });
}
