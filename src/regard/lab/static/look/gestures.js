// Moves a map by pinch, drag, keys, and the wheel with Ctrl or ⌘ (without them the wheel scrolls the page). A press that
// does not move locks the cell under it.
import { RIGHT } from "./axes.js";

const SLIP = 5; // pixels that a finger may move in a press
const ARROW_STEP = 60; // pixels
const DIRECTIONS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

// Returns a function that removes the gestures.
export function addGestures(map) {
  const { canvas } = map;
  const pointers = new Map(); // pointers that are down: id → { x, y }
  let moved = 0;
  let lastDistance = 0; // between two fingers

  function positionOf(event) {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  function pinch() {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, distance: Math.hypot(a.x - b.x, a.y - b.y) };
  }

  const handlers = {
    wheel(event) {
      // A pinch on a touchpad arrives as a wheel with Ctrl.
      if (!map.source || (!event.ctrlKey && !event.metaKey)) return;
      event.preventDefault();
      const { x, y } = positionOf(event);
      const pixels = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
      // A touchpad sends many small steps, a mouse few large ones.
      const factor = Math.exp(-Math.max(-60, Math.min(60, pixels)) * 0.01);
      map.zoom(factor, x, y);
    },
    pointerdown(event) {
      if (!map.source || event.button > 0) return;
      pointers.set(event.pointerId, positionOf(event));
      if (pointers.size === 1) {
        moved = 0;
      } else {
        moved = Infinity; // two fingers never lock a cell
        lastDistance = pinch().distance;
      }
      try {
        canvas.setPointerCapture(event.pointerId);
      } catch {
        // The pointer was released already.
      }
    },
    pointermove(event) {
      if (!map.source) return;
      const position = positionOf(event);
      const last = pointers.get(event.pointerId);
      if (!last) {
        map.handlers.onHover(map.cellAt(position.x, position.y));
        return;
      }
      const before = pointers.size >= 2 ? pinch() : null;
      pointers.set(event.pointerId, position);
      moved += Math.hypot(position.x - last.x, position.y - last.y);
      if (before) {
        const after = pinch();
        map.pan(before.x - after.x, before.y - after.y);
        if (lastDistance > 0 && after.distance > 0) map.zoom(after.distance / lastDistance, after.x, after.y);
        lastDistance = after.distance;
      } else if (moved > SLIP) {
        map.pan(last.x - position.x, last.y - position.y);
      }
    },
    pointerup(event) {
      const position = positionOf(event);
      const isPress = pointers.size === 1 && moved <= SLIP;
      if (!pointers.delete(event.pointerId)) return;
      if (pointers.size >= 2) lastDistance = pinch().distance;
      if (!isPress) return;
      const cell = map.cellAt(position.x, position.y);
      if (cell) map.handlers.onLock(cell);
    },
    pointercancel(event) {
      pointers.delete(event.pointerId);
    },
    pointerleave(event) {
      if (!pointers.has(event.pointerId)) map.handlers.onHover(null);
    },
    dblclick(event) {
      const { x, y } = positionOf(event);
      if (map.source) map.zoom(2, x, y);
    },
    keydown(event) {
      if (!map.source || event.metaKey || event.ctrlKey || event.altKey) return;
      if (handleKey(map, event)) event.preventDefault();
    },
  };

  const options = { passive: false };
  for (const [name, handler] of Object.entries(handlers)) canvas.addEventListener(name, handler, options);
  return () => {
    for (const [name, handler] of Object.entries(handlers)) canvas.removeEventListener(name, handler, options);
  };
}

// Returns whether the key has a meaning here.
function handleKey(map, event) {
  const direction = DIRECTIONS[event.key];
  const geometry = map.geometry();
  if (event.key === "+" || event.key === "=") map.zoomToLocked(1.5);
  else if (event.key === "-" || event.key === "_" || event.key === "−") map.zoomToLocked(1 / 1.5);
  else if (event.key === "0") map.moveTo(geometry.m / 2, geometry.n / 2, 1);
  else if (event.key === "Enter" || event.key === " ") moveLockedCell(map, geometry, 0, 0);
  else if (direction && event.shiftKey) moveLockedCell(map, geometry, ...direction);
  else if (direction) map.pan(ARROW_STEP * direction[0], ARROW_STEP * direction[1]);
  else return false;
  return true;
}

// Move the locked cell by one, or lock the cell in the middle if none is locked. The window follows it.
function moveLockedCell(map, geometry, dx, dy) {
  const { row, key } = map.marks;
  const isLocked = typeof row === "number" && typeof key === "number";
  const nextRow = isLocked ? row + dy : Math.floor(geometry.middleRow);
  const nextKey = isLocked ? key + dx : Math.floor(geometry.middleKey);
  const cell = {
    row: Math.max(0, Math.min(geometry.n - 1, nextRow)),
    key: Math.max(0, Math.min(geometry.m - 1, nextKey)),
  };
  map.handlers.onLock(cell);

  const right = map.canvas.clientWidth - RIGHT;
  const bottom = map.canvas.clientHeight;
  const panX = overshoot(geometry.x(cell.key + 0.5), right - geometry.width, right);
  const panY = overshoot(geometry.y(cell.row + 0.5), bottom - geometry.height, bottom);
  if (panX || panY) map.pan(panX, panY);
}

// How far a pixel is outside of its limits, and 20 pixels more; 0 inside.
function overshoot(pixel, low, high) {
  if (pixel < low) return pixel - low - 20;
  if (pixel > high) return pixel - high + 20;
  return 0;
}
