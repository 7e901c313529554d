"""Figures of how heads evolve: values over time, pooled maps, the steps at which types arrive, and pixel offsets.

The step axis is logarithmic and starts at step 0. ``regard.plots.save`` writes a figure to a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard import plots
from regard._checks import check_integer
from regard._errors import RegardError
from regard.interp._head_types import HEAD_TYPES
from regard.training._evolution import Evolution
from regard.training._measures import describe_measure
from regard.training._pixel_offsets import HeadOffsets, head_offsets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot_arrivals", "plot_maps", "plot_offsets", "plot_trajectories", "save_figures"]

# The colours of the lab's pages (lab/static/colour.js). Readers with colour blindness can tell them apart.
TYPE_COLOURS = {
    "sink": "#7f7f7f",
    "previous": "#0072b2",
    "positional": "#56b4e9",
    "convolution": "#009e73",
    "averaging": "#b0a030",
    "induction": "#d55e00",
    "duplicate": "#e69f00",
    "content": "#cc79a7",
}
MAX_LANES = 3  # at most this many types of a head are drawn at one step: the most confident ones
PANEL_INCHES = 1.35  # side of one panel of ``plot_offsets``
PANEL_REACH = 3.5  # cells that a panel shows to either side of the query


@plots.styled
def plot_trajectories(evolution: Evolution, name: str = "entropy", *, style: plots.FigureStyle | None = None) -> Figure:
    """Draw one value of every head over the steps: one line per head, coloured by layer.

    - ``name``: any name that ``Evolution.value`` accepts; "entropy" by default.
    - ``style``: width, font, palette and title; see ``regard.plots.FigureStyle``.

    >>> records = regard.training.evolution(regard.models.bundled())
    >>> plot_trajectories(records, "previous score").texts[0].get_text()
    'previous score of 12 heads'
    """
    values = evolution.value(name).double().numpy()
    if not np.isfinite(values).any():
        raise RegardError(f"name is {name!r}, which no recorded head has; Evolution.names() lists the accepted names")
    layer_count = len(evolution.paths)
    measure = describe_measure(name, evolution.on_grid)
    figure, axes = plots.new_figure(
        5.2, 3.2, left=0.6, right=0.75, bottom=0.45, title=f"{measure.label} of {len(evolution.heads)} heads"
    )
    colours = plots.import_matplotlib("").colormaps[_layer_colours()](np.linspace(0.2, 1.0, layer_count))
    marker = "o" if len(evolution.steps) == 1 else None
    line_width = 1.1 if len(evolution.heads) <= 48 else 0.7
    for index, (path, _) in enumerate(evolution.heads):
        colour = colours[evolution.paths.index(path)]
        options = {"color": colour, "linewidth": line_width, "alpha": 0.85, "marker": marker, "markersize": 3}
        axes.plot(evolution.steps, values[:, index], **options)
    _set_step_axis(axes, evolution.steps)
    axes.spines[["top", "right"]].set_visible(False)
    y_label = measure.label
    if name == "entropy":
        y_label += ", nats"
    plots.label_axes(axes, "step", y_label)
    _mark_gaps(axes, evolution)

    # A colour bar beside the axes says which colour is which layer.
    box = axes.get_position()
    width = figure.get_figwidth()
    height = min(box.height, 0.22 * layer_count / figure.get_figheight())
    bar = figure.add_axes((box.x1 + 0.15 / width, box.y0, 0.12 / width, height))
    bar.imshow(colours[:, None, :3], aspect="auto", origin="lower", extent=(0, 1, -0.5, layer_count - 0.5))
    bar.set(xticks=[], yticks=range(0, layer_count, -(-layer_count // 24)))
    bar.yaxis.tick_right()
    bar.spines[:].set(linewidth=0.5, color=plots.EDGE_COLOUR)
    plots.thin_ticks(bar)
    bar.set_title("layer", loc="left", pad=4, **plots.font_options())
    return figure


@plots.styled
def plot_maps(
    evolution: Evolution,
    heads: Sequence[tuple[str, int]] | None = None,
    *,
    steps: int = 8,
    most: int = 6,
    style: plots.FigureStyle | None = None,
) -> Figure:
    """Draw pooled attention maps at several recorded steps: one row per head, one column per step.

    Each map is scaled by its own maximum.

    - ``heads``: pairs (path, head). None chooses up to ``most`` heads: first those that took a type, the most confident
      first, then those whose maps changed most.
    - ``steps``: the largest number of columns, 8 by default.
    - ``style``: as in ``plot_trajectories``.

    >>> records = regard.training.evolution(regard.models.bundled())
    >>> plot_maps(records, [("decoder.blocks.1.attention", 0)], steps=4).texts[0].get_text()
    'maps of 1 head: queries down, keys across'
    """
    check_integer("steps", steps, least=1)
    check_integer("most", most, least=1)
    chosen = _most_changed_heads(evolution, most) if heads is None else list(heads)
    if not chosen:
        raise RegardError("heads is empty; it must hold pairs (path, head), or be None for the heads that changed most")
    columns = np.linspace(0, len(evolution.steps) - 1, min(steps, len(evolution.steps))).round().astype(int)
    shown_steps = [evolution.steps[column] for column in np.unique(columns)]
    maps = []
    row_labels = []
    for path, head in chosen:
        maps.append([evolution.map(step, path, head).numpy() for step in shown_steps])
        index = evolution.heads.index((path, head))
        types = " + ".join(evolution.labels[-1][index])
        row_labels.append(f"{evolution.head_label(index)} {types}".rstrip())
    noun = "head" if len(chosen) == 1 else "heads"
    title = f"maps of {len(chosen)} {noun}: queries down, keys across"
    return plots.grid(
        maps, row_labels=row_labels, column_labels=shown_steps, x_label="step", y_label="layer.head", title=title
    )


@plots.styled
def plot_arrivals(evolution: Evolution, *, style: plots.FigureStyle | None = None) -> Figure:
    """Draw when each head took its types: one row per head, coloured by the types that it has at each record.

    If a head has several types at one step, its row is divided among the three most confident ones. A dot marks the
    step at which a head got a type that it keeps until the last record. The axis ends at the last record, whose types
    are the squares to the right of it.

    >>> plot_arrivals(regard.training.evolution(regard.models.bundled())).texts[0].get_text()
    'when heads took their types: TextDecoder'
    """
    head_count = len(evolution.heads)
    steps = evolution.steps
    present: set[str] = set()
    for labels_at_step in evolution.labels:
        present.update(*labels_at_step)
    legend = [name for name in TYPE_COLOURS if name in present] or ["no types"]
    # Rows get thinner with more heads, but the legend must fit beside them.
    height = max(head_count * min(0.2, max(0.11, 11 / head_count)), 0.17 * len(legend))
    height *= plots.current_style().scale
    title = f"when heads took their types: {evolution.model}"
    left = 0.35 + plots.text_width([evolution.head_label(head_count - 1)])
    right = 0.45 + plots.text_width(legend)
    figure, axes = plots.new_figure(5.2, height, left=left, right=right, bottom=0.45, title=title, keep_height=True)
    _set_step_axis(axes, steps, extend=True)

    # One bar per head, record and type, from the record's step to the next one. No step follows the last record: its
    # types stand apart from the bars, after the end of the axis.
    spans = [*pairwise(steps), _last_span(steps)]
    axes.spines["bottom"].set_bounds(steps[0], steps[-1])
    for index in range(head_count):
        for record, (begin, end) in enumerate(spans):
            for name, (low, size) in _lanes(evolution, record, index).items():
                axes.barh(low, end - begin, size, begin, align="edge", color=TYPE_COLOURS[name], linewidth=0)

    # Dots come last, so that no bar covers them.
    for arrival in evolution.arrivals():
        index = evolution.heads.index((arrival["path"], arrival["head"]))
        lane = _lanes(evolution, steps.index(arrival["step"]), index).get(arrival["kind"])
        if lane is not None:
            options = {"color": "white", "markeredgecolor": "#222222", "markeredgewidth": 0.5, "clip_on": False}
            size = min(2.4, 60 * lane[1] * height / head_count)  # in points; a dot must fit into its lane
            axes.plot([arrival["step"]], [lane[0] + lane[1] / 2], "o", markersize=size, zorder=4, **options)

    axes.set(ylim=(head_count - 0.5, -0.5), yticks=range(head_count))
    axes.set_yticklabels([evolution.head_label(index) for index in range(head_count)], **plots.font_options())
    for index in range(1, head_count):
        if evolution.heads[index][0] != evolution.heads[index - 1][0]:  # a line between two layers
            axes.axhline(index - 0.5, color=plots.EDGE_COLOUR, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    plots.label_axes(axes, "step", "layer.head")
    _mark_gaps(axes, evolution)
    _draw_legend(figure, axes, legend)
    return figure


@plots.styled
def plot_offsets(evolution: Evolution, *, style: plots.FigureStyle | None = None) -> Figure:
    """Draw where the heads of an image model attend around the query pixel: one column per layer.

    The upper row is the first record, the lower row the last. Dot h is the centre of head h: the mean offset under its
    weights. The radius of the disc is the standard deviation of the offsets around the centre. Centres that
    lie outside the panel are drawn at its edge. The square contains the nine offsets of a 3 × 3 kernel; the number
    above the panel says how many of them are the peak of some head.

    >>> plot_offsets(regard.training.evolution(regard.models.bundled()))  # a text model has no pixels
    Traceback (most recent call last):
    regard._errors.RegardError: ...
    """
    offsets = head_offsets(evolution)
    layer_count = len(evolution.paths)
    title = f"where heads look from a pixel: {evolution.model}"
    row_inches = PANEL_INCHES + 0.2
    figure, axes = plots.new_figure(
        PANEL_INCHES * layer_count, 2 * row_inches, left=0.75, bottom=0.15, top=0.2, title=title
    )
    axes.set_axis_off()  # only its frame is used, to place the panels
    box = axes.get_position()
    width = box.width / layer_count
    height = box.height / 2
    for row, record in enumerate((0, -1)):
        bottom = box.y1 - (row + 1) * height
        for layer in range(layer_count):
            size = (width * 0.94, height * 0.94 * PANEL_INCHES / row_inches)
            panel = figure.add_axes((box.x0 + layer * width, bottom, *size))
            _draw_offset_panel(panel, offsets, record, layer)
            if row == 0:
                panel.text(0.5, 1.17, f"layer {layer}", ha="center", transform=panel.transAxes, **plots.font_options())
        text = f"step\n{evolution.steps[record]:,}"
        figure.text(0.1 / figure.get_figwidth(), bottom + 0.5 * height, text, va="center", **plots.font_options())
    return figure


def save_figures(evolution: Evolution, folder: Path) -> list[Path]:
    """Write all figures as PNG files into ``folder`` and return their paths.

    The files are entropy and distance over time, pooled maps, arrivals, and for image models the offsets.

    >>> from tempfile import TemporaryDirectory
    >>> few = regard.training.Evolution(regard.training.evolution(regard.models.bundled()).records[::25])
    >>> with TemporaryDirectory() as folder:
    ...     [file.name for file in save_figures(few, Path(folder))]
    ['entropy.png', 'distance.png', 'film.png', 'arrivals.png']
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {
        "entropy": plot_trajectories(evolution, "entropy"),
        "distance": plot_trajectories(evolution, "distance"),
        "film": plot_maps(evolution),
        "arrivals": plot_arrivals(evolution),
    }
    if evolution.on_grid:
        figures["centres"] = plot_offsets(evolution)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        plots.save(figure, files[-1])
    return files


