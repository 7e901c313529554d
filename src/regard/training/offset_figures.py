"""The figure of where heads look from a pixel, before a training and after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.plots import EDGE, SERIES, font, frame, part
from regard.training.evolution import Evolution
from regard.training.offsets import Offsets, offsets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["centres"]

SIDE = 1.35  # inches of a panel
REACH = 3.5  # cells to either side of the query
FIRST, LAST = 0, -1


def centres(evolution: Evolution) -> Figure:
    """Each layer's heads around the query, at the first record and at the last.

    A dot is a head's centre, with the head's number; the disc around it has its width as radius. The square is the nine
    offsets of a 3 × 3 kernel, and the number above says how many of them some head looks at most. Centres outside are
    drawn at the edge.
    """
    found, many = offsets(evolution), len(evolution.paths)
    title = f"where heads look from a pixel: {evolution.model}"
    figure, axes = frame(SIDE * many, 2 * (SIDE + 0.2), left=0.75, bottom=0.15, top=0.2, title=title)
    axes.set_axis_off()
    box = axes.get_position()
    wide, high = box.width / many, box.height / 2
    for row, record in enumerate((FIRST, LAST)):
        for layer in range(many):
            bottom = box.y1 - (row + 1) * high
            panel = figure.add_axes((box.x0 + layer * wide, bottom, wide * 0.94, high * 0.94 * SIDE / (SIDE + 0.2)))
            _panel(panel, found, record, layer)
            if row == 0:
                panel.text(0.5, 1.17, f"layer {layer}", ha="center", transform=panel.transAxes, **font())
        step = evolution.steps[record]
        middle = box.y1 - (row + 0.5) * high
        figure.text(0.1 / figure.get_figwidth(), middle, f"step\n{step:,}", va="center", **font())
    return figure


def _panel(axes: Any, found: Offsets, record: int, layer: int) -> None:
    heads, circle = found.layers[layer], part(".patches").Circle
    for line in (-1.5, -0.5, 0.5, 1.5):
        axes.plot([-1.5, 1.5], [line, line], color=EDGE, linewidth=0.5, zorder=0)
        axes.plot([line, line], [-1.5, 1.5], color=EDGE, linewidth=0.5, zorder=0)
    axes.plot([0], [0], marker="+", markersize=6, color="#777777", markeredgewidth=0.9, zorder=1)
    for k, at in enumerate(heads):
        y, x = (max(-REACH, min(REACH, float(v))) for v in found.centre[record, at])
        colour = SERIES[k % len(SERIES)]
        ring = circle((x, y), float(found.width[record, at]), edgecolor=colour, facecolor=colour, linewidth=0.5)
        ring.set_alpha(0.12)
        axes.add_patch(ring)
        axes.plot([x], [y], "o", markersize=6.5, color=colour, markeredgewidth=0, zorder=3 + k, clip_on=False)
        axes.text(x, y, str(k), ha="center", va="center_baseline", zorder=3 + k, **font(size=5.0, color="white"))
    axes.set(xlim=(-REACH, REACH), ylim=(REACH, -REACH), xticks=[], yticks=[])
    axes.spines[:].set(linewidth=0.5, color=EDGE)
    axes.set_title(f"{found.covered()[record][layer]} of 9", pad=2, **font(color="#777777"))
