"""Maps of weights: a grid of small maps, or one heatmap with labels. 0 is white; darkness follows the square root."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from regard._errors import RegardError
from regard.plots import _drawing as figures
from regard.plots._figure_style import FigureStyle, current_style, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

MOST_LABELS = 64  # the most labels on each side of a map
PAGE_HEIGHT = 8.0  # inches of all rows of maps, if the figure has a given width
WEIGHT_LABEL = "weight (a row sums to 1)"


@styled
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
    value_label: str = "weight",
    style: FigureStyle | None = None,
) -> Figure:
    """Draw many small maps, each scaled to its own maximum.

    - ``maps``: ``[L, H, g, g]``, one row of the figure for each of the L; ``[H, g, g]``, which fills ``columns`` or
      ``rows`` in reading order (default: about a square); or a list of ``[H, g, g]`` of unequal sizes.
    - ``titles``: one title above each map.
    - ``row_labels``, ``column_labels``: on the left and on top.
    - ``x_label``, ``y_label``, ``title``: labels and title of the whole figure.
    - ``value_label``: what the maps show; it labels the colour bar, which goes to the maximum of each map.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    >>> figure = grid(np.random.rand(2, 3, 8, 8), row_labels=["layer 0", "layer 1"], title="6 heads")
    >>> len(figure.axes[0].images), figure.texts[0].get_text()
    (6, '6 heads')
    """
    table = _figure_rows(maps, columns, rows)
    row_count = len(table)
    column_count = max(map(len, table))
    row_labels = figures.check_count("row_labels", row_labels, row_count)
    column_labels = figures.check_count("column_labels", column_labels, column_count)
    titles = figures.check_count("titles", titles, sum(map(len, table)))
    remaining_titles: Iterator[str] | None = None if titles is None else iter(titles)

    # Sizes in inches: cells as large as fit on a page, within limits; then the margins that the labels need.
    scale = current_style().scale
    cell = min(max(min(10 / column_count, 12.5 / row_count), 0.3), 1.8)
    left = 0.1 + figures.text_width(row_labels, most=40)
    top = 0.1
    if y_label:
        left += 0.2
    if column_labels:
        top += 0.12
    if x_label:
        top += 0.2
    cell = figures.axes_width(cell * column_count, left) / column_count
    # A figure of a given width is for a page, so it must not be higher than one: cells are then not squares.
    cell_height = cell
    if current_style().inches is not None:
        cell_height = min(cell, PAGE_HEIGHT / row_count)
    above = 0.0 if titles is None else 0.16 * scale / cell_height  # space for a title, in cells
    height = cell_height * (1 + above) * row_count
    figure, axes = figures.new_figure(
        cell * column_count, height, left=left, bottom=0.45, top=top, title=title, keep_height=True
    )

    # A gap of constant width on paper, in units of cells.
    gap = min(0.04, 0.03 / cell)
    y_gap = min(0.04, 0.03 / cell_height)
    borders = []
    for r, figure_row in enumerate(table):
        y = r * (1 + above) + above
        y_start = y + y_gap
        y_end = y + 1 - y_gap
        for c, weights in enumerate(figure_row):
            x = c + gap
            x_end = c + 1 - gap
            _draw_map(axes, weights, (x, x_end, y_end, y_start))
            borders.append([(x, y_start), (x_end, y_start), (x_end, y_end), (x, y_end), (x, y_start)])
            if remaining_titles is not None:
                text = figures.drawable_text(next(remaining_titles), max(3, int(cell * 16 / scale)))
                axes.text(x, y, text, va="bottom", **figures.font_options())
    collections = figures.import_matplotlib(".collections")
    axes.add_collection(collections.LineCollection(borders, colors=figures.EDGE_COLOUR, linewidths=0.3, zorder=3))

    axes.set(xlim=(0, column_count), ylim=(row_count * (1 + above), 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2, labeltop=True, labelbottom=False)
    if column_labels:
        texts = [figures.drawable_text(label) for label in column_labels]
        needed = figures.text_width([*texts, "0"]) * scale
        # Numbers must not be shortened, so labels that do not fit side by side are left out.
        step = figures.label_step(cell * column_count, column_count, needed)
        axes.set_xticks((np.arange(column_count) + 0.5)[::step], texts[::step], **figures.font_options())
    if row_labels:
        middles = np.arange(row_count) * (1 + above) + above + 0.5
        texts = [figures.drawable_text(label, 40) for label in row_labels]
        step = figures.label_step(height, row_count, figures.line_height())
        axes.set_yticks(middles[::step], texts[::step], **figures.font_options())
    axes.xaxis.set_label_position("top")
    figures.label_axes(axes, x_label, y_label)
    _draw_shared_bar(figure, axes, value_label)
    return figure


def _draw_shared_bar(figure: Figure, axes: Any, label: str) -> None:
    """A colour bar below maps that have scales of their own: from 0 to the maximum of each map."""
    scale = current_style().scale
    box = axes.get_position()
    width = min(0.8, box.width * figure.get_figwidth() * 0.5)
    bottom = 0.27 * scale / figure.get_figheight()
    place = (box.x0, bottom, width / figure.get_figwidth(), 0.07 * scale / figure.get_figheight())
    bar_axes = figure.add_axes(place)
    shades = np.linspace(0, 1, 128)[None]
    bar_axes.imshow(shades, cmap=figures.map_colours(), aspect="auto", extent=(0, 1, 0, 1))
    bar_axes.spines[:].set(linewidth=0.5, color=figures.EDGE_COLOUR)
    figures.thin_ticks(bar_axes)
    bar_axes.set(yticks=[])
    bar_axes.set_xticks([0, 1], ["0", "max"], **figures.font_options())
    # The label stands beside the bar, where it cannot meet the ticks; the longest text that fits.
    what = figures.drawable_text(label, 40)
    texts = [f"{what}, square-root scale, max of each map", f"{what}, max of each map", what]
    space = figure.get_figwidth() * (1 - box.x0) - 1.1 * width
    for text in texts:
        if figures.text_width([text], most=80) * scale <= space:
            break
    bar_axes.text(1.08, 0.5, text, va="center", ha="left", transform=bar_axes.transAxes, **figures.font_options())


@styled
def heatmap(
    map: ArrayLike,
    row_labels: Sequence[object] | None = None,
    key_labels: Sequence[object] | None = None,
    *,
    title: str | None = None,
    rows: tuple[float, float] | None = None,
    keys: tuple[float, float] | None = None,
    value_label: str = WEIGHT_LABEL,
    style: FigureStyle | None = None,
) -> Figure:
    """Draw one map ``[n, m]``: one row per query, one column per key.

    - ``map``: the weights.
    - ``row_labels``, ``key_labels``: n and m labels; a side with more than 64 labels shows numbers instead.
    - ``rows``, ``keys``: the positions that the map covers, ``(first, last + 1)``; default ``(0, n)`` and ``(0, m)``.
    - ``value_label``: the label of the colour bar.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    The figure grows with the font, so that every label fits. If the style has a width, labels that would overlap are
    left out at regular steps, and the axis says so: "keys (every 4th)".

    >>> figure = heatmap([[1.0, 0.0], [0.3, 0.7]], ["the", "cat"], ["the", "cat"])
    >>> [label.get_text() for label in figure.axes[0].get_xticklabels()]
    ['the', 'cat']
    """
    weights = _check_map(map)
    n, m = weights.shape
    row_labels = figures.check_count("row_labels", row_labels, n)
    key_labels = figures.check_count("key_labels", key_labels, m)
    if n > MOST_LABELS:
        row_labels = None
    if m > MOST_LABELS:
        key_labels = None
    y, y_end = rows or (0, n)
    x, x_end = keys or (0, m)
    span = (x - 0.5, x_end - 0.5, y_end - 0.5, y - 0.5)  # the cell of a token reaches half a token to either side
    figure, axes, steps = draw_heatmap(weights, span, row_labels, key_labels, title, value_label)
    row_step, key_step = steps
    figures.label_axes(axes, _axis_name("keys", key_step), _axis_name("queries", row_step))
    return figure


@styled
def signed_heatmap(
    values: ArrayLike,
    row_labels: Sequence[object] | None = None,
    column_labels: Sequence[object] | None = None,
    *,
    row_name: str,
    column_name: str,
    value_label: str,
    title: str | None = None,
    style: FigureStyle | None = None,
) -> Figure:
    """Draw values of either sign ``[rows, columns]``; white is 0, and the colours of both signs are equally dark.

    - ``values``: NaN leaves a cell empty.
    - ``row_labels``, ``column_labels``: a side with more than 64 labels shows numbers instead.
    - ``row_name``, ``column_name``: what the sides are.
    - ``value_label``: the label of the colour bar, which reaches equally far to both sides of 0.
    - ``title``, ``style``: as in ``heatmap``.

    >>> figure = signed_heatmap([[1.0, -0.5]], ["0"], ["0", "1"], row_name="layer", column_name="head", value_label="x")
    >>> figure.axes[0].images[0].get_clim()
    (-1.0, 1.0)
    """
    array = _check_map(values)
    n, m = array.shape
    row_labels = figures.check_count("row_labels", row_labels, n)
    column_labels = figures.check_count("column_labels", column_labels, m)
    if n > MOST_LABELS:
        row_labels = None
    if m > MOST_LABELS:
        column_labels = None
    span = (-0.5, m - 0.5, n - 0.5, -0.5)
    figure, axes, steps = draw_heatmap(array, span, row_labels, column_labels, title, value_label, signed=True)
    row_step, column_step = steps
    figures.label_axes(axes, _axis_name(column_name, column_step), _axis_name(row_name, row_step))
    return figure


def _axis_name(name: str, step: int) -> str:
    """The name of an axis; it says which labels are shown, because a part of the tokens reads like another text."""
    if step == 1:
        return name
    ending = {1: "st", 2: "nd", 3: "rd"}.get(step % 10, "th")
    if step % 100 in (11, 12, 13):
        ending = "th"
    return f"{name} (every {step}{ending})"


def draw_heatmap(
    weights: Any,
    span: tuple[float, float, float, float],
    row_labels: Any,
    key_labels: Any,
    title: str | None,
    value_label: str,
    *,
    signed: bool = False,
) -> tuple[Figure, Any, tuple[int, int]]:
    """Draw one large map in ``span`` (left, right, bottom, top) with labels or numbers, and a colour bar.

    - ``signed``: whether values may be negative; 0 is then in the middle of the colours.

    Returns the figure, its axes, and every how many-th label is shown of the rows and of the keys.
    """
    n, m = weights.shape
    cell = min(max(4.5 / max(n, m), 0.13), 0.4)
    largest_side = 8.4 if row_labels or key_labels else 5.0
    cell *= min(1.0, largest_side / (cell * max(n, m)))
    if (row_labels or key_labels) and max(n, m) <= MOST_LABELS:
        cell = max(cell, figures.line_height())  # every label fits, unless the style has a width
    left = 0.3 + figures.text_width(row_labels or ["0000"])
    bottom = 0.3 + figures.text_width(key_labels or ["0"])
    figure, axes = figures.new_figure(
        max(0.8, m * cell), max(0.8, n * cell), left=left, bottom=bottom, right=0.75, title=title
    )

    # The colour bar is placed by hand, because the layout of the figure is fixed in inches.
    box = axes.get_position()
    inch = 1 / figure.get_figwidth()
    bar_axes = figure.add_axes((box.x1 + 0.1 * inch, box.y0, 0.1 * inch, box.height))
    image = _draw_signed_map(axes, weights, span) if signed else _draw_map(axes, weights, span)
    bar = figure.colorbar(image, cax=bar_axes)
    bar.outline.set(linewidth=0.5, edgecolor=figures.EDGE_COLOUR)
    bar.set_label(figures.drawable_text(value_label, 40), **figures.font_options())
    figures.thin_ticks(bar_axes)

    left_edge, right_edge, bottom_edge, top_edge = span
    width, height = box.size * figure.get_size_inches()
    key_step = _label_side(axes.xaxis, key_labels, left_edge, right_edge, width, rotation=90)
    row_step = _label_side(axes.yaxis, row_labels, top_edge, bottom_edge, height, rotation=0)
    return figure, axes, (row_step, key_step)


def _label_side(
    axis: Any, labels: Sequence[object] | None, first: float, last: float, inches: float, rotation: int
) -> int:
    """Labels in the middle of their cells, or a few numbers if there are no labels. Returns the step between labels."""
    if labels is None:
        most = max(2, min(8, int(inches / (4 * figures.line_height()))))
        axis.set_major_locator(figures.import_matplotlib(".ticker").MaxNLocator(most, integer=True))
        return 1
    middles = first + (np.arange(len(labels)) + 0.5) * (last - first) / len(labels)
    texts = [figures.drawable_text(label) for label in labels]
    step = figures.label_step(inches, len(labels), figures.line_height())
    axis.set_ticks(middles[::step], texts[::step], rotation=rotation, **figures.font_options(tokens=True))
    return step


def _draw_map(axes: Any, weights: Any, span: tuple[float, float, float, float]) -> Any:
    """Draw a map within (left, right, bottom, top); white is 0, and the maximum is the darkest colour."""
    colors = figures.import_matplotlib(".colors")
    largest = float(np.max(weights, where=np.isfinite(weights), initial=0.0)) or 1.0
    norm = colors.PowerNorm(0.5, 0, largest)
    return axes.imshow(weights, cmap=figures.map_colours(), norm=norm, extent=span, aspect="auto", origin="upper")


def _draw_signed_map(axes: Any, values: Any, span: tuple[float, float, float, float]) -> Any:
    """Draw a map of values of either sign within (left, right, bottom, top); 0 is the middle colour."""
    colors = figures.import_matplotlib(".colors")
    largest = float(np.max(np.abs(values), where=np.isfinite(values), initial=0.0)) or 1.0
    norm = colors.Normalize(-largest, largest)
    return axes.imshow(values, cmap=figures.signed_colours(), norm=norm, extent=span, aspect="auto", origin="upper")


def _check_map(weights: ArrayLike) -> Any:
    array = np.asarray(weights, dtype=float)
    if array.ndim != 2 or not array.size:
        raise RegardError(f"a map must be [n, m] and not empty, got {list(array.shape)}")
    return array


def _figure_rows(maps: Any, columns: int | None, rows: int | None) -> list[list[Any]]:
    """The maps as rows of a figure."""
    table = list(maps)
    if all(np.ndim(x) == 2 for x in table):
        if columns is None:
            columns = -(-len(table) // rows) if rows else int(np.ceil(np.sqrt(len(table))))
        if columns < min(1, len(table)) or (rows is not None and columns * rows < len(table)):
            raise RegardError(f"{rows} rows of {columns} columns do not hold {len(table)} maps")
        table = [table[i : i + columns] for i in range(0, len(table), columns or 1)]
    elif columns is not None or rows is not None:
        raise RegardError("columns and rows are for maps [H, g, g]; maps [L, H, g, g] already have rows")
    checked = []
    for figure_row in table:
        checked.append([_check_map(x) for x in figure_row])
    if not any(checked):
        raise RegardError("maps must hold at least one map, got none")
    return checked
