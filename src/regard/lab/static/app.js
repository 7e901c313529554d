// The page's frame: which room is open, and going from one to another. A room is a module with `open(root, state)`, which
// may return a function that is called when the room is left.
import { element } from "./dom.js";
import { state } from "./state.js";
import { toggleTheme, themeName } from "./theme.js";

const ROOMS = {
  look: "Look",
  evolve: "Evolve",
  budget: "Budget",
  convolution: "Convolution",
  claims: "Claims",
};
let leave = null;
let shown = null;

function links() {
  const list = document.getElementById("rooms");
  list.replaceChildren();
  for (const [name, title] of Object.entries(ROOMS)) {
    const link = element("a", { href: `?room=${name}`, text: title, dataset: { room: name } });
    link.addEventListener("click", (event) => {
      if (event.metaKey || event.ctrlKey || event.shiftKey) return;
      event.preventDefault();
      if (name !== shown) state.leaveFor({ room: name });
    });
    list.append(element("li", {}, link));
  }
}

async function show() {
  const name = Object.hasOwn(ROOMS, state.get("room")) ? state.get("room") : "look";
  for (const link of document.querySelectorAll("#rooms a")) {
    if (link.dataset.room === name) {
      link.setAttribute("aria-current", "page");
      link.scrollIntoView({ block: "nearest", inline: "nearest" }); // on a narrow screen the rooms are a strip
    } else link.removeAttribute("aria-current");
  }
  if (name === shown) return;
  leave?.();
  leave = null;
  shown = name;
  document.title = `${ROOMS[name]} · regard lab`;
  const root = document.getElementById("room");
  root.className = `room ${name}`;
  root.replaceChildren(element("p", { className: "loading", text: "…" }));
  const module = await import(`./${name}.js`);
  if (shown !== name) return;
  root.replaceChildren();
  const left = (await module.open(root, state)) ?? null;
  if (shown === name) leave = left;
  else left?.(); // another room was opened meanwhile
}

const theme = document.getElementById("theme");
theme.textContent = themeName();
theme.addEventListener("click", () => { theme.textContent = toggleTheme(); });
links();
state.onLeave(show);
show();
