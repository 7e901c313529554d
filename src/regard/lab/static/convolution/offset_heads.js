// One head per tap, laid out like the kernel. Each shows its weights from one output pixel.
import { element, formatNumber } from "../dom.js";
import { cssColour, drawValues, signedColour } from "./value_maps.js";

function signedText(offset) {
  if (offset > 0) return `+${offset}`;
  return offset < 0 ? `−${-offset}` : "0";
}

function targetText(down, right) {
  const parts = [];
  if (down) parts.push(`${Math.abs(down)} ${down > 0 ? "down" : "up"}`);
  if (right) parts.push(`${Math.abs(right)} ${right > 0 ? "right" : "left"}`);
  return parts.length ? `the pixel ${parts.join(", ")} of its query` : "the pixel of its query";
}

// `onPoint(head)` is called with the head under the pointer or with the focus; null if there is none.
export function createOffsetHeads(onPoint) {
  const box = element("div", { className: "heads" });
  const description = element("p", { className: "quiet", role: "status" });
  let side = 0;
  let content = null;

  function build(newSide) {
    if (newSide === side) return;
    side = newSide;
    box.style.setProperty("--side", side);
    box.replaceChildren();
    for (let head = 0; head < side * side; head++) {
      box.append(element("button", {
        type: "button", className: "one",
        on: {
          pointerenter: () => point(head),
          focus: () => point(head),
          pointerleave: () => point(null),
          blur: () => point(null),
        },
      }, element("canvas"), element("small")));
    }
  }

  function point(head) {
    onPoint(head);
    if (content) description.textContent = head === null ? content.description : headText(head);
  }

  function headText(head) {
    const { shifts, kernel, weights, shape, before, query } = content;
    const [, height, width] = shape;
    const [down, right] = shifts[head];
    const row = query[0] + down + before[0];
    const column = query[1] + right + before[1];
    const weight = weights[head * height * width + row * width + column];
    const outside = formatNumber(1 - weight);
    const factor = formatNumber(kernel.flat()[head]);
    const weightText = `weight ${formatNumber(weight)} there, ${outside} on other pixels`;
    return `Head ${head + 1} attends to ${targetText(down, right)}: ${weightText}; its value is multiplied by ${factor}.`;
  }

  // `weights` are the maps of all heads on the padded image, of `shape` [K², height, width]; `before` is the padding
  // above and left of the image, `imageSize` its rows and columns, and `query` the pixel of the query.
  function show(newContent) {
    content = newContent;
    const { weights, shape, kernel, shifts, before, query, imageSize } = content;
    build(kernel.length);
    const [, height, width] = shape;
    const taps = kernel.flat();
    const largestWeight = weights.reduce((a, b) => Math.max(a, b), 0);
    const largestTap = Math.max(...taps.map(Math.abs), 1e-9);
    const [top, left] = before;
    const imageFrame = {
      row: top, column: left, rows: imageSize[0], columns: imageSize[1], colour: cssColour("--quiet"), width: 2,
    };
    const queryFrame = { row: query[0] + top, column: query[1] + left, colour: cssColour("--asked"), width: 5 };
    const options = { largest: largestWeight, signed: false, marks: [imageFrame, queryFrame], pixels: 220 };
    for (const [head, button] of [...box.children].entries()) {
      const values = weights.subarray(head * height * width, (head + 1) * height * width);
      drawValues(button.firstChild, values, height, width, options);
      const [down, right] = shifts[head];
      button.lastChild.textContent = `${signedText(down)}, ${signedText(right)}`;
      button.setAttribute("aria-label", headText(head));
      button.style.setProperty("--tap", signedColour(taps[head] / largestTap).background);
    }
    description.textContent = content.description;
  }

  function redraw() {
    if (content) show(content);
  }

  return { box, description, show, redraw };
}