def _lanes(evolution: Evolution, record: int, index: int) -> dict[str, tuple[float, float]]:
    """Return the types of a head at a record, each with the start and the height of its part of the head's row."""
    names = sorted(evolution.labels[record][index][:MAX_LANES], key=list(HEAD_TYPES).index)
    return {name: (index - 0.42 + 0.84 * k / len(names), 0.84 / len(names)) for k, name in enumerate(names)}


def _most_changed_heads(evolution: Evolution, most: int) -> list[tuple[str, int]]:
    """Return the heads that took a type other than averaging, then those with the largest ‖last map − first map‖."""
    by_confidence = sorted(evolution.arrivals(), key=lambda row: -row["confidence"])
    chosen = []
    for row in by_confidence:
        if row["kind"] != "averaging" and row["step"] > evolution.steps[0]:
            chosen.append((row["path"], row["head"]))
    first = evolution.records[0].tensors["map"]
    last = evolution.records[-1].tensors["map"]
    change = (last - first).flatten(1).norm(dim=1)
    for index in torch.argsort(change, descending=True, stable=True).tolist():
        chosen.append(evolution.heads[index])
    without_repeats = list(dict.fromkeys(chosen))
    return sorted(without_repeats[:most], key=evolution.heads.index)


def _axis_end(steps: Sequence[int]) -> float:
    """Return the step up to which the last record's colour is drawn: a little further on the logarithmic axis."""
    return steps[-1] * 1.12 if steps[-1] > 1 else steps[-1] + 0.4


