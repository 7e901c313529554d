// Groups of keys: a table of heads × groups, and the groups of the selected head.

const GROUP_SORT = "group: "; // before the number of a group in the menu of orders

// The number of the group that heads are sorted by, or null.
function groupOfSort(sort) {
  return sort.startsWith(GROUP_SORT) ? Number(sort.slice(GROUP_SORT.length)) : null;
}

// The choice between maps and groups, and the orders by a group.
function makeGroupChoices() {
  if (!data.groups) return;
  byId("show-choice").hidden = false;
  byId("show").addEventListener("change", () => { view.show = byId("show").value; arrange(); });
  for (const [g, group] of data.groups.entries()) {
    const option = element("option", "", `on ${group.label}`);
    option.value = GROUP_SORT + g;
    option.title = groupMeaning(group);
    byId("sort").append(option);
  }
}

// What the weight on a group is, in words. The last group is everything that is in no other one.
function groupMeaning(group) {
  if (group.keys === null) return "mean weight on keys in no group, and on learned sinks";
  return `mean weight on the group “${group.label}”: ${group.keys} keys`;
}

// A cell whose colour is its weight.
function weightCell(weight) {
  const cell = element("td", weight > 0.55 ? "weight strong" : "weight", weight === null ? "–" : weight.toFixed(3));
  cell.style.setProperty("--weight", weight ?? 0);
  return cell;
}

function groupHeader(group) {
  const cell = element("th", "group");
  cell.append(element("span", "", group.label));
  cell.scope = "col";
  cell.title = groupMeaning(group);
  return cell;
}

// Heads × groups. A row's name selects the head.
function groupTable(items, { sort }) {
  const table = element("table", "weights");
  const top = element("tr");
  top.append(element("th", "", "head"), ...data.groups.map(groupHeader));
  const sorted = groupOfSort(sort);
  if (sorted !== null) top.children[sorted + 1].setAttribute("aria-sort", view.descending ? "descending" : "ascending");
  const head = element("thead");
  head.append(top);
  const body = element("tbody");
  for (const item of items) {
    const row = element("tr");
    const name = element("th");
    name.scope = "row";
    const button = element("button", "row-name", item.label);
    button.type = "button";
    button.title = item.title;
    button.addEventListener("click", () => item.button.click());
    name.append(button);
    row.append(name, ...data.groups.map((group, g) => weightCell(item.groups[g] ?? null)));
    item.groupRow = row;
    if (item.button.getAttribute("aria-pressed") === "true") row.classList.add("chosen");
    body.append(row);
  }
  table.append(head, body);
  return table;
}

// Marks the row of the selected head.
function markGroupRow(before, item) {
  before?.groupRow?.classList.remove("chosen");
  item.groupRow?.classList.add("chosen");
}

// The groups of one head: the weights of all queries, and those of the queries of each group if there are few groups.
function showGroups(item) {
  byId("groups-figure").hidden = !item.groups.some((weight) => weight !== null);
  if (byId("groups-figure").hidden) return;
  const map = item.layer.group_map?.[item.head] ?? null;
  byId("groups-note").textContent = map ? "mean weight: from all queries, and from those of each group (columns) to a "
    + "group (rows)" : "mean weight of all queries";
  const named = data.groups.slice(0, -1);
  const table = element("table", "weights");
  const top = element("tr");
  top.append(element("th", "", map ? "to ↓ from →" : ""), element("th", "group", "all queries"));
  if (map) top.append(...named.map(groupHeader));
  const head = element("thead");
  head.append(top);
  const body = element("tbody");
  for (const [g, group] of data.groups.entries()) {
    const row = element("tr");
    const name = element("th", "", group.label);
    name.scope = "row";
    name.title = groupMeaning(group);
    row.append(name, weightCell(item.groups[g]));
    if (map) {
      const rest = (weights) => (weights.includes(null) ? null : Math.max(0, 1 - weights.reduce((a, b) => a + b, 0)));
      row.append(...named.map((from, a) => weightCell(g < named.length ? map[a][g] : rest(map[a]))));
    }
    body.append(row);
  }
  table.append(head, body);
  byId("head-groups").replaceChildren(table);
}
