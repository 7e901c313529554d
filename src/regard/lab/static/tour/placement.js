// Where the card of the tour stands: beside what a step is about, never on it, as long as the window has space for both.
const MARGIN = 16; // pixels to the edge of the window
const GAP = 10; // pixels to the parts of the page
const WIDTHS = [430, 390, 350, 310, 270]; // pixels of the card, in a wide window
const NARROW = 700; // pixels of a window in which the card is as wide as the window
const LEAST_HEIGHT = 150; // pixels of the card, whose text can be scrolled
// Of a covered pixel: of what the step is about, of the text beside the map, and of the rest of the page.
const KEPT_COST = 1000;
const TEXT_COST = 5;
const WIDTH_COST = 60; // of a pixel less than the full width: a wide card is easier to read
const TEXT_PARTS = ".reading";
const OTHER_PARTS = ".head-line, .scores, .input, .overview, .ablate";

export const isNarrow = () => innerWidth < NARROW;

// The part of an element that is in the window, below its head; null if there is none.
function visibleBox(node, top) {
  const rect = node.getBoundingClientRect();
  const box = {
    left: Math.max(0, rect.left), top: Math.max(top, rect.top),
    right: Math.min(innerWidth, rect.right), bottom: Math.min(innerHeight, rect.bottom),
  };
  return box.right > box.left && box.bottom > box.top ? box : null;
}

function visibleBoxes(nodes, top) {
  return [...nodes].map((node) => visibleBox(node, top)).filter((box) => box !== null);
}

function coveredPixels(card, boxes) {
  let pixels = 0;
  for (const box of boxes) {
    const width = Math.min(card.right, box.right) - Math.max(card.left, box.left);
    const height = Math.min(card.bottom, box.bottom) - Math.max(card.top, box.top);
    if (width > 0 && height > 0) pixels += width * height;
  }
  return pixels;
}

// Put the card where it covers least. `kept`: the elements that the step is about.
export function placeCard(card, kept) {
  const head = document.getElementById("top").getBoundingClientRect().bottom;
  card.removeAttribute("style");
  const keptBoxes = visibleBoxes(kept, head);
  if (isNarrow()) placeBelow(card, keptBoxes);
  else placeBeside(card, keptBoxes, head);
}

// Whether the card covers something that the step is about.
export function coversKept(card, kept) {
  const head = document.getElementById("top").getBoundingClientRect().bottom;
  return coveredPixels(card.getBoundingClientRect(), visibleBoxes(kept, head)) > 1;
}

// In a narrow window the card is at the bottom, and its text is scrolled if there is little space.
function placeBelow(card, keptBoxes) {
  const cardTop = card.getBoundingClientRect().top;
  let lowest = 0;
  for (const { top, bottom } of keptBoxes) {
    // What starts below the card cannot be kept free.
    if (top < cardTop) lowest = Math.max(lowest, bottom);
  }
  const space = innerHeight - lowest - 2 * GAP;
  if (space < card.offsetHeight) card.style.maxHeight = `${Math.max(LEAST_HEIGHT, space)}px`;
}

function placeBeside(card, keptBoxes, head) {
  const textBoxes = visibleBoxes(document.querySelectorAll(`#page :is(${TEXT_PARTS})`), head);
  const otherBoxes = visibleBoxes(document.querySelectorAll(`#page :is(${OTHER_PARTS})`), head);
  let best = null;
  for (const width of WIDTHS) {
    card.style.width = `${width}px`;
    const height = card.offsetHeight;
    // The corners that touch the window or a part of the page.
    const lefts = [MARGIN, innerWidth - width - MARGIN];
    const tops = [head + GAP, innerHeight - height - MARGIN];
    for (const { left, right, top, bottom } of [...keptBoxes, ...textBoxes, ...otherBoxes]) {
      lefts.push(left, right - width, right + GAP, left - width - GAP);
      tops.push(top, bottom - height, bottom + GAP, top - height - GAP);
    }
    for (const left of lefts.filter((x) => x >= MARGIN / 2 && x + width <= innerWidth - MARGIN / 2)) {
      for (const top of tops.filter((y) => y >= head && y + height <= innerHeight - MARGIN / 2)) {
        const box = { left, top, right: left + width, bottom: top + height };
        const cost = KEPT_COST * coveredPixels(box, keptBoxes) + TEXT_COST * coveredPixels(box, textBoxes)
          + coveredPixels(box, otherBoxes) + WIDTH_COST * (WIDTHS[0] - width);
        if (best === null || cost < best.cost) best = { cost, width, left, top };
      }
    }
  }
  if (best === null) {
    card.removeAttribute("style"); // the window is too low for a choice
    return;
  }
  Object.assign(card.style, {
    width: `${best.width}px`, left: `${best.left}px`, top: `${best.top}px`, right: "auto", bottom: "auto",
  });
}
