"""Maps: many small ones, or one with words beside it. White where a weight is 0, darker by its square root."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.plots.drawing import COLOURS, EDGE, count, font, frame, inches, name_axes, part, shown, thin_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

__all__ = ["MOST_LABELS", "coloured", "grid", "heat"]

MOST_LABELS = 64  # words along a side of a map


def grid(
    maps: ArrayLike | Sequence[ArrayLike],
    titles: Sequence[str] | None = None,
    *,
    columns: int | None = None,
    rows: int | None = None,
    row_labels: Sequence[object] | None = None,
    column_labels: Sequence[object] | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    title: str | None = None,
) -> Figure:
    """Many small maps, each scaled to its own maximum: ``[L, H, g, g]`` with a row of the figure for each of the L.

    ``[H, g, g]`` fills ``columns`` or ``rows`` in reading order (without them, about a square). A list may hold
    ``[H, g, g]`` of unequal sizes. ``titles`` stand above the maps, labels on the left and on top.

    >>> figure = grid(np.random.rand(2, 3, 8, 8), row_labels=["layer 0", "layer 1"], title="6 heads")
    >>> len(figure.axes[0].images), figure.texts[0].get_text()
    (6, '6 heads')
    """
    table = _table(maps, columns, rows)
    high, wide = len(table), max(map(len, table))
    row_labels, column_labels = count("row_labels", row_labels, high), count("column_labels", column_labels, wide)
    titles = count("titles", titles, sum(map(len, table)))
    names = None if titles is None else iter(titles)
    cell = min(max(min(10 / wide, 12.5 / high), 0.3), 1.8)
    above = 0.0 if names is None else 0.16 / cell  # room for a title, in cells
    left = 0.1 + inches(row_labels, most=40) + (0.2 if y_label else 0)
    top = 0.1 + (0.12 if column_labels else 0) + (0.2 if x_label else 0)
    figure, axes = frame(cell * wide, cell * (1 + above) * high, left=left, bottom=0.1, top=top, title=title)
    gap = min(0.04, 0.03 / cell)
    boxes = []
    for r, line in enumerate(table):
        y = r * (1 + above) + above
        for c, weights in enumerate(line):
            x, x_end, y_end, y_start = c + gap, c + 1 - gap, y + 1 - gap, y + gap
            _image(axes, weights, (x, x_end, y_end, y_start))
            boxes.append([(x, y_start), (x_end, y_start), (x_end, y_end), (x, y_end), (x, y_start)])
            if names is not None:
                axes.text(x, y, shown(next(names), int(cell * 17)), va="bottom", **font())
    axes.add_collection(part(".collections").LineCollection(boxes, colors=EDGE, linewidths=0.3, zorder=3))
    axes.set(xlim=(0, wide), ylim=(high * (1 + above), 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2, labeltop=True, labelbottom=False)
    if column_labels:
        axes.set_xticks(np.arange(wide) + 0.5, [shown(x, max(3, int(cell * 17))) for x in column_labels], **font())
    if row_labels:
        middles = np.arange(high) * (1 + above) + above + 0.5
        axes.set_yticks(middles, [shown(x, 40) for x in row_labels], **font())
    axes.xaxis.set_label_position("top")
    name_axes(axes, x_label, y_label)
    return figure


def heat(
    map: ArrayLike,
    row_words: Sequence[object] | None = None,
    key_words: Sequence[object] | None = None,
    *,
    title: str | None = None,
    rows: tuple[float, float] | None = None,
    keys: tuple[float, float] | None = None,
) -> Figure:
    """One map ``[n, m]``: queries down, keys across, words beside it where a side has at most 64, else numbers.

    ``rows`` and ``keys`` say which span the cells pool, ``(first, after the last)``; 0 … n and 0 … m unless given.

    >>> figure = heat([[1.0, 0.0], [0.3, 0.7]], ["the", "cat"], ["the", "cat"])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['the', 'cat']
    """
    weights = _map(map)
    n, m = weights.shape
    row_words, key_words = count("row_words", row_words, n), count("key_words", key_words, m)
    row_words, key_words = (None if x is None or len(x) > MOST_LABELS else x for x in (row_words, key_words))
    (y, y_end), (x, x_end) = rows or (0, n), keys or (0, m)
    span = (x - 0.5, x_end - 0.5, y_end - 0.5, y - 0.5)  # a token's cell reaches half a token to either side
    figure, axes = coloured(weights, span, row_words, key_words, title)
    name_axes(axes, "keys", "queries")
    return figure


def coloured(
    weights: Any, span: tuple[float, float, float, float], row_words: Any, key_words: Any, title: str | None
) -> tuple[Figure, Any]:
    """One large map with words or numbers on its sides and the scale beside it."""
    n, m = weights.shape
    cell = min(max(4.5 / max(n, m), 0.13), 0.4)
    cell *= min(1.0, (8.4 if row_words or key_words else 5.0) / (cell * max(n, m)))
    width, height = max(0.8, m * cell), max(0.8, n * cell)
    left, bottom = (0.3 + inches(words or ["0000"]) for words in (row_words, key_words or ["0"]))
    figure, axes = frame(width, height, left=left, bottom=bottom, right=0.75, title=title)
    box = axes.get_position()
    wide = figure.get_figwidth()
    scale = figure.add_axes((box.x1 + 0.1 / wide, box.y0, 0.1 / wide, box.height))
    drawn = _image(axes, weights, span)
    bar = figure.colorbar(drawn, cax=scale)
    bar.outline.set(linewidth=0.5, edgecolor=EDGE)
    bar.set_label("weight", **font())
    thin_ticks(scale)
    for axis, words, (first, after) in ((axes.xaxis, key_words, span[:2]), (axes.yaxis, row_words, span[:1:-1])):
        if words is None:
            axis.set_major_locator(part(".ticker").MaxNLocator(8, integer=True))
            continue
        middles = first + (np.arange(len(words)) + 0.5) * (after - first) / len(words)
        axis.set_ticks(middles, [*map(shown, words)], rotation=90 if axis is axes.xaxis else 0, **font())
    return figure, axes


def _image(axes: Any, weights: Any, span: tuple[float, float, float, float]) -> Any:
    """A map within (left, right, bottom, top), white at 0 and darkest at its maximum, by the square root."""
    colors = part(".colors")
    most = float(np.max(weights, where=np.isfinite(weights), initial=0.0)) or 1.0
    norm, colours = colors.PowerNorm(0.5, 0, most), colors.LinearSegmentedColormap.from_list("regard", COLOURS)
    return axes.imshow(weights, cmap=colours, norm=norm, extent=span, aspect="auto", origin="upper")


def _map(weights: ArrayLike) -> Any:
    found = np.asarray(weights, dtype=float)
    if found.ndim != 2 or not found.size:
        raise ValueError(f"a map must be [n, m] with something in it, got {list(found.shape)}")
    return found


def _table(maps: Any, columns: int | None, rows: int | None) -> list[list[Any]]:
    """The maps as rows of a figure."""
    table = list(maps)
    if all(np.ndim(x) == 2 for x in table):
        if columns is None:
            columns = -(-len(table) // rows) if rows else int(np.ceil(np.sqrt(len(table))))
        if columns < min(1, len(table)) or (rows is not None and columns * rows < len(table)):
            raise ValueError(f"{rows} rows of {columns} columns do not hold {len(table)} maps")
        table = [table[i : i + columns] for i in range(0, len(table), columns or 1)]
    elif columns is not None or rows is not None:
        raise ValueError("columns and rows are for maps [H, g, g]; these have rows of their own")
    found = [[_map(x) for x in line] for line in table]
    if not any(found):
        raise ValueError("there is no map to draw")
    return found
