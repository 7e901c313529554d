"""Where heads look from a pixel over time: numbers from profiles, the figure, and heads replaced in a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.commands import command

from regard import plots
from regard.convolution._replace_in_run import replace_in_run
from regard.training import evolution, train
from regard.training._evolution import Evolution
from regard.training._pixel_offsets import head_offsets
from regard.training._train import load_trained_model
from regard.training.figures import plot_offsets

pytestmark = pytest.mark.usefixtures("full_tiles")

SMALL = {
    **{"model.d": 18, "model.layers": 2, "model.hidden": 18, "model.value": 2, "model.alpha": 4.0},
    **{"steps": 2, "batch": 6, "evaluate": 2, "save": 2, "warmup": 1, "record": 1.0, "record_every": 1},
}
Patch, Captured = pytest.MonkeyPatch, pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "pixels"
    train("pixels", folder, SMALL)
    return folder


def of_profiles(seen: Evolution, *profiles: torch.Tensor) -> Evolution:
    """Records whose heads have these profiles ``[H, 2r+1, 2r+1]``, one a record."""
    return Evolution(
        [
            replace(record, tensors=record.tensors | {"profile": profile})
            for record, profile in zip(seen.records, profiles, strict=False)
        ]
    )


def test_peaks_centres_and_widths_are_the_profile_s(run: Path) -> None:
    seen = evolution(run)
    heads, side = seen.records[0].tensors["profile"].shape[:2]
    before, after = torch.zeros(2, heads, side, side)
    middle = side // 2
    before[:, middle, middle] = 1.0
    places = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]
    for at in range(9):
        y, x = places[at]
        after[at, middle + y, middle + x] = 0.75
        after[at, middle + y, middle + x + 2] = 0.25
        after[9 + at, middle + 2, middle - at % 2] = 0.5
    after[17, middle + 1, middle + 1] = 0.9
    found = head_offsets(of_profiles(seen, before, after))
    assert found.count_covered() == [[1, 1], [9, 1]] and found.count_covered(2)[-1] == [9, 3]
    assert found.peak[1, :9].tolist() == [list(place) for place in places]
    assert not found.centre[0].any() and not found.width[0].any()
    torch.testing.assert_close(found.centre[1, 0], torch.tensor([-1.0, -0.5]).double())
    torch.testing.assert_close(found.width[1, 0], torch.tensor(0.75**0.5).double())


def test_recorded_centres_are_those_of_the_model(run: Path) -> None:
    found = head_offsets(evolution(run))
    for layer, attention in enumerate(load_trained_model(run).attentions):
        wanted = attention.position.centers.detach()
        near = wanted.abs().amax(-1) < 1.2  # further away a picture of 8 × 8 cuts heads off
        at = torch.tensor(found.layers[layer])[near]
        assert len(at) > 3
        # As near as sharp heads can be: their mean is drawn to the pixel nearest to the centre.
        torch.testing.assert_close(found.centre[-1, at].float(), wanted[near], rtol=0, atol=0.3)


def test_the_figure_shows_every_layer_before_and_after(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    seen = evolution(run)
    found, figure = head_offsets(seen), plot_offsets(seen)
    panels = figure.axes[1:]
    assert len(panels) == 4
    titles = [panel.get_title() for panel in panels]
    assert titles == [f"{many} of 9" for record in (0, -1) for many in found.count_covered()[record]]
    dots = [line for line in panels[3].lines if line.get_marker() == "o"]
    drawn = torch.tensor([[float(dot.get_ydata()[0]), float(dot.get_xdata()[0])] for dot in dots])
    torch.testing.assert_close(drawn, found.centre[-1, 9:].clamp(-3.5, 3.5).float())
    plots.save(figure, tmp_path / "centres.png")


def test_heads_on_a_line_have_no_offsets_in_the_plane(tmp_path: Path) -> None:
    small = {"steps": 1, "batch": 4, "data.checks": 4, "model.d": 8, "model.heads": 2, "model.hidden": 8}
    train("repeats", tmp_path, {**small, "warmup": 0})
    with pytest.raises(ValueError, match="recorded on a line"):
        head_offsets(evolution(tmp_path))


def test_heads_of_a_run_are_replaced_and_told(run: Path, monkeypatch: Patch, capsys: Captured, tmp_path: Path) -> None:
    done = replace_in_run(run, 0.99, side=12)
    many, of = done.replacement.heads
    assert 0 < many <= of == 18 and done.pictures == 359 and done.side == 12
    assert done.replacement.comparison.relative < 0.02 and done.larger.relative < 0.02
    assert abs(done.accuracy[0] - done.accuracy[1]) <= 2 / 359
    options = ("--run", run, "--threshold", 0.99, "--size", 12)
    code, out, err = command(monkeypatch, capsys, "convolve", *options, "--plot", tmp_path / "k.png")
    assert code == 0 and not err
    lines = out.splitlines()
    assert sum(line.endswith("yes") for line in lines) == many
    assert f"{many} of 18 heads have a fit of 0.99 or more with 7 × 7 taps" in out
    assert lines[-2].startswith("accuracy on 359 held-out images: ") and "times as fast" in lines[-1]
    assert (tmp_path / "k.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = command(monkeypatch, capsys, "convolve", *options, "--json")
    told = json.loads(out)
    assert [row["replaced"] for row in told["heads"]].count(True) == many
    assert told["accuracy"]["before"] == done.accuracy[0]
    assert told["larger"]["speedup"] == told["larger"]["before"] / told["larger"]["after"]


def test_runs_that_cannot_be_convolved_are_refused_in_a_line(
    run: Path, monkeypatch: Patch, capsys: Captured, tmp_path: Path
) -> None:
    tiny = {"steps": 1, "batch": 4, "warmup": 0, "evaluate": 1, "save": 1}
    train("digits", tmp_path / "vit", {**tiny, "model.d": 8, "model.heads": 2, "model.hidden": 8, "model.layers": 1})
    train("repeats", tmp_path / "line", {**tiny, "data.checks": 4, "model.d": 8, "model.heads": 2, "model.hidden": 8})
    train("pixels", tmp_path / "conv", {**SMALL, "model.kind": "resnet"})
    for folder, more, said in (
        (tmp_path / "nothing", (), "is not a run"),
        (tmp_path / "line", (), "run of repeats"),
        (tmp_path / "vit", (), "side"),
        (tmp_path / "vit", ("--size", 8), "grid"),
        (tmp_path / "conv", ("--size", 8), "ResNet"),
        (run, ("--size", "8x9"), "8x9"),
        (run, ("--size", 4096), "side"),
        (run, ("--threshold", 2), "threshold"),
        (run, ("--radius", -1), "radius"),
    ):
        code, out, err = command(monkeypatch, capsys, "convolve", "--run", folder, *more)
        assert code == 2 and not out and len(err) == 1 and said in err[0], (err, said)
