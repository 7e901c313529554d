"""Profiles as bars, attention as lines between labels, and series of numbers as curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._errors import RegardError
from regard.plots import _drawing as figures
from regard.plots._figure_style import FigureStyle, current_style, styled
from regard.plots._maps import draw_heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

FAINTEST_LINE = 0.02  # lines with a smaller weight are not drawn
MOST_LINES = 80  # the most labels on each side of a figure of lines


@styled
def profile(
    offsets: Any,
    weights: ArrayLike,
    *,
    title: str | None = None,
    value_label: str = "mean weight",
    style: FigureStyle | None = None,
) -> Figure:
    """Draw the mean weight at each relative offset: bars on a line; on a grid a map whose centre is marked.

    - ``offsets``: one number per weight; on a grid a pair ``(dy, dx)``, one number per row and per column of weights.
      None means −r … r.
    - ``weights``: ``[2r+1]``, or ``[2ry+1, 2rx+1]`` on a grid.
    - ``value_label``: what the weights are: the label of the bars' axis, or of the colour bar.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    >>> figure = profile([-2, -1, 0], [0.1, 0.7, 0.2], title="it looks one token back")
    >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
    [0.1, 0.7, 0.2]
    """
    values = np.asarray(weights, dtype=float)
    if values.ndim not in (1, 2) or not values.size:
        raise RegardError(f"weights of a profile must be [2r+1] or [2ry+1, 2rx+1], got {list(values.shape)}")
    if offsets is None:
        axis_offsets = [np.arange(side) - side // 2 for side in values.shape]
    elif values.ndim == 1:
        axis_offsets = [np.asarray(offsets)]
    else:
        axis_offsets = [np.asarray(axis) for axis in offsets]
    lengths = [len(axis) for axis in axis_offsets]
    if tuple(lengths) != values.shape:
        raise RegardError(f"offsets must have one entry per weight, {list(values.shape)}, got {lengths}")

    if values.ndim == 2:
        dy, dx = axis_offsets
        span = (dx[0] - 0.5, dx[-1] + 0.5, dy[-1] + 0.5, dy[0] - 0.5)
        figure, axes, _ = draw_heatmap(values, span, None, None, title, value_label)
        axes.plot([0], [0], marker="+", markersize=7, color="#d55e00", markeredgewidth=1.2)
        figures.label_axes(axes, "columns from query to key", "rows from query to key")
        return figure

    line = axis_offsets[0]
    figure, axes = figures.new_figure(5, 2.2, left=0.6, bottom=0.45, title=title)
    if line[0] < 0 < line[-1]:
        axes.axvline(0, color=figures.EDGE_COLOUR, linewidth=0.5, zorder=0)
    axes.bar(line, values, width=0.8, color=figures.map_colours()(0.62))
    axes.margins(x=0.01)
    axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(figures.import_matplotlib(".ticker").MaxNLocator(9, integer=True))
    figures.label_axes(axes, "key − query, tokens", value_label)
    return figure


@styled
def lines(
    row_labels: Sequence[object],
    key_labels: Sequence[object],
    weights: Any,
    *,
    title: str | None = None,
    style: FigureStyle | None = None,
) -> Figure:
    """Draw queries on the left, keys on the right, and a line for each weight; larger weights are more opaque.

    - ``row_labels``, ``key_labels``: the n queries and m keys, at most 80 each.
    - ``weights``: an array ``[n, m]``, or a list of tuples ``(i, j, weight)``. Weights under 0.02 are not drawn.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    >>> figure = lines(["it", "was"], ["the", "cat"], [[0.1, 0.9], [0.5, 0.5]])
    >>> sorted(text.get_text() for text in figure.axes[0].texts)
    ['cat', 'it', 'keys', 'queries', 'the', 'was']
    """
    n = len(row_labels)
    m = len(key_labels)
    if max(n, m) > MOST_LINES:
        raise RegardError(f"lines takes up to {MOST_LINES} labels per side, got {n} queries and {m} keys")
    entries = _weight_entries(weights, n, m)
    left = 0.2 + figures.text_width([*row_labels, "queries"])
    right = 0.2 + figures.text_width([*key_labels, "keys"])
    most = max(n, m, 1)
    height = 0.155 * current_style().scale * most
    figure, axes = figures.new_figure(
        2.4, height, left=left, right=right, bottom=0.1, top=0.3, title=title, keep_height=True
    )
    row_y = (np.arange(n) + 0.5) * most / max(n, 1)
    key_y = (np.arange(m) + 0.5) * most / max(m, 1)
    # One colour with the weight as opacity: overlapping lines add up.
    rgb = figures.import_matplotlib(".colors").to_rgb(_weight_colour())
    ends = []
    colours = []
    for i, j, weight in entries:
        ends.append([(0.0, row_y[i]), (1.0, key_y[j])])
        colours.append((*rgb, min(weight, 1.0)))
    collections = figures.import_matplotlib(".collections")
    axes.add_collection(collections.LineCollection(ends, colors=colours, linewidths=1.6, capstyle="round"))

    for x, side, labels, heights in ((-0.02, "right", row_labels, row_y), (1.02, "left", key_labels, key_y)):
        for y, label in zip(heights, labels, strict=True):
            axes.text(x, y, figures.drawable_text(label), ha=side, va="center", **figures.font_options(tokens=True))
    for x, side, name in ((-0.02, "right", "queries"), (1.02, "left", "keys")):
        axes.text(x, -0.5, name, ha=side, va="center", **figures.font_options(color="#777777"))
    axes.set(xlim=(0, 1), ylim=(most, 0))
    axes.set_axis_off()
    return figure


def _weight_colour() -> str:
    """The colour of lines between tokens; the default one, or the first of another palette."""
    if current_style().palette == "blue":
        return figures.WEIGHT_COLOUR
    return figures.line_colours()[0]


def _weight_entries(weights: Any, n: int, m: int) -> list[tuple[int, int, float]]:
    """The entries ``(i, j, weight)`` that are drawn, the largest last, because later lines cover earlier ones."""
    entries = []
    if isinstance(weights, (list, tuple)) and all(isinstance(x, tuple) for x in weights):
        for i, j, weight in weights:
            if not (0 <= int(i) < n and 0 <= int(j) < m):
                raise RegardError(f"weights has an entry ({i}, {j}) outside the {n} queries and {m} keys")
            entries.append((int(i), int(j), float(weight)))
    else:
        array = np.asarray(weights, dtype=float)
        if array.shape != (n, m):
            raise RegardError(f"weights has shape {list(array.shape)}; it must be [{n}, {m}], queries and keys")
        for i, j in np.argwhere(array >= FAINTEST_LINE):
            entries.append((int(i), int(j), float(array[i, j])))
    drawn = [entry for entry in entries if entry[2] >= FAINTEST_LINE]
    return sorted(drawn, key=lambda entry: entry[2])


@styled
def series(
    values: Mapping[str, Sequence[ArrayLike]],
    *,
    title: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    log: str = "",
    marks: Mapping[str, float] | None = None,
    style: FigureStyle | None = None,
) -> Figure:
    """Draw named curves, with the name of each curve at its end.

    - ``values``: ``{name: (x, y)}``, or ``{name: (x, y, low, high)}`` with the interval shaded.
    - ``log``: the logarithmic axes, "x", "y" or "xy". Values ≤ 0 are not drawn on these axes.
    - ``marks``: vertical lines ``{name: x}``.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    >>> n = np.array([256, 512, 1024])
    >>> figure = series({"attention": (n, n**2), "the rest": (n, 1024 * n)}, x_label="n", log="xy")
    >>> figure.axes[0].get_xscale(), [text.get_text() for text in figure.axes[0].texts]
    ('log', ['attention', 'the rest'])
    """
    if log not in ("", "x", "y", "xy"):
        raise RegardError(f'log must be "", "x", "y" or "xy", got {log!r}')
    # Names stand under each other at the ends of the curves, so many of them need a high figure.
    scale = current_style().scale
    right = 0.2 + figures.text_width(values)
    width = figures.axes_width(4.6, 0.65, right)
    height = max(2.8 * width / 4.6, 0.15 * scale * len(values))
    figure, axes = figures.new_figure(width, height, left=0.65, right=right, bottom=0.45, title=title, keep_height=True)
    if "x" in log:
        axes.set_xscale("log")
    if "y" in log:
        axes.set_yscale("log")
    figures.thin_ticks(axes)  # again: a new scale resets the ticks
    ends = []
    colours = figures.line_colours()
    for index, (name, columns) in enumerate(values.items()):
        colour = colours[index % len(colours)]
        line_style = ("-", "--", ":", "-.")[index // len(colours) % 4]
        x, y, *interval = _curve(name, columns, log)
        if interval:
            axes.fill_between(x, interval[0], interval[1], color=colour, alpha=0.18, linewidth=0)
        # A curve with a single point would not be visible.
        marker = "o" if np.isfinite(y).sum() < 2 else None
        axes.plot(x, y, color=colour, linestyle=line_style, linewidth=1.3, marker=marker, markersize=3)
        last = np.argwhere(np.isfinite(x + y))[-1, 0]
        ends.append((name, colour, float(x[last]), float(y[last])))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    for name, position in (marks or {}).items():
        axes.axvline(position, color=figures.EDGE_COLOUR, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        text = f" {figures.drawable_text(name, 24)}"
        axes.text(position, 1.0, text, transform=axes.get_xaxis_transform(), va="top", **figures.font_options())
    figures.label_axes(axes, x_label, y_label)
    _name_ends(axes, ends, 0.15 * scale / height)
    return figure


def _curve(name: str, columns: Sequence[ArrayLike], log: str) -> list[Any]:
    """Return x and y of one curve, and low and high if given; NaN where a logarithm does not exist."""
    arrays = [np.asarray(column, dtype=float) for column in columns]
    shapes = {array.shape for array in arrays}
    if len(arrays) not in (2, 4) or len(shapes) > 1 or arrays[0].ndim != 1:
        raise RegardError(f"series {name!r} must be (x, y) or (x, y, low, high), vectors of one length")
    for index, array in enumerate(arrays):
        axis = "xyyy"[index]
        if axis in log:
            arrays[index] = np.where(array > 0, array, np.nan)
    if not np.isfinite(arrays[0] + arrays[1]).any():
        scale = f" with log={log!r}" if log else ""
        raise RegardError(f"series {name!r} has no number that can be drawn{scale}")
    return arrays


def _name_ends(axes: Any, ends: list[tuple[str, str, float, float]], apart: float) -> None:
    """Write names at the right ends of curves, in the curves' colours, moved up or down so that they do not overlap."""
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    heights = []
    for name, colour, x, y in ends:
        heights.append((float(to_axes.transform((x, y))[1]), name, colour))
    lowest = 0.0
    for index, (height, name, colour) in enumerate(sorted(heights)):
        names_above = len(heights) - 1 - index
        lowest = min(max(height, lowest), 1.0 - apart * names_above)
        text = figures.drawable_text(name)
        axes.text(1.015, lowest, text, va="center", transform=axes.transAxes, **figures.font_options(color=colour))
        lowest += apart
