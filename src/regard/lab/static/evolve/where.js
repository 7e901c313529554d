// Where heads look from a cell of a picture: a plane a layer, with each head's centre, width and the way it came.
import { drawing, element } from "../dom.js";
import { colourOf } from "./types.js";

const SIDE = 132;

export function where(pick) {
  const box = element("div", { className: "planes" });

  return {
    box,
    draw(data, offsets, at, picked) {
      const now = Math.min(at, offsets.steps.length - 1);
      const reach = reachOf(offsets);
      const scale = SIDE / (2 * reach + 1);
      const to = ([row, column]) => [SIDE / 2 + column * scale, SIDE / 2 + row * scale];
      box.replaceChildren();
      for (const [layer, heads] of offsets.layers.entries()) {
        const svg = drawing("svg", { viewBox: `0 0 ${SIDE} ${SIDE}`, role: "img", "aria-label": words(data, offsets, now, heads) });
        svg.append(cells(reach, scale));
        for (const head of heads) {
          const colour = colourOf(data, head, now);
          const [x, y] = to(offsets.centre[now][head]);
          const way = offsets.centre.slice(0, now + 1).map((centre) => to(centre[head]).map((v) => v.toFixed(1)).join(" ")).join(" L");
          const group = drawing("g", { class: head === picked ? "picked" : "", style: `color:${colour}` });
          group.append(
            drawing("path", { class: "way", d: `M${way}` }),
            drawing("circle", { class: "width", cx: x, cy: y, r: Math.max(1, offsets.width[now][head] * scale) }),
            drawing("circle", { class: "centre", cx: x, cy: y, r: 3.2 }),
            drawing("title", {}, told(data, offsets, now, head)),
          );
          group.addEventListener("click", () => pick(head));
          svg.append(group);
        }
        const many = offsets.covered[now][layer];
        box.append(element("figure", {}, svg, element("figcaption", { text: `layer ${layer}: ${many} of the 9 nearest offsets` })));
      }
    },
  };
}

// The plane shows as much as any head's centre ever needed, and one cell more.
function reachOf({ centre }) {
  const far = Math.max(...centre.flat(2).filter(Number.isFinite).map(Math.abs), 1);
  return Math.ceil(far) + 1;
}

function cells(reach, scale) {
  const group = drawing("g", { class: "cells" });
  for (let k = 0; k <= 2 * reach + 1; k++) {
    group.append(drawing("line", { x1: k * scale, x2: k * scale, y1: 0, y2: SIDE }), drawing("line", { y1: k * scale, y2: k * scale, x1: 0, x2: SIDE }));
  }
  group.append(drawing("rect", { class: "query", x: reach * scale, y: reach * scale, width: scale, height: scale }));
  return group;
}

function told(data, { centre, width, peak }, at, head) {
  const [row, column] = centre[at][head].map((x) => x.toFixed(1).replace("-", "−"));
  const most = peak[at][head].map((x) => String(x).replace("-", "−"));
  return `head ${data.heads[head].label}: centre ${row} down, ${column} right, width ${width[at][head].toFixed(1)}; most at ${most.join(", ")}`;
}

function words(data, offsets, at, heads) {
  return heads.map((head) => told(data, offsets, at, head)).join(". ");
}
