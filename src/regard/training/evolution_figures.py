"""Figures of how heads evolved: a number over time, maps as a film, and when each head took its type.

Time goes by the logarithm of the step, with 0 before it. ``regard.plots.save`` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from regard import plots
from regard.plots import EDGE, SERIES, font, frame, inches, name_axes, part, thin_ticks
from regard.shapes import integer
from regard.training.evolution import Evolution
from regard.training.offset_figures import centres
from regard.watching.kinds import KINDS
from regard.watching.table import COLUMNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["arrivals", "film", "save_figures", "trajectories"]

# Heads begin by averaging, which is grey. The others are Okabe and Ito's, which colour-blind people tell apart too;
# as an area their yellow shows better than black.
KIND_COLOURS = {"averaging": "#c4c4c4"} | dict(
    zip([x for x in KINDS if x != "averaging"], [*SERIES[:-1], "#f0e442"], strict=True)
)
SIDE_BY_SIDE = 3  # kinds of one head at one time, the surest first


def trajectories(evolution: Evolution, name: str = "entropy") -> Figure:
    """One number of every head over time, anything that ``Evolution.value`` knows: a line a head, coloured by layer.

    >>> seen = regard.training.evolution(regard.models.bundled())
    >>> trajectories(seen, "previous score").texts[0].get_text()
    'previous score of 12 heads'
    """
    values = evolution.value(name).double().numpy()
    if not np.isfinite(values).any():
        raise ValueError(f"{name} is not known of any head here")
    many = len(evolution.paths)
    figure, axes = frame(5.2, 3.2, left=0.6, right=0.75, bottom=0.45, title=f"{name} of {len(evolution.heads)} heads")
    colours = part("").colormaps["viridis_r"](np.linspace(0.2, 1.0, many))
    layers = [evolution.paths.index(path) for path, _ in evolution.heads]
    marker = "o" if len(evolution.steps) == 1 else None
    for at, layer in enumerate(layers):
        thin = 1.1 if len(layers) <= 48 else 0.7
        style = {"color": colours[layer], "linewidth": thin, "alpha": 0.85, "marker": marker, "markersize": 3}
        axes.plot(evolution.steps, values[:, at], **style)
    _time(axes, evolution.steps)
    axes.spines[["top", "right"]].set_visible(False)
    unit = COLUMNS.get(name, "")
    name_axes(axes, "step", f"{name}, {unit}" if unit == "nats" else name)
    box, wide = axes.get_position(), figure.get_figwidth()
    high = min(box.height, 0.22 * many / figure.get_figheight())
    scale = figure.add_axes((box.x1 + 0.15 / wide, box.y0, 0.12 / wide, high))
    scale.imshow(colours[:, None, :3], aspect="auto", origin="lower", extent=(0, 1, -0.5, many - 0.5))
    every = -(-many // 24)
    scale.set(xticks=[], yticks=range(0, many, every))
    scale.yaxis.tick_right()
    scale.spines[:].set(linewidth=0.5, color=EDGE)
    thin_ticks(scale)
    scale.set_title("layer", loc="left", pad=4, **font())
    return figure


def film(
    evolution: Evolution, heads: Sequence[tuple[str, int]] | None = None, *, steps: int = 8, most: int = 6
) -> Figure:
    """Pooled maps at up to ``steps`` recorded steps, one row a head, each map by its own maximum.

    ``heads`` are pairs (path, head); unless given, up to ``most`` that took a kind, the surest first, and then those
    whose maps changed most.

    >>> seen = regard.training.evolution(regard.models.bundled())
    >>> film(seen, [("decoder.blocks.1.attention", 0)], steps=4).texts[0].get_text()
    'maps of 1 head: queries down, keys across'
    """
    integer("steps", steps, least=1)
    integer("most", most, least=1)
    chosen = _changed(evolution, most) if heads is None else list(heads)
    if not chosen:
        raise ValueError("heads is empty; give pairs (path, head), or None for those that changed most")
    at = np.unique(np.linspace(0, len(evolution.steps) - 1, min(steps, len(evolution.steps))).round().astype(int))
    shown = [evolution.steps[i] for i in at]
    maps = [[evolution.map(step, *head).numpy() for step in shown] for head in chosen]
    names = []
    for head in chosen:
        number = evolution.heads.index(head)
        kinds = evolution.labels[-1][number][:1]
        names.append(" ".join([evolution.label(number), *kinds]))
    count = f"{len(chosen)} {'head' if len(chosen) == 1 else 'heads'}"
    title = f"maps of {count}: queries down, keys across"
    return plots.grid(maps, row_labels=names, column_labels=shown, x_label="step", y_label="layer.head", title=title)


def arrivals(evolution: Evolution) -> Figure:
    """When each head took its type: a row a head, coloured by the kinds it is sure to be, from record to record.

    Where it is several at once the row is shared by the surest three; a dot is where one came that stayed to the end.

    >>> arrivals(regard.training.evolution(regard.models.bundled())).texts[0].get_text()
    'when heads took their types: TextDecoder'
    """
    many, steps = len(evolution.heads), evolution.steps
    legend = [x for x in KIND_COLOURS if any(x in held for step in evolution.labels for held in step)] or ["no kinds"]
    high = max(many * min(0.2, max(0.11, 11 / many)), 0.17 * len(legend))
    title = f"when heads took their types: {evolution.model}"
    left, right = 0.35 + inches([evolution.label(many - 1)]), 0.45 + inches(legend)
    figure, axes = frame(5.2, high, left=left, right=right, bottom=0.45, title=title)
    _time(axes, steps, ends=True)
    for at in range(many):
        for s, (begin, end) in enumerate(pairwise([*steps, _end(steps)])):
            for kind, (low, size) in _lanes(evolution, s, at).items():
                axes.barh(low, end - begin, size, begin, align="edge", color=KIND_COLOURS[kind], linewidth=0)
    for came in evolution.arrivals():
        at = evolution.heads.index((came["path"], came["head"]))
        lane = _lanes(evolution, steps.index(came["step"]), at).get(came["kind"])
        if lane is not None:
            dot = {"color": "white", "markeredgecolor": "#222222", "markeredgewidth": 0.5, "clip_on": False}
            size = min(2.4, 60 * lane[1] * high / many)  # points, less than the lane has
            axes.plot([came["step"]], [lane[0] + lane[1] / 2], "o", markersize=size, zorder=4, **dot)
    axes.set(ylim=(many - 0.5, -0.5), yticks=range(many))
    axes.set_yticklabels([evolution.label(at) for at in range(many)], **font())
    for at in range(1, many):
        if evolution.heads[at][0] != evolution.heads[at - 1][0]:  # the next layer
            axes.axhline(at - 0.5, color=EDGE, linewidth=0.4)
    axes.spines[["top", "right"]].set_visible(False)
    name_axes(axes, "step", "layer.head")
    _legend(figure, axes, legend)
    return figure


def save_figures(evolution: Evolution, folder: Path) -> list[Path]:
    """All of them as PNG files in a folder: entropy and distance over time, a film of maps, the arrivals, and of models
    of pictures where heads look from a pixel.

    >>> from tempfile import TemporaryDirectory
    >>> seen = regard.training.Evolution(regard.training.evolution(regard.models.bundled()).records[::25])
    >>> with TemporaryDirectory() as folder:
    ...     [file.name for file in save_figures(seen, Path(folder))]
    ['entropy.png', 'distance.png', 'film.png', 'arrivals.png']
    """
    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: trajectories(evolution, name) for name in ("entropy", "distance")}
    figures |= {"film": film(evolution), "arrivals": arrivals(evolution)}
    if evolution.on_grid:
        figures["centres"] = centres(evolution)
    files = []
    for name, figure in figures.items():
        files.append(folder / f"{name}.png")
        plots.save(figure, files[-1])
    return files


def _lanes(evolution: Evolution, record: int, at: int) -> dict[str, tuple[float, float]]:
    """The kinds of a head at a record, each with its part of the head's row: where it begins, and its height."""
    held = sorted(evolution.labels[record][at][:SIDE_BY_SIDE], key=list(KINDS).index)
    return {kind: (at - 0.42 + 0.84 * k / len(held), 0.84 / len(held)) for k, kind in enumerate(held)}


