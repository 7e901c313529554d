// The offsets that the heads of an image model attend to: one plane per layer, with the centre, the width and the path
// of every head.
import { element, svgElement } from "../dom.js";
import { headColour } from "./type_timeline.js";

const SIDE = 132; // of a plane, in units of its SVG

// `select(head)` is called when a head is clicked.
export function createOffsetPlanes(select) {
  const box = element("div", { className: "planes" });

  function draw(data, offsets, selectedRecord, selectedHead) {
    const record = Math.min(selectedRecord, offsets.steps.length - 1); // records may arrive before their offsets
    const radius = planeRadius(offsets);
    const cellSize = SIDE / (2 * radius + 1);
    const toPixels = ([row, column]) => [SIDE / 2 + column * cellSize, SIDE / 2 + row * cellSize];

    box.replaceChildren();
    for (const [layer, heads] of offsets.layers.entries()) {
      const label = heads.map((head) => headText(data, offsets, record, head)).join(". ");
      const svg = svgElement("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img", "aria-label": label });
      svg.append(gridLines(radius, cellSize));
      for (const head of heads) {
        const points = [];
        for (let earlier = 0; earlier <= record; earlier++) {
          const [pathX, pathY] = toPixels(offsets.centre[earlier][head]);
          points.push(`${pathX.toFixed(1)} ${pathY.toFixed(1)}`);
        }
        const [x, y] = toPixels(offsets.centre[record][head]);
        const width = Math.max(1, offsets.width[record][head] * cellSize);
        const className = head === selectedHead ? "picked" : "";
        const group = svgElement("g", { class: className, style: `color:${headColour(data, head, record)}` },
          svgElement("path", { class: "way", d: `M${points.join(" L")}` }),
          svgElement("circle", { class: "width", cx: x, cy: y, r: width }),
          svgElement("circle", { class: "centre", cx: x, cy: y, r: 3.2 }),
          svgElement("title", {}, headText(data, offsets, record, head)));
        group.addEventListener("click", () => select(head));
        svg.append(group);
      }
      const text = `layer ${layer}: heads peak at ${offsets.covered[record][layer]} of the 9 nearest offsets`;
      box.append(element("figure", {}, svg, element("figcaption", { text })));
    }
  }

  return { box, draw };
}

// The radius of a plane in cells: it reaches one cell beyond the farthest centre of any head at any record.
function planeRadius({ centre }) {
  let farthest = 1;
  for (const offset of centre.flat(2)) {
    if (Number.isFinite(offset)) farthest = Math.max(farthest, Math.abs(offset));
  }
  return Math.ceil(farthest) + 1;
}

function gridLines(radius, cellSize) {
  const group = svgElement("g", { class: "cells" });
  for (let i = 0; i <= 2 * radius + 1; i++) {
    const position = i * cellSize;
    group.append(
      svgElement("line", { x1: position, x2: position, y1: 0, y2: SIDE }),
      svgElement("line", { y1: position, y2: position, x1: 0, x2: SIDE }));
  }
  const middle = radius * cellSize;
  group.append(svgElement("rect", { class: "query", x: middle, y: middle, width: cellSize, height: cellSize }));
  return group;
}

function headText(data, { centre, width, peak }, record, head) {
  const [row, column] = centre[record][head].map((offset) => offset.toFixed(1).replace("-", "−"));
  const largest = peak[record][head].map((offset) => String(offset).replace("-", "−")).join(", ");
  const { label } = data.heads[head];
  const size = width[record][head].toFixed(1);
  return `head ${label}: centre ${row} down, ${column} right, width ${size}; largest weight at ${largest}`;
}
