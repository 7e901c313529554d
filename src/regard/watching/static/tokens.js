// The picked head on the text: hover a token to preview, click to keep it, Escape to let it go.

const PAGE = 1024; // tokens on the screen at once
const reading = { made: null, direction: "from", locked: null, hovered: null, start: 0, blocks: {}, touched: [] };

function makeTokens() {
  for (const radio of document.querySelectorAll("input[name=direction]")) {
    radio.addEventListener("change", () => {
      reading.direction = radio.value;
      reading.hovered = reading.locked = null;
      showText();
    });
  }
  at("earlier").addEventListener("click", () => turn(reading.start - PAGE));
  at("later").addEventListener("click", () => turn(reading.start + PAGE));
  const box = at("texts");
  const number = (event) => {
    const token = event.target.closest(".token");
    return token && token.closest(".asks") ? Number(token.dataset.at) : null;
  };
  box.addEventListener("mouseover", (event) => preview(number(event)));
  box.addEventListener("mouseleave", () => preview(null));
  box.addEventListener("focusin", (event) => {
    for (const token of box.querySelectorAll(".token[tabindex='0']")) token.tabIndex = -1;
    event.target.tabIndex = 0; // Tab comes back to where one was
    preview(number(event));
  });
  box.addEventListener("click", (event) => number(event) !== null && lock(number(event)));
  box.addEventListener("keydown", (event) => {
    const from = number(event);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (from === null) return;
    if (event.key === "Enter" || event.key === " ") lock(from);
    else if (step) askers().get(from + step)?.focus();
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && lock(null));
}

function turn(start) {
  reading.start = Math.max(0, start);
  showText();
}

// The tokens one may ask: queries, or keys where the question is who looks at them.
function askers() {
  return reading.blocks[reading.direction === "from" ? "queries" : "keys"];
}

function preview(i) {
  reading.hovered = i;
  shade();
}

function lock(i) {
  reading.locked = i === reading.locked ? null : i;
  if (i === null) reading.hovered = null;
  shade();
}

function showHead(made) {
  const before = reading.made;
  reading.made = made;
  if (before?.place !== made.place) {
    // The same token of another layer is what one wants to see next, where the text is the same.
    const same = before && ["n", "m", "queries", "keys"].every((name) => before.place[name] === made.place[name]);
    const start = PAGE * Math.floor((made.place.first ?? 0) / PAGE); // the first page with lists
    if (!same) Object.assign(reading, { locked: null, hovered: null, start });
    showText();
  } else {
    greyRows();
    shade();
  }
}

function showText() {
  const { place } = reading.made;
  const box = at("texts");
  box.replaceChildren();
  reading.blocks = { queries: new Map(), keys: new Map() };
  at("notes").textContent = notes(place);
  const shows = place.top !== null;
  at("direction").disabled = !shows;
  at("strongest").hidden = !shows;
  const longest = Math.max(place.n ?? 0, place.m ?? 0);
  const paged = shows && !place.grid && longest > PAGE;
  reading.start = paged ? Math.min(reading.start, PAGE * Math.floor((longest - 1) / PAGE)) : 0;
  at("pager").hidden = !paged;
  at("earlier").disabled = reading.start === 0;
  at("later").disabled = reading.start + PAGE >= longest;
  at("where").textContent = `${reading.start} … ${Math.min(reading.start + PAGE, longest) - 1} of ${longest}`;
  if (shows && place.grid) {
    reading.blocks.keys = reading.blocks.queries = picture(place, box);
  } else if (shows && place.n === place.m && place.queries === place.keys) {
    reading.blocks.keys = reading.blocks.queries = text(place.n, place.queries, box, null);
  } else if (shows) {
    reading.blocks.queries = text(place.n, place.queries, box, "queries");
    reading.blocks.keys = text(place.m, place.keys, box, "keys");
  }
  askers().forEach((token) => token.closest(".block").classList.add("asks"));
  const first = askers().values().next().value;
  if (first) first.tabIndex = 0;
  greyRows();
  shade();
}

// What cannot be shown, and what would have to be observed for it.
function notes(place) {
  if (place.n === null) return "Calls of unequal sizes were merged here, so nothing can be said of single tokens.";
  if (!place.entry) return `Batch entry ${data.batch} was not seen here.`;
  if (!place.top) {
    const cache = " (A cache that lets old keys go leaves it out.)";
    return `Which keys a token looks at was not observed: Observe(top=8) does.${cache}`;
  }
  const k = place.top.shape[2];
  const rows = `the last ${place.n - place.first} of ${place.n} queries`;
  const held = place.first > 0 ? `To keep this page small it holds lists for ${rows}. ` : "";
  const picture = place.grid ? " On the picture the strongest of them is clear, and what has none is dark." : "";
  return `${held}Shades show the ${k} strongest keys of each query.${picture}`;
}

// What cannot be seen otherwise.
function written(word) {
  return word.replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

function wordAt(which, i) {
  const { place } = reading.made;
  const patch = place.grid ? i - (place.n - place.grid[0] * place.grid[1]) : -1;
  if (patch >= 0) return `patch ${Math.floor(patch / place.grid[1])}, ${patch % place.grid[1]}`;
  const chosen = data.texts[place[which]];
  return chosen ? `“${written(chosen[i]).trim() || "␣"}” ${i}` : String(i);
}

function token(i, label, shown) {
  const made = element("span", "token", shown);
  made.dataset.at = i;
  made.tabIndex = -1;
  made.setAttribute("role", "button");
  made.setAttribute("aria-label", label);
  return made;
}

function text(total, words, box, title) {
  const block = element("div", "block");
  if (title) block.append(element("h4", "", title));
  const line = element("div", words === null ? "text indices" : "text");
  const made = new Map();
  for (let i = reading.start; i < Math.min(total, reading.start + PAGE); i++) {
    const word = words === null ? String(i) : written(data.texts[words][i]);
    // A space before a word stays outside its token: a shade that starts in the middle of a gap looks misplaced.
    if (word.startsWith(" ") && word.length > 1) line.append(" ");
    made.set(i, token(i, `${word.trim() || "space"}, ${i}`, word.trimStart() || "␣"));
    line.append(made.get(i), words === null ? " " : element("wbr"));
    const next = i + 1 < total && words !== null ? written(data.texts[words][i + 1]) : "↵";
    if (word.endsWith("↵") && !next.startsWith("↵")) line.append(element("br"));
  }
  block.append(line);
  box.append(block);
  return made;
}

// Patches as cells over the picture; tokens before them (a class token) as words above it.
function picture(place, box) {
  const [high, wide] = place.grid;
  const block = element("div", "block");
  const chips = element("div", "text indices");
  const cells = element("div", "patches");
  cells.style.gridTemplateColumns = `repeat(${wide}, 1fr)`;
  cells.style.aspectRatio = `${wide} / ${high}`;
  if (data.image) cells.style.backgroundImage = `url("${data.image}")`;
  const made = new Map();
  const before = place.n - high * wide;
  const words = data.texts[place.queries];
  for (let i = 0; i < place.n; i++) {
    const [y, x] = [Math.floor((i - before) / wide), (i - before) % wide];
    made.set(i, i < before ? token(i, `token ${i}`, words?.[i] ?? String(i)) : token(i, `patch ${y}, ${x}`, ""));
    (i < before ? chips : cells).append(made.get(i), i < before ? " " : "");
  }
  block.append(chips, cells);
  box.append(block);
  return made;
}

function greyRows() {
  const { place, head } = reading.made;
  for (const [i, token] of reading.blocks.queries) {
    token.classList.toggle("not-counted", !isCounted(place, head, i));
    token.classList.toggle("no-list", reading.direction === "from" && i < place.first);
  }
}

// Shades the tokens that the locked one looks at (or that look at it), or while none is, those of the hovered one.
function shade() {
  if (!reading.made) return;
  const { place, head } = reading.made;
  const from = reading.direction === "from";
  const asked = reading.locked ?? reading.hovered;
  for (const token of reading.touched) {
    token.classList.remove("asked", "locked", "strong");
    token.style.removeProperty("--weight");
    token.removeAttribute("aria-pressed");
  }
  const locked = askers().get(reading.locked);
  locked?.classList.add("locked");
  locked?.setAttribute("aria-pressed", "true");
  askers().get(asked)?.classList.add("asked");
  reading.touched = [locked, askers().get(asked)].filter(Boolean);
  const found = asked === null ? null : (from ? keysOf : queriesOf)(place, head, asked, view.hide);
  const others = reading.blocks[from ? "keys" : "queries"];
  for (const { at: i, weight } of found ?? []) {
    const token = others.get(i);
    if (!token) continue; // on another page of a long text
    // Over a picture shades compare patches with each other: a single patch seldom has much of the whole.
    const share = place.grid ? weight / found[0].weight : weight;
    token.style.setProperty("--weight", Math.min(1, Math.sqrt(share)).toFixed(4));
    // Where the ground's own ink would no longer be read on the shade.
    token.classList.toggle("strong", weight > (darkness.matches ? 0.45 : 0.75) && !place.grid);
    reading.touched.push(token);
  }
  at("texts").classList.toggle("asking", found !== null);
  markRow(from ? asked : null);
  list(asked, found, from);
}

function list(asked, found, from) {
  const box = at("list");
  box.replaceChildren();
  const which = from ? "keys" : "queries";
  const who = asked === null ? "" : wordAt(from ? "queries" : "keys", asked);
  if (asked === null) at("strongest-of").textContent = "Hover a token to see, click to keep it.";
  else if (found === null) at("strongest-of").textContent = `${who}: its list is not in this page`;
  else {
    const without = view.hide ? " (without sinks, of what is left)" : "";
    at("strongest-of").textContent = (from ? `${who} looks at` : `${who} is looked at by`) + without;
  }
  const nothing = view.hide ? "nothing beside the sinks" : "nothing in the lists";
  if (found && !found.length) box.append(element("li", "quiet", nothing));
  const most = reading.made.place.top?.shape[2] ?? 0;
  for (const { at: i, weight } of (found ?? []).slice(0, Math.max(8, most))) {
    const row = element("li");
    const go = element("button", "", wordAt(which, i));
    go.type = "button";
    go.addEventListener("click", () => reveal(which, i));
    row.append(go, element("span", "", said(weight)));
    box.append(row);
  }
}

function reveal(which, i) {
  if (!reading.blocks[which].has(i)) turn(PAGE * Math.floor(i / PAGE));
  reading.blocks[which].get(i)?.scrollIntoView({ block: "nearest" });
}
