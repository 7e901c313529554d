// All heads side by side: places down, heads across, or one flow sorted by a number.

const LAZY = 400; // more heads than this are drawn as they come into view
const heads = []; // {place, head: which of the place's, number: its own, button, canvas, numbers, label, words, drawn}
const across = [...new Set(data.places.flatMap((place) => place.heads))].sort((a, b) => a - b); // a column each
const view = { hide: false, sort: "", descending: true, find: "" };
const at = (id) => document.getElementById(id);

const coming = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting) drawThumbnail(heads[Number(entry.target.dataset.number)]);
  }
}, { rootMargin: "200px" });

function makeOverview(pick) {
  for (const place of data.places) {
    for (const [head, number] of place.heads.entries()) {
      const made = { place, head, number, numbers: place.numbers[head], drawn: false };
      made.label = `${place.name || place.path} · ${number}`;
      made.words = `${place.path || "the model"}, head ${number}`;
      made.button = element("button", "head");
      made.button.type = "button";
      made.button.tabIndex = -1;
      made.button.dataset.number = heads.length;
      made.button.setAttribute("aria-label", `${made.words}: ${numbersOf(made)}`);
      made.canvas = element("canvas", place.map ? "" : "no-map");
      made.caption = element("span", "caption");
      made.button.append(made.canvas, made.caption);
      made.button.addEventListener("click", () => pick(made));
      made.button.addEventListener("mouseenter", () => hint(made));
      made.button.addEventListener("focus", () => { reach(made); hint(made); });
      heads.push(made);
    }
  }
  at("heads").addEventListener("keydown", move);
  at("heads").addEventListener("mouseleave", () => hint(null));
  at("find").addEventListener("input", () => { view.find = at("find").value.trim().toLowerCase(); arrange(); });
  at("sort").addEventListener("change", () => { view.sort = at("sort").value; arrange(); });
  at("order").addEventListener("click", () => { view.descending = !view.descending; arrange(); });
  for (const name of columns) {
    const option = element("option", "", name);
    option.value = name;
    option.title = data.columns[name];
    at("sort").append(option);
  }
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  arrange();
  drawThumbnails();
}

function numbersOf(made) {
  return columns.map((name, c) => `${name} ${said(made.numbers[c])}`).join(" · ");
}

// What is under the pointer, in a line that is always there: nothing moves when it fills.
function hint(made) {
  const box = at("hint");
  box.replaceChildren();
  if (!made) {
    box.textContent = data.pattern ? `Places are * of ${data.pattern}. Pick a head.` : "Pick a head.";
    return;
  }
  box.append(element("strong", "", made.label), ` ${numbersOf(made)}`);
}

function drawThumbnails() {
  for (const made of heads) {
    made.drawn = false;
    if (heads.length > LAZY) {
      coming.unobserve(made.button); // observed anew, it reports anew
      coming.observe(made.button);
    } else {
      drawThumbnail(made);
    }
  }
}

function drawThumbnail(made) {
  if (made.drawn || !made.place.map) return;
  paint(made.canvas, headMap(made.place, made.head, view.hide));
  // Cells of a short text are larger than a pixel: blurred ones would suggest weights between them.
  made.canvas.style.imageRendering = made.canvas.width < 40 ? "pixelated" : "auto";
  made.drawn = true;
}

function arrange() {
  const shown = heads.filter((made) => !view.find || found(made, view.find));
  const column = columns.indexOf(view.sort);
  const box = at("heads");
  box.replaceChildren();
  at("order").disabled = column < 0;
  at("order").textContent = view.descending ? "largest first" : "smallest first";
  at("none").hidden = shown.length > 0;
  box.className = column < 0 ? "grid" : "flow";
  box.style.setProperty("--across", across.length);
  if (column < 0) {
    arrangeGrid(box, shown);
  } else {
    const sign = view.descending ? -1 : 1;
    // A number that is not there comes last, whichever way.
    const key = (made) => made.numbers[column] ?? -sign * -Infinity;
    shown.sort((a, b) => (key(a) === key(b) ? 0 : sign * (key(a) - key(b))));
    for (const made of shown) {
      made.caption.replaceChildren(element("b", "", made.label), ` ${said(made.numbers[column])}`);
      made.button.style.gridColumn = "";
      box.append(made.button);
    }
  }
  reachable(shown);
}

function found(made, text) {
  return made.words.toLowerCase().includes(text) || made.label.replaceAll(" · ", ".").toLowerCase().includes(text);
}

function arrangeGrid(box, shown) {
  const top = element("div", "row across");
  top.append(element("span", "place", ""), ...across.map((number) => element("span", "number", String(number))));
  top.setAttribute("aria-hidden", "true");
  box.append(top);
  for (const place of data.places) {
    const mine = shown.filter((made) => made.place === place);
    if (!mine.length) continue;
    const row = element("div", "row");
    const name = element("span", "place", place.name || place.path || "(the model)");
    name.title = place.path;
    row.append(name);
    for (const made of mine) {
      made.caption.replaceChildren();
      made.button.style.gridColumn = across.indexOf(made.number) + 2;
      row.append(made.button);
    }
    box.append(row);
  }
}

// One head is reached by Tab, the others from it by arrows.
function reachable(shown) {
  reach(shown.find((made) => made.button.getAttribute("aria-pressed") === "true") ?? shown[0]);
}

function reach(reached) {
  for (const made of heads) made.button.tabIndex = made === reached ? 0 : -1;
}

// Arrows go to the nearest head that way on the screen, whatever the arrangement.
function move(event) {
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const from = event.target.closest(".head");
  if (!way || !from) return;
  event.preventDefault();
  const here = from.getBoundingClientRect();
  let best = null;
  for (const made of heads) {
    if (!made.button.isConnected || made.button === from) continue;
    const there = made.button.getBoundingClientRect();
    const [dx, dy] = [there.left - here.left, there.top - here.top];
    const along = dx * way[0] + dy * way[1];
    const beside = Math.abs(dx * way[1]) + Math.abs(dy * way[0]);
    if (along < 1 || beside > here.width / 2) continue;
    if (!best || along < best.along) best = { along, made };
  }
  best?.made.button.focus();
}
