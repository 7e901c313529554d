"""Profiles, lines between words, and series of numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.plots.drawing import COLOURS, EDGE, LINE, SERIES, font, frame, inches, name_axes, part, shown, thin_ticks
from regard.plots.maps import coloured

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

__all__ = ["FAINT", "MOST_LINES", "lines", "profile", "series"]

FAINT = 0.02  # a line of less weight is not drawn
MOST_LINES = 80  # words along a side of a figure of lines


def profile(offsets: Any, weights: ArrayLike, *, title: str | None = None) -> Figure:
    """The mean weight at each relative offset: bars on a line, a map with its centre marked for ``[2ry+1, 2rx+1]``.

    ``offsets`` are as many numbers as there are weights; on a grid ``(dy, dx)``, or None: −r … r.

    >>> figure = profile([-2, -1, 0], [0.1, 0.7, 0.2], title="it looks one token back")
    >>> [float(bar.get_height()) for bar in figure.axes[0].patches]
    [0.1, 0.7, 0.2]
    """
    values = np.asarray(weights, dtype=float)
    if values.ndim not in (1, 2) or not values.size:
        raise ValueError(f"a profile is [2r+1] or [2ry+1, 2rx+1], got {list(values.shape)}")
    if offsets is None:
        offsets = [np.arange(side) - side // 2 for side in values.shape]
    else:
        offsets = [np.asarray(x) for x in ([offsets] if values.ndim == 1 else offsets)]
    if tuple(len(x) for x in offsets) != values.shape:
        raise ValueError(f"{[len(x) for x in offsets]} offsets for weights {list(values.shape)}; one each is needed")
    if values.ndim == 2:
        dy, dx = offsets
        figure, axes = coloured(values, (dx[0] - 0.5, dx[-1] + 0.5, dy[-1] + 0.5, dy[0] - 0.5), None, None, title)
        axes.plot([0], [0], marker="+", markersize=7, color="#d55e00", markeredgewidth=1.2)
        name_axes(axes, "columns from query to key", "rows from query to key")
        return figure
    figure, axes = frame(5, 2.2, left=0.6, bottom=0.45, title=title)
    if offsets[0][0] < 0 < offsets[0][-1]:
        axes.axvline(0, color=EDGE, linewidth=0.5, zorder=0)
    axes.bar(offsets[0], values, width=0.8, color=COLOURS[5])
    axes.margins(x=0.01)
    axes.set_ylim(bottom=min(0.0, float(np.nanmin(values))))
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(part(".ticker").MaxNLocator(9, integer=True))
    name_axes(axes, "key − query, tokens", "mean weight")
    return figure


def lines(
    row_words: Sequence[object], key_words: Sequence[object], weights: Any, *, title: str | None = None
) -> Figure:
    """Queries on the left, keys on the right, a line from each to each, as opaque as the weight is large.

    ``weights``: an array ``[n, m]``, or a list of tuples ``(i, j, weight)``. Those under 0.02 are not drawn.

    >>> figure = lines(["it", "was"], ["the", "cat"], [[0.1, 0.9], [0.5, 0.5]])
    >>> sorted(text.get_text() for text in figure.axes[0].texts)
    ['cat', 'it', 'keys', 'queries', 'the', 'was']
    """
    n, m = len(row_words), len(key_words)
    if max(n, m) > MOST_LINES:
        raise ValueError(f"lines are for up to {MOST_LINES} tokens a side, got {n} queries and {m} keys: choose rows")
    if isinstance(weights, (list, tuple)) and all(isinstance(x, tuple) for x in weights):
        entries = [(int(i), int(j), float(w)) for i, j, w in weights]
        if any(not (0 <= i < n and 0 <= j < m) for i, j, _ in entries):
            raise ValueError(f"a weight's place (i, j) lies outside the {n} queries and {m} keys")
    else:
        dense = np.asarray(weights, dtype=float)
        if dense.shape != (n, m):
            raise ValueError(f"weights are {list(dense.shape)}, but there are {n} queries and {m} keys")
        entries = [(int(i), int(j), float(dense[i, j])) for i, j in np.argwhere(dense >= FAINT)]
    entries = sorted((x for x in entries if x[2] >= FAINT), key=lambda x: x[2])  # strong ones are drawn last, on top
    left, right = (0.2 + inches([*words, name]) for words, name in ((row_words, "queries"), (key_words, "keys")))
    most = max(n, m, 1)
    figure, axes = frame(2.4, 0.155 * most, left=left, right=right, bottom=0.1, top=0.3, title=title)
    y, y_key = (np.arange(n) + 0.5) * most / max(n, 1), (np.arange(m) + 0.5) * most / max(m, 1)
    rgb = part(".colors").to_rgb(LINE)
    ends = [[(0.0, y[i]), (1.0, y_key[j])] for i, j, _ in entries]
    colours = [(*rgb, min(w, 1.0)) for _, _, w in entries]
    axes.add_collection(part(".collections").LineCollection(ends, colors=colours, linewidths=1.6, capstyle="round"))
    for at, word in zip(y, row_words, strict=True):
        axes.text(-0.02, at, shown(word), ha="right", va="center", **font())
    for at, word in zip(y_key, key_words, strict=True):
        axes.text(1.02, at, shown(word), ha="left", va="center", **font())
    for x, side, name in ((-0.02, "right", "queries"), (1.02, "left", "keys")):
        axes.text(x, -0.5, name, ha=side, va="center", **font(color="#777777"))
    axes.set(xlim=(0, 1), ylim=(most, 0))
    axes.set_axis_off()
    return figure


def series(
    values: Mapping[str, Sequence[ArrayLike]],
    *,
    title: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    log: str = "",
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Named lines ``{name: (x, y)}``, or ``(x, y, low, high)`` with the interval shaded; ``log``: "x", "y" or "xy".

    Names stand at the lines' ends. On a logarithmic axis what is not positive is left out. ``marks`` are upright lines
    ``{name: x}``.

    >>> n = np.array([256, 512, 1024])
    >>> figure = series({"attention": (n, n**2), "the rest": (n, 1024 * n)}, x_label="n", log="xy")
    >>> figure.axes[0].get_xscale(), [text.get_text() for text in figure.axes[0].texts]
    ('log', ['attention', 'the rest'])
    """
    if log not in ("", "x", "y", "xy"):
        raise ValueError(f'log is {log!r}; it is "", "x", "y" or "xy"')
    height = max(2.8, 0.15 * len(values))
    figure, axes = frame(4.6, height, left=0.65, right=0.2 + inches(values), bottom=0.45, title=title)
    axes.set(xscale="log" if "x" in log else "linear", yscale="log" if "y" in log else "linear")
    thin_ticks(axes)  # again: a scale brings ticks of its own
    drawn = []
    for at, (name, given) in enumerate(values.items()):
        colour, style = SERIES[at % len(SERIES)], ("-", "--", ":", "-.")[at // len(SERIES) % 4]
        x, *ys = (np.asarray(part, dtype=float) for part in given)
        if len(ys) not in (1, 3) or any(y.shape != x.shape or x.ndim != 1 for y in ys):
            raise ValueError(f"series {name!r} must be (x, y) or (x, y, low, high), vectors of one length")
        x = np.where(x > 0, x, np.nan) if "x" in log else x
        ys = [np.where(y > 0, y, np.nan) if "y" in log else y for y in ys]
        if not np.isfinite(x + ys[0]).any():
            raise ValueError(f"series {name!r} has no number that can be drawn" + (f" with log={log!r}" if log else ""))
        if len(ys) == 3:
            axes.fill_between(x, ys[1], ys[2], color=colour, alpha=0.18, linewidth=0)
        few = "o" if np.isfinite(ys[0]).sum() < 2 else None
        axes.plot(x, ys[0], color=colour, linestyle=style, linewidth=1.3, marker=few, markersize=3)
        last = np.argwhere(np.isfinite(x + ys[0]))[-1, 0]
        drawn.append((name, colour, float(x[last]), float(ys[0][last])))
    axes.margins(x=0)
    axes.spines[["top", "right"]].set_visible(False)
    for name, at_x in (marks or {}).items():
        axes.axvline(at_x, color=EDGE, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.text(at_x, 1.0, f" {shown(name, 24)}", transform=axes.get_xaxis_transform(), va="top", **font())
    name_axes(axes, x_label, y_label)
    _name_ends(axes, drawn, 0.15 / height)
    return figure


def _name_ends(axes: Any, ends: list[tuple[str, str, float, float]], apart: float) -> None:
    """Names at the right of lines, in the lines' colours, moved as far as it takes to be apart."""
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    heights = [(float(to_axes.transform((x, y))[1]), name, colour) for name, colour, x, y in ends]
    low = 0.0
    for at, (height, name, colour) in enumerate(sorted(heights)):
        low = min(max(height, low), 1.0 - apart * (len(heights) - 1 - at))
        axes.text(1.015, low, shown(name), va="center", transform=axes.transAxes, **font(color=colour))
        low += apart
