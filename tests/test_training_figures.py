"""Figures of how heads evolved: the numbers drawn are the records' own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from test_training_evolution import PATH, made_of, run  # noqa: F401 (a fixture)

from regard import plots
from regard.interp._head_types import HEAD_TYPES
from regard.training import figures
from regard.training._evolution import evolution
from regard.training._measures import describe_measure

pytestmark = pytest.mark.usefixtures("full_tiles")


def labels(axis: Any) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def texts(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.texts]


@pytest.mark.parametrize("name", ["entropy", "induction confidence", "natural raw sink"])
def test_a_line_a_head(name: str, run: Path, tmp_path: Path) -> None:  # noqa: F811
    found = evolution(run)
    figure = figures.plot_trajectories(found, name)
    axes, scale = figure.axes
    assert len(axes.lines) == 6 and scale.get_title(loc="left") == "layer"
    for at, line in enumerate(axes.lines):
        np.testing.assert_array_equal(line.get_xdata(), found.steps)
        np.testing.assert_allclose(line.get_ydata(), found.value(name)[:, at])
    colours = [to_hex(line.get_color()) for line in axes.lines]
    assert len(set(colours[:3])) == len(set(colours[3:])) == 1 and colours[0] != colours[3]  # by layer
    assert labels(axes.xaxis) == ["0", "1", "4"] and axes.get_xlabel() == "step"
    assert axes.get_ylabel() == ("entropy, nats" if name == "entropy" else describe_measure(name).label)
    plots.save(figure, tmp_path / "lines.svg")


def test_a_film(run: Path, tmp_path: Path) -> None:  # noqa: F811
    found = evolution(run)
    heads = [(PATH, 2), ("blocks.0.attention", 1)]
    axes = figures.plot_maps(found, heads, steps=3).axes[0]
    assert len(axes.images) == 6 and labels(axes.xaxis) == ["0", "2", "4"]
    for at, image in enumerate(axes.images):
        head, step = heads[at // 3], (0, 2, 4)[at % 3]
        np.testing.assert_allclose(image.get_array(), found.map(step, *head))
    assert [name.split()[0] for name in labels(axes.yaxis)] == ["1.2", "0.1"]
    axes = figures.plot_maps(found, most=2).axes[0]
    change = (found.records[-1].tensors["map"] - found.records[0].tensors["map"]).flatten(1).norm(dim=1)
    took = {found.heads.index((row["path"], row["head"])) for row in found.arrivals() if row["step"]}
    assert len(axes.images) == 8 and (took or int(change.argmax()) in range(6))
    plots.save(figures.plot_maps(found, steps=1), tmp_path / "film.png")


def test_steps_without_records_are_hatched() -> None:
    sparse = made_of({}, {(0, "natural clean previous"): 0.9})
    for figure in (figures.plot_arrivals(sparse), figures.plot_trajectories(sparse, "entropy")):
        (span,) = [patch for patch in figure.axes[0].patches if patch.get_gid() == "gap"]
        low, high = span.get_extents().transformed(figure.axes[0].transData.inverted()).intervalx
        assert low == pytest.approx(0, abs=1e-6) and high == pytest.approx(10)


def test_heads_that_took_a_kind_are_filmed_first() -> None:
    found = made_of({}, {(0, "natural clean previous"): 0.9}, {(0, "natural clean previous"): 0.9})
    found.records[-1].tensors["map"][1] = 1.0  # this one changed more
    assert figures._most_changed_heads(found, 1) == [(PATH, 0)]
    assert figures._most_changed_heads(made_of({}, {}), 1) == [(PATH, 0)]
    axes = figures.plot_maps(found).axes[0]
    assert labels(axes.yaxis) == ["0.0 previous", "0.1"]


def test_when_heads_took_their_types(tmp_path: Path) -> None:
    before, sink = "natural clean previous", "natural raw sinks"
    found = made_of({}, {(0, before): 0.9}, {(0, before): 0.9, (0, sink): 0.8, (1, sink): 0.9}, {(0, before): 0.9})
    figure = figures.plot_arrivals(found)
    (axes,) = figure.axes
    bars = [
        (round(x.get_x()), round(x.get_width()), to_hex(x.get_facecolor()), round(x.get_height(), 6))
        for x in axes.patches
        if x.get_gid() != "gap"
    ]
    one, other = (figures.TYPE_COLOURS[kind] for kind in ("previous", "sink"))
    assert bars[:3] == [(10, 10, one, 0.84), (20, 10, other, 0.42), (20, 10, one, 0.42)]
    assert len(bars) == 5 and bars[4] == (20, 10, other, 0.84)
    # No bar crosses the last step, where the axis ends; the types of the last record stand after it.
    assert axes.spines["bottom"].get_bounds() == (0, 30)
    assert all(x.get_x() + x.get_width() <= 30 or x.get_x() > 30 for x in axes.patches if x.get_gid() != "gap")
    dots = [(float(x.get_xdata()[0]), float(x.get_ydata()[0])) for x in axes.lines]
    assert dots == [(10.0, pytest.approx(0.0))]  # the other one did not stay
    assert labels(axes.yaxis) == ["0.0", "0.1"] and texts(figure)[1:] == ["sink", "previous"]
    for kind in ("png", "svg"):
        plots.save(figure, tmp_path / f"arrivals.{kind}")
    assert texts(figures.plot_arrivals(made_of({})))[1:] == ["no types"]


def test_every_type_has_a_colour_of_its_own_and_the_same_in_the_lab() -> None:
    assert list(figures.TYPE_COLOURS) == list(HEAD_TYPES)
    assert len(set(figures.TYPE_COLOURS.values())) == len(HEAD_TYPES)
    script = (Path(figures.__file__).parents[1] / "lab" / "static" / "colour.js").read_text()
    table = re.search(r"HEAD_TYPE_COLOURS = \{(.*?)\}", script, re.DOTALL)
    assert table is not None
    assert dict(re.findall(r'(\w+): "(#\w+)"', table[1])) == figures.TYPE_COLOURS


def test_what_cannot_be_drawn(run: Path) -> None:  # noqa: F811
    found = evolution(run)
    with pytest.raises(ValueError, match="name is 'colour'"):
        figures.plot_trajectories(found, "colour")
    with pytest.raises(ValueError, match="there is no head 9"):
        figures.plot_maps(found, [(PATH, 9)])
    with pytest.raises(ValueError, match="heads is empty"):
        figures.plot_maps(found, [])
    with pytest.raises(ValueError, match="induction score"):
        figures.plot_trajectories(made_of({}), "induction score")