def _last_span(steps: Sequence[int]) -> tuple[float, float]:
    """Return where the types of the last record are drawn: near the end of the axis, with a gap before them."""
    end = _axis_end(steps)
    return steps[-1] + 0.25 * (end - steps[-1]), end


def _set_step_axis(axes: Any, steps: Sequence[int], *, extend: bool = False) -> None:
    """Make the x axis logarithmic, with step 0 as far before step 1 as step 1 is before step 3."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    plots.thin_ticks(axes)  # again, because a new scale resets the ticks
    # With one record the axis would have no length.
    end = float(steps[-1])
    if extend or len(steps) == 1:
        end = _axis_end(steps)
    axes.set_xlim(steps[0], end)
    last = max(1, steps[-1])
    powers = [10**k for k in range(len(str(last)))]
    shown = [tick for tick in [0, *powers] if steps[0] <= tick <= last / 2] + [last]
    shown = _apart(axes, shown)
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown], **plots.font_options())
    minor = []
    for power in powers:
        minor += [digit * power for digit in range(2, 10) if steps[0] <= digit * power <= last]
    axes.set_xticks(minor, minor=True)
    axes.xaxis.set_minor_formatter(plots.import_matplotlib(".ticker").NullFormatter())


def _mark_gaps(axes: Any, evolution: Evolution) -> None:
    """Hatch the steps between two records that are far apart: what happened there is not known."""
    for begin, end in evolution.gaps:
        style = {"facecolor": "white", "alpha": 0.6, "edgecolor": "#888888", "hatch": "///", "linewidth": 0}
        axes.axvspan(begin, end, zorder=3, gid="gap", **style)


def _layer_colours() -> str:
    """matplotlib's name of the colours of layers in the current palette."""
    return "Greys" if plots.current_style().palette == "grey" else "viridis_r"


