// The frame of the lab: shows one page at a time. A page is a module with `open(root, state)`, which may return a
// function that is called when the page is left.
import { get } from "./api.js";
import { offerToReopen } from "./closed_item.js";
import { element, onPlainClick, showMessage } from "./dom.js";
import { markTerms, openGlossary } from "./glossary.js";
import { createIntroduction } from "./introduction.js";
import { noticeMissingToken } from "./token_notice.js";
import { createTour } from "./tour.js";
import { state, stateOfPage } from "./url_state.js";
import { toggleTheme, themeName } from "./theme.js";

const PAGES = {
  look: "Look",
  attribution: "Attribution",
  evolve: "Evolve",
  budget: "Budget",
  convolution: "Convolution",
  claims: "Claims",
};
const MAX_NOTICES = 3; // shown on the page at once
let closePage = null;
let openPage = null;
let stopMarking = null;

function addLinks() {
  const list = document.getElementById("pages");
  list.replaceChildren();
  for (const [name, title] of Object.entries(PAGES)) {
    const link = element("a", { href: `?page=${name}`, text: title, dataset: { page: name } });
    onPlainClick(link, () => {
      if (name !== openPage) state.leaveFor({ page: name });
    });
    list.append(element("li", {}, link));
  }
}

function markLink(name) {
  for (const link of document.querySelectorAll("#pages a")) {
    if (link.dataset.page === name) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a narrow screen the links scroll sideways
    } else {
      link.removeAttribute("aria-current");
    }
  }
}

// The browser does not say why a script was not loaded. A request tells whether the lab runs and admits this tab.
async function sayWhyNotLoaded(root, name) {
  const reason = await get("/api/jobs").then(() => "try again", (error) => error.message);
  if (!root.isConnected) return; // another page was opened meanwhile
  root.replaceChildren(element("p", { className: "error", text: `This page could not be loaded: ${reason}` }));
  openPage = null; // so that the link to the page works again
}

// Each opening of a page gets an element of its own. A page that is left while it still loads goes on drawing: it then
// draws on an element that nobody sees.
function newRoot(name) {
  const root = element("main", { id: "page", className: `page ${name}`, tabindex: -1 });
  root.append(element("p", { className: "loading", text: "…" }));
  document.getElementById("page").replaceWith(root);
  return root;
}

async function show() {
  const name = Object.hasOwn(PAGES, state.get("page")) ? state.get("page") : "look";
  markLink(name);
  tour.follow(name);
  if (name === openPage) return;

  const root = newRoot(name); // before the last page is closed, so that it cannot change the address of this one
  closePage?.();
  stopMarking?.();
  closePage = null;
  openPage = name;
  document.title = `${PAGES[name]} · regard lab`;
  stopMarking = markTerms(root, name);
  showIntroduction(name, name === "look" ? [tour.button()] : []);

  const module = await import(`./${name}.js`).catch(() => null);
  if (module === null) {
    await sayWhyNotLoaded(root, name);
    return;
  }
  if (!root.isConnected) return;
  root.replaceChildren();
  const close = (await module.open(root, stateOfPage(() => root.isConnected))) ?? null;
  if (root.isConnected) closePage = close;
  else close?.();
}

// What the lab has to say about its files, for example that its list was damaged: lines that stay until dismissed.
async function showNotices() {
  const { notices } = await get("/api/workspace");
  for (const notice of notices.slice(0, MAX_NOTICES)) showMessage(notice, "notice");
  const more = notices.length - MAX_NOTICES;
  if (more > 0) showMessage(`${more} more of these are in the terminal of the lab`, "notice");
}

const themeButton = document.getElementById("theme");
themeButton.textContent = themeName();
themeButton.addEventListener("click", () => { themeButton.textContent = toggleTheme(); });
const showIntroduction = createIntroduction(
  document.getElementById("introduction"), document.getElementById("about"));
const tour = createTour(document.getElementById("tour"), state);
document.getElementById("terms").addEventListener("click", () => openGlossary());
offerToReopen();
noticeMissingToken();
addLinks();
state.onLeave(show);
show();
showNotices().catch(() => {}); // a lab that does not respond is reported by the page itself
