// The weights of the selected head on the text: hover a token to preview it, click to lock it, Escape to unlock it.

const PAGE_TOKENS = 1024; // tokens on the screen at once
const hasPointer = matchMedia("(hover: hover)");
const textView = { item: null, direction: "from", locked: null, hovered: null, start: 0, blocks: {}, touched: [] };

function makeTokens() {
  for (const radio of document.querySelectorAll("input[name=direction]")) {
    radio.addEventListener("change", () => {
      textView.direction = radio.value;
      textView.hovered = textView.locked = null;
      showText();
    });
  }
  byId("earlier").addEventListener("click", () => showPage(textView.start - PAGE_TOKENS));
  byId("later").addEventListener("click", () => showPage(textView.start + PAGE_TOKENS));
  const box = byId("texts");
  const number = (event) => {
    const token = event.target.closest(".token");
    return token && token.closest(".selectable") ? Number(token.dataset.at) : null;
  };
  box.addEventListener("mouseover", (event) => preview(number(event)));
  box.addEventListener("mouseleave", () => preview(null));
  box.addEventListener("focusin", (event) => {
    for (const token of box.querySelectorAll(".token[tabindex='0']")) token.tabIndex = -1;
    event.target.tabIndex = 0; // Tab returns to this token
    preview(number(event));
  });
  box.addEventListener("click", (event) => number(event) !== null && lock(number(event)));
  box.addEventListener("keydown", (event) => {
    const from = number(event);
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (from === null) return;
    if (event.key === "Enter" || event.key === " ") lock(from);
    else if (step) selectableTokens().get(from + step)?.focus();
    else return;
    event.preventDefault();
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && lock(null));
}

function showPage(start) {
  textView.start = Math.max(0, start);
  showText();
}

// The tokens that can be selected: the queries, or the keys in the direction "to this token".
function selectableTokens() {
  return textView.blocks[textView.direction === "from" ? "queries" : "keys"];
}

function preview(i) {
  textView.hovered = i;
  shade();
}

function lock(i) {
  textView.locked = i === textView.locked ? null : i;
  if (i === null) textView.hovered = null;
  shade();
}

function showHead(item) {
  const before = textView.item;
  textView.item = item;
  if (before?.layer !== item.layer) {
    // If the layers read the same text, the same token stays selected.
    const same = before && ["n", "m", "queries", "keys"].every((name) => before.layer[name] === item.layer[name]);
    const start = PAGE_TOKENS * Math.floor((item.layer.first ?? 0) / PAGE_TOKENS); // the first page with lists
    if (!same) Object.assign(textView, { locked: null, hovered: null, start });
    showText();
  } else {
    greyRows();
    shade();
  }
}

function showText() {
  const { layer } = textView.item;
  const box = byId("texts");
  box.replaceChildren();
  textView.blocks = { queries: new Map(), keys: new Map() };
  byId("notes").textContent = notes(layer);
  byId("text-title").textContent = `on the ${subject(layer)}`;
  for (const [i, name] of ["from", "to"].entries()) {
    document.querySelectorAll(".direction-name")[i].textContent = `${name} this ${unitOf(layer)}`;
  }
  const hasLists = layer.top !== null;
  byId("direction").disabled = !hasLists;
  byId("strongest").hidden = !hasLists;
  const longest = Math.max(layer.n ?? 0, layer.m ?? 0);
  const paged = hasLists && !layer.grid && longest > PAGE_TOKENS;
  textView.start = paged ? Math.min(textView.start, PAGE_TOKENS * Math.floor((longest - 1) / PAGE_TOKENS)) : 0;
  byId("pager").hidden = !paged;
  byId("earlier").disabled = textView.start === 0;
  byId("later").disabled = textView.start + PAGE_TOKENS >= longest;
  const last = Math.min(textView.start + PAGE_TOKENS, longest) - 1;
  byId("page-range").textContent = `${textView.start} … ${last} of ${longest}`;
  if (hasLists && layer.grid) {
    textView.blocks.keys = textView.blocks.queries = imageBlock(layer, box);
  } else if (hasLists && layer.n === layer.m && layer.queries === layer.keys) {
    textView.blocks.keys = textView.blocks.queries = textBlock(layer.n, layer.queries, box, null);
  } else if (hasLists) {
    textView.blocks.queries = textBlock(layer.n, layer.queries, box, "queries");
    textView.blocks.keys = textBlock(layer.m, layer.keys, box, "keys");
  }
  selectableTokens().forEach((token) => token.closest(".block").classList.add("selectable"));
  const first = selectableTokens().values().next().value;
  if (first) first.tabIndex = 0;
  greyRows();
  shade();
}

// What the page shows for a layer, and what it cannot show.
function notes(layer) {
  if (layer.n === null) return "Calls of unequal sizes were merged here, so there is nothing to show for single tokens.";
  if (!layer.entry) return `Batch entry ${data.batch} was not recorded in this layer.`;
  if (!layer.top) {
    return "The strongest keys of each token were not observed. Use Observe(top=8) and a cache that keeps all keys.";
  }
  const k = layer.top.shape[1];
  const rows = `the last ${layer.n - layer.first} of ${layer.n} queries`;
  const partial = layer.first > 0 ? `To stay small, this page has lists for ${rows}. ` : "";
  const inImage = layer.grid ? " In the image the strongest of them is clear, and patches without weight are dark." : "";
  return `${partial}Shades show the ${k} strongest keys of each query.${inImage}`;
}

function labelAt(which, i) {
  const { layer } = textView.item;
  const patch = layer.grid ? i - (layer.n - layer.grid[0] * layer.grid[1]) : -1;
  if (patch >= 0) return `patch ${Math.floor(patch / layer.grid[1])}, ${patch % layer.grid[1]}`;
  if (layer.grid) return extraTokenName(layer, i);
  const labels = data.texts[layer[which]];
  return labels ? `“${visibleText(labels[i]).trim() || "␣"}” ${i}` : String(i);
}

function unitOf(layer) {
  return layer.grid ? "patch" : "token";
}

// A token before the patches of an image. A single one is the class token.
function extraTokenName(layer, i) {
  const label = data.texts[layer.queries]?.[i];
  if (label) return label;
  return layer.n - layer.grid[0] * layer.grid[1] === 1 ? "class token" : `extra token ${i}`;
}

function token(i, label, shown) {
  const node = element("span", isSpecialLabel(shown) ? "token special" : "token");
  node.append(...labelNodes(shown));
  node.dataset.at = i;
  node.tabIndex = -1;
  node.setAttribute("role", "button");
  node.setAttribute("aria-label", label);
  return node;
}

function textBlock(total, textIndex, box, title) {
  const block = element("div", "block");
  if (title) block.append(element("h4", "", title));
  const line = element("div", textIndex === null ? "text indices" : "text");
  const tokens = new Map();
  for (let i = textView.start; i < Math.min(total, textView.start + PAGE_TOKENS); i++) {
    const label = textIndex === null ? String(i) : visibleText(data.texts[textIndex][i]);
    // A space before a token stays outside of it: a shade that begins in a gap looks misplaced.
    if (label.startsWith(" ") && label.length > 1) line.append(" ");
    tokens.set(i, token(i, `${label.trim() || "space"}, ${i}`, label.trimStart() || "␣"));
    line.append(tokens.get(i), textIndex === null ? " " : element("wbr"));
    const next = i + 1 < total && textIndex !== null ? visibleText(data.texts[textIndex][i + 1]) : "↵";
    if (label.endsWith("↵") && !next.startsWith("↵")) line.append(element("br"));
  }
  block.append(line);
  box.append(block);
  return tokens;
}

// Patches as cells over the image; tokens before them (a class token) as text above it.
function imageBlock(layer, box) {
  const [high, wide] = layer.grid;
  const block = element("div", "block");
  const chips = element("div", "text indices");
  const cells = element("div", "patches");
  cells.style.gridTemplateColumns = `repeat(${wide}, 1fr)`;
  cells.style.aspectRatio = `${wide} / ${high}`;
  if (data.image) cells.style.backgroundImage = `url("${data.image}")`;
  const tokens = new Map();
  const before = layer.n - high * wide;
  for (let i = 0; i < layer.n; i++) {
    const [y, x] = [Math.floor((i - before) / wide), (i - before) % wide];
    tokens.set(i, i < before ? token(i, extraTokenName(layer, i), extraTokenName(layer, i)) : token(i, `patch ${y}, ${x}`, ""));
    (i < before ? chips : cells).append(tokens.get(i), i < before ? " " : "");
  }
  block.append(chips, cells);
  box.append(block);
  return tokens;
}

function greyRows() {
  const { layer, head } = textView.item;
  for (const [i, token] of textView.blocks.queries) {
    token.classList.toggle("not-counted", !isCounted(layer, head, i));
    token.classList.toggle("no-list", textView.direction === "from" && i < layer.first);
  }
}

// Shades the tokens that the locked token attends to, or that attend to it; without a locked token, the hovered one.
function shade() {
  if (!textView.item) return;
  const { layer, head } = textView.item;
  const from = textView.direction === "from";
  const active = textView.locked ?? textView.hovered;
  for (const token of textView.touched) {
    token.classList.remove("active", "locked", "strong");
    token.style.removeProperty("--weight");
    token.removeAttribute("aria-pressed");
  }
  const locked = selectableTokens().get(textView.locked);
  locked?.classList.add("locked");
  locked?.setAttribute("aria-pressed", "true");
  selectableTokens().get(active)?.classList.add("active");
  textView.touched = [locked, selectableTokens().get(active)].filter(Boolean);
  const weights = active === null ? null : (from ? keysOf : queriesOf)(layer, head, active, view.hideSinks);
  const others = textView.blocks[from ? "keys" : "queries"];
  for (const { index: i, weight } of weights ?? []) {
    const token = others.get(i);
    if (!token) continue; // on another page of a long text
    // In an image the shades are relative to the strongest patch: a single patch seldom has much weight.
    const share = layer.grid ? weight / weights[0].weight : weight;
    token.style.setProperty("--weight", Math.min(1, Math.sqrt(share)).toFixed(4));
    // The usual text colour could not be read on a strong shade.
    token.classList.toggle("strong", weight > (darkScheme.matches ? 0.45 : 0.75) && !layer.grid);
    textView.touched.push(token);
  }
  byId("texts").classList.toggle("has-active", weights !== null);
  markRow(from ? active : null);
  showList(active, weights, from);
}

function showList(active, weights, from) {
  const box = byId("list");
  box.replaceChildren();
  const which = from ? "keys" : "queries";
  const name = active === null ? "" : labelAt(from ? "queries" : "keys", active);
  const unit = unitOf(textView.item.layer);
  if (active === null && !hasPointer.matches) byId("strongest-of").textContent = `Tap a ${unit} to see its weights.`;
  else if (active === null) byId("strongest-of").textContent = `Point at a ${unit} to see its weights, click to lock it.`;
  else if (weights === null) byId("strongest-of").textContent = `${name}: its list is not in this page`;
  else {
    const without = view.hideSinks ? " (without sinks, as a share of the rest)" : "";
    byId("strongest-of").textContent = (from ? `${name} attends to` : `${name} is attended to by`) + without;
  }
  const nothing = view.hideSinks ? "nothing but sinks" : "nothing in the lists";
  if (weights && !weights.length) box.append(element("li", "quiet", nothing));
  const most = textView.item.layer.top?.shape[1] ?? 0;
  for (const entry of (weights ?? []).slice(0, Math.max(8, most))) {
    const row = element("li");
    const button = element("button", "", labelAt(which, entry.index));
    button.type = "button";
    button.addEventListener("click", () => reveal(which, entry.index));
    row.append(button, element("span", "", formatWeight(entry)));
    box.append(row);
  }
}

function reveal(which, i) {
  if (!textView.blocks[which].has(i)) showPage(PAGE_TOKENS * Math.floor(i / PAGE_TOKENS));
  textView.blocks[which].get(i)?.scrollIntoView({ block: "nearest" });
}