def _apart(axes: Any, ticks: Sequence[int]) -> list[int]:
    """The ticks whose labels do not overlap; the last tick always stays."""
    scale = plots.current_style().scale
    dots_per_inch = axes.figure.dpi
    kept = []
    free = math.inf  # inches from the left that are not used by a label
    for tick in reversed(ticks):
        middle = axes.transData.transform((tick, 0))[0] / dots_per_inch
        half = scale * (plots.text_width([f"{tick:,}"]) / 2 + 0.02)
        if middle + half <= free:
            kept.append(tick)
            free = middle - half
    return kept[::-1]


def _draw_legend(figure: Figure, axes: Any, names: Sequence[str]) -> None:
    """Draw the names of the types beside the axes, from the top down, each with its colour."""
    width = figure.get_figwidth()
    height = figure.get_figheight()
    box = axes.get_position()
    scale = plots.current_style().scale
    for k, name in enumerate(names):
        x = box.x1 + 0.15 / width
        y = box.y1 - (0.08 + 0.17 * k) * scale / height
        if name in TYPE_COLOURS:
            patch = plots.import_matplotlib(".patches").Rectangle((x, y - 0.045 / height), 0.12 / width, 0.09 / height)
            patch.set(color=TYPE_COLOURS[name], transform=figure.transFigure, linewidth=0)
            figure.add_artist(patch)
        figure.text(x + 0.18 / width, y, name, va="center", **plots.font_options())


def _draw_offset_panel(axes: Any, offsets: HeadOffsets, record: int, layer: int) -> None:
    """Draw the centres and widths of one layer's heads around the query, which is the cross."""
    for line in (-1.5, -0.5, 0.5, 1.5):
        axes.plot([-1.5, 1.5], [line, line], color=plots.EDGE_COLOUR, linewidth=0.5, zorder=0)
        axes.plot([line, line], [-1.5, 1.5], color=plots.EDGE_COLOUR, linewidth=0.5, zorder=0)
    axes.plot([0], [0], marker="+", markersize=6, color="#777777", markeredgewidth=0.9, zorder=1)

    for head, index in enumerate(offsets.layers[layer]):
        y, x = offsets.centre[record, index].clamp(-PANEL_REACH, PANEL_REACH).tolist()
        colour = plots.LINE_COLOURS[head % len(plots.LINE_COLOURS)]
        style = {"edgecolor": colour, "facecolor": colour, "linewidth": 0.5, "alpha": 0.12}
        axes.add_patch(plots.import_matplotlib(".patches").Circle((x, y), float(offsets.width[record, index]), **style))
        axes.plot([x], [y], "o", markersize=6.5, color=colour, markeredgewidth=0, zorder=3 + head, clip_on=False)
        number = plots.font_options(size=5.0, color="white")
        axes.text(x, y, str(head), ha="center", va="center_baseline", zorder=3 + head, **number)
    axes.set(xlim=(-PANEL_REACH, PANEL_REACH), ylim=(PANEL_REACH, -PANEL_REACH), xticks=[], yticks=[])
    axes.spines[:].set(linewidth=0.5, color=plots.EDGE_COLOUR)
    axes.set_title(f"{offsets.count_covered()[record][layer]} of 9", pad=2, **plots.font_options(color="#777777"))
