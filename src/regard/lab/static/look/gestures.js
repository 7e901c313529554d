// How a map is moved: wheel and pinch, drag, keys. A press that does not move locks the cell under it.

const STILL = 5; // pixels that a finger may slip in a press
const NUDGE = 60; // pixels of an arrow key

export function gestures(map) {
  const { canvas } = map;
  const down = new Map(); // pointers that are held: id → {x, y}
  let moved = 0;
  let apart = 0;

  const at = (event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const between = () => {
    const [a, b] = [...down.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, apart: Math.hypot(a.x - b.x, a.y - b.y) };
  };

  const handlers = {
    wheel(event) {
      if (!map.source) return;
      const g = map.geometry();
      if (event.deltaY > 0 && g.z <= 1.0001 && !event.ctrlKey) return; // nothing left to zoom out of: the page scrolls
      event.preventDefault();
      const { x, y } = at(event);
      const unit = event.deltaMode === 1 ? 16 : 1;
      map.zoom(Math.exp(-Math.max(-240, Math.min(240, event.deltaY * unit)) * (event.ctrlKey ? 0.01 : 0.0025)), x, y);
    },
    pointerdown(event) {
      if (!map.source || event.button > 0) return;
      down.set(event.pointerId, at(event));
      if (down.size === 1) moved = 0;
      if (down.size === 2) apart = between().apart;
      try {
        canvas.setPointerCapture(event.pointerId);
      } catch {
        // the pointer is gone already
      }
    },
    pointermove(event) {
      if (!map.source) return;
      const here = at(event);
      const last = down.get(event.pointerId);
      if (!last) {
        map.tell.hover(map.cellAt(here.x, here.y));
        return;
      }
      const middle = down.size === 2 ? between() : null;
      down.set(event.pointerId, here);
      moved += Math.hypot(here.x - last.x, here.y - last.y);
      if (middle) {
        const now = between();
        map.pan(middle.x - now.x, middle.y - now.y);
        if (apart > 0 && now.apart > 0) map.zoom(now.apart / apart, now.x, now.y);
        apart = now.apart;
      } else if (moved > STILL) {
        map.pan(last.x - here.x, last.y - here.y);
      }
    },
    pointerup(event) {
      const here = at(event);
      const single = down.size === 1;
      if (!down.delete(event.pointerId)) return;
      const cell = single && moved <= STILL ? map.cellAt(here.x, here.y) : null;
      if (cell) map.tell.lock(cell);
    },
    pointercancel(event) {
      down.delete(event.pointerId);
    },
    pointerleave(event) {
      if (!down.has(event.pointerId)) map.tell.hover(null);
    },
    dblclick(event) {
      if (map.source) map.zoom(2, at(event).x, at(event).y);
    },
    keydown(event) {
      if (map.source && !event.metaKey && !event.ctrlKey && !event.altKey && key(map, event)) event.preventDefault();
    },
  };
  const options = { passive: false };
  for (const [name, call] of Object.entries(handlers)) canvas.addEventListener(name, call, options);
  return () => {
    for (const [name, call] of Object.entries(handlers)) canvas.removeEventListener(name, call, options);
  };
}

const WAYS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function key(map, event) {
  const way = WAYS[event.key];
  const g = map.geometry();
  const [x, y] = [map.canvas.clientWidth - g.width / 2, map.canvas.clientHeight - g.height / 2];
  if (event.key === "+" || event.key === "=") map.zoom(1.5, x, y);
  else if (event.key === "-" || event.key === "_" || event.key === "−") map.zoom(1 / 1.5, x, y);
  else if (event.key === "0") map.go(g.m / 2, g.n / 2, 1);
  else if (event.key === "Enter" || event.key === " ") step(map, g, 0, 0);
  else if (way && event.shiftKey) step(map, g, ...way);
  else if (way) map.pan(NUDGE * way[0], NUDGE * way[1]);
  else return false;
  return true;
}

// The locked cell a step on, or the one in the middle; the window follows it.
function step(map, g, dx, dy) {
  const none = (x) => x === null || x === undefined;
  const fresh = none(map.marks.row) || none(map.marks.key);
  const from = fresh ? { row: Math.floor(g.cy), key: Math.floor(g.cx) } : map.marks;
  const within = (x, total) => Math.max(0, Math.min(total - 1, x));
  const cell = fresh ? from : { row: within(from.row + dy, g.n), key: within(from.key + dx, g.m) };
  map.tell.lock({ row: within(cell.row, g.n), key: within(cell.key, g.m) });
  const [right, bottom] = [map.canvas.clientWidth, map.canvas.clientHeight];
  const [px, py] = [g.x(cell.key + 0.5), g.y(cell.row + 0.5)];
  const [left, top] = [right - g.width, bottom - g.height];
  const over = (value, low, high) => (value < low ? value - low - 20 : value > high ? value - high + 20 : 0);
  const [sx, sy] = [over(px, left, right), over(py, top, bottom)];
  if (sx || sy) map.pan(sx, sy);
}
