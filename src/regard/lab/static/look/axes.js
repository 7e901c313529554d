// Axes of a map: numbers of tokens, and their words once there is room for each.

export const LEFT = 70; // pixels for the queries' names
export const TOP = 50; // pixels for the keys' names
const ROOM = 11; // pixels that a word needs
const LONGEST = 64;

// Round steps (1, 2 or 5 times a power of ten) at least `room` pixels apart.
export function step(size, room) {
  let found = 1;
  for (let k = 0; found * size < room; k++) found = [2, 5, 10][k % 3] * 10 ** Math.floor(k / 3);
  return found;
}

export function drawAxes(context, g, label, marks, style) {
  const [ink, quiet, asked] = ["--ink", "--quiet", "--asked"].map((name) => style.getPropertyValue(name));
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  const colour = (marked, words) => (marked ? asked : words ? ink : quiet);
  const shown = (which, i, words) => {
    const text = words ? label(which, i) || String(i) : String(i);
    return text.length > 12 ? `${text.slice(0, 11)}…` : text;
  };

  context.textAlign = "right";
  const rows = g.sy >= ROOM;
  each(g.n, g.sy, g.y, rows, 26, TOP, TOP + g.height, (i, at) => {
    context.fillStyle = colour(i === marks.row, rows);
    context.fillText(shown("queries", i, rows), Math.max(LEFT, g.x(0)) - 5, at, LONGEST);
  });
  const keys = g.sx >= ROOM;
  context.textAlign = keys ? "left" : "center";
  each(g.m, g.sx, g.x, keys, 44, LEFT, LEFT + g.width - (keys ? 0 : 12), (j, at) => {
    context.fillStyle = colour(j === marks.key, keys);
    context.save();
    context.translate(at, Math.max(TOP, g.y(0)) - (keys ? 4 : 9));
    if (keys) context.rotate(-Math.PI / 3);
    context.fillText(shown("keys", j, keys), 0, 0, keys ? TOP + 2 : LONGEST);
    context.restore();
  });
  context.fillStyle = quiet;
  context.textAlign = "left";
  context.fillText("keys →", 2, 10);
  context.fillText("queries ↓", 2, 24);
}

function each(total, size, at, words, room, low, high, call) {
  const by = words ? 1 : step(size, room);
  const first = Math.max(0, Math.floor((low - at(0)) / size / by) * by);
  for (let i = first; i < total; i += by) {
    const where = at(i + 0.5);
    if (where > high) break;
    if (where >= low) call(i, where);
  }
}