def _changed(evolution: Evolution, most: int) -> list[tuple[str, int]]:
    """Heads that took a kind other than averaging, the surest first, then by ‖last map − first map‖; in their order."""
    sure = sorted(evolution.arrivals(), key=lambda row: -row["confidence"])
    took = [row for row in sure if row["kind"] != "averaging" and row["step"] > evolution.steps[0]]
    first = [(row["path"], row["head"]) for row in took]
    maps = [evolution.records[k].tensors["map"] for k in (0, -1)]
    change = (maps[1] - maps[0]).flatten(1).norm(dim=1)
    then = [evolution.heads[at] for at in torch.argsort(change, descending=True, stable=True).tolist()]
    chosen = list(dict.fromkeys([*first, *then]))[:most]
    return sorted(chosen, key=evolution.heads.index)


def _end(steps: Sequence[int]) -> float:
    """How far the last record's colour is drawn: a little further on the logarithmic axis."""
    return steps[-1] * 1.12 if steps[-1] > 1 else steps[-1] + 0.4


def _time(axes: Any, steps: Sequence[int], *, ends: bool = False) -> None:
    """Steps by their logarithm; 0 stands before 1, as far as 1 before 3."""
    axes.set_xscale("symlog", linthresh=1, linscale=0.5)
    thin_ticks(axes)  # again: a scale brings ticks of its own
    axes.set_xlim(steps[0], _end(steps) if ends or len(steps) == 1 else steps[-1])
    last = max(1, steps[-1])
    ticks = [0, *(10**k for k in range(len(str(last))))]
    shown = [tick for tick in ticks if steps[0] <= tick <= last / 2] + [last]
    axes.set_xticks(shown, [f"{tick:,}" for tick in shown], **font())
    small = [d * tick for tick in ticks[1:] for d in range(2, 10) if steps[0] <= d * tick <= last]
    axes.set_xticks(small, minor=True)
    axes.xaxis.set_minor_formatter(part(".ticker").NullFormatter())


def _legend(figure: Figure, axes: Any, kinds: Sequence[str]) -> None:
    """Kinds beside the axes, from the top down, each in its colour."""
    wide, high = figure.get_figwidth(), figure.get_figheight()
    box = axes.get_position()
    for k, kind in enumerate(kinds):
        x, y = box.x1 + 0.15 / wide, box.y1 - (0.08 + 0.17 * k) / high
        if kind in KIND_COLOURS:
            patch = part(".patches").Rectangle((x, y - 0.045 / high), 0.12 / wide, 0.09 / high)
            patch.set(color=KIND_COLOURS[kind], transform=figure.transFigure, linewidth=0)
            figure.add_artist(patch)
        figure.text(x + 0.18 / wide, y, kind, va="center", **font())
