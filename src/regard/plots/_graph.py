"""A graph of nodes in columns, for example of heads in layers, with weighted edges from left to right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard._errors import RegardError
from regard.plots import _drawing as figures
from regard.plots._figure_style import FigureStyle, current_style, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Edge = tuple[int, int, int, int, float]  # column and row of its start, column and row of its end, strength

# Inches between two columns and between two rows, at least and at most. The name of a node fits into the least ones.
COLUMN_WIDTH = (0.44, 1.5)
ROW_HEIGHT = (0.27, 0.5)
WIDTH = 6.0  # of the axes of a graph whose distances are between these
HEIGHT = 3.0
NODE = 3.2  # diameter in points
FAINTEST = 0.3  # the opacity of the weakest edge
NODE_COLOUR = "#d5d5d5"


@styled
def graph(
    columns: Sequence[int],
    edges: Mapping[str, Sequence[Edge]],
    *,
    title: str | None = None,
    column_label: str = "layer",
    row_label: str = "head",
    style: FigureStyle | None = None,
) -> Figure:
    """Draw nodes in columns, and edges from left to right; stronger edges are thicker and more opaque.

    - ``columns``: how many nodes each column has.
    - ``edges``: by kind, tuples ``(column, row, later column, row, strength)`` with strengths between 0 and 1. Each
      kind has a colour, and its name stands above the graph.
    - ``column_label``, ``row_label``: the names of the axes.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    Nodes with edges are named ``column.row``, if there is room for the names.

    >>> figure = graph([2, 2], {"K": [(0, 1, 1, 0, 0.8)]})
    >>> sorted(text.get_text() for text in figure.axes[0].texts)
    ['0.1', '1.0', 'K']
    """
    _check(columns, edges)
    rows = max(columns)
    width = len(columns) * _distance(WIDTH / len(columns), COLUMN_WIDTH)
    height = (rows + 0.5) * _distance(HEIGHT / rows, ROW_HEIGHT)
    figure, axes = figures.new_figure(width, height, left=0.5, bottom=0.45, top=0.3, title=title, keep_height=True)
    axes.set(xlim=(-0.6, len(columns) - 0.4), ylim=(rows - 0.25, -0.75))
    colours = figures.line_colours()
    for index, of_kind in enumerate(edges.values()):
        for edge in sorted(of_kind, key=lambda edge: edge[4]):
            # Edges of several kinds between the same nodes must not hide each other.
            shift = 0.12 * (index - (len(edges) - 1) / 2)
            axes.add_patch(_curve(edge, colours[index % len(colours)], shift))
    _draw_nodes(axes, columns, edges)
    _name_kinds(axes, list(edges), colours)

    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    inches = axes.get_position().width * figure.get_size_inches()[0]
    step = figures.label_step(inches, len(columns), figures.text_width([str(len(columns))]) + 0.05)
    axes.set_xticks(range(0, len(columns), step))
    axes.set_yticks(range(rows))
    figures.label_axes(axes, column_label, row_label)
    return figure


def _check(columns: Sequence[int], edges: Mapping[str, Sequence[Edge]]) -> None:
    if not columns or min(columns) < 1:
        raise RegardError(f"columns must be one count of nodes ≥ 1 per column, got {list(columns)}")
    for name, of_kind in edges.items():
        for edge in of_kind:
            column, row, later, later_row, strength = edge
            inside = 0 <= column < later < len(columns)
            if not inside or not (0 <= row < columns[column] and 0 <= later_row < columns[later]):
                raise RegardError(f"edges of {name!r} must lead from a node to one of a later column, got {edge}")
            if not 0 <= strength <= 1:
                raise RegardError(f"edges of {name!r} must have strengths from 0 to 1, got {strength}")


def _distance(inches: float, limits: tuple[float, float]) -> float:
    least, most = limits
    return min(max(inches, least), most) * current_style().scale


def _curve(edge: Edge, colour: str, shift: float) -> Any:
    """A line that leaves and enters its nodes horizontally; a long line in one row bends around the nodes between."""
    column, row, later, later_row, strength = edge
    bend = shift
    if row == later_row and later > column + 1:
        bend = shift - 0.45
    third = (later - column) / 3
    points = [(column, row), (column + third, row + bend), (later - third, later_row + bend), (later, later_row)]
    path_class = figures.import_matplotlib(".path").Path
    path = path_class(points, [path_class.MOVETO, *[path_class.CURVE4] * 3])
    rgb = figures.import_matplotlib(".colors").to_rgb(colour)
    opacity = FAINTEST + (1 - FAINTEST) * strength
    return figures.import_matplotlib(".patches").PathPatch(
        path, facecolor="none", edgecolor=(*rgb, opacity), linewidth=0.5 + 1.5 * strength, capstyle="round"
    )


def _draw_nodes(axes: Any, columns: Sequence[int], edges: Mapping[str, Sequence[Edge]]) -> None:
    """A dot for each node. Nodes with edges are dark and have a name."""
    used = set()
    for of_kind in edges.values():
        for column, row, later, later_row, _ in of_kind:
            used |= {(column, row), (later, later_row)}
    others = []
    for column, count in enumerate(columns):
        others += [(column, row) for row in range(count) if (column, row) not in used]
    for nodes, colour in ((others, NODE_COLOUR), (sorted(used), figures.TEXT_COLOUR)):
        x = [node[0] for node in nodes]
        y = [node[1] for node in nodes]
        axes.plot(x, y, linestyle="none", marker="o", markersize=NODE, color=colour, markeredgewidth=0, zorder=3)

    names = [f"{column}.{row}" for column, row in used]
    per_column = axes.get_position().width * axes.figure.get_size_inches()[0] / len(columns)
    if figures.text_width(names) * current_style().scale > per_column:
        return
    # A white background keeps a name readable on lines. An outline would turn the text of an SVG file into shapes.
    background = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 0.4}
    for column, row in sorted(used):
        text = axes.text(
            column,
            row - 0.17,
            f"{column}.{row}",
            ha="center",
            va="bottom",
            bbox=background,
            **figures.font_options(),
        )
        text.set_zorder(4)


def _name_kinds(axes: Any, names: Sequence[str], colours: Sequence[str]) -> None:
    """The name of each kind of edge above the graph, in its colour."""
    size = axes.get_position().width * axes.figure.get_size_inches()[0]
    x = 0.0
    for index, name in enumerate(names):
        colour = colours[index % len(colours)]
        options = figures.font_options(color=colour)
        axes.text(x, 1.01, figures.drawable_text(name, 40), transform=axes.transAxes, va="bottom", **options)
        x += (figures.text_width([name], most=40) + 0.1) * current_style().scale / size
