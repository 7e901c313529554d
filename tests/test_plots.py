"""Figures of plain data: what is drawn is what was given, words stay words, files are whole and the same twice."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.colors import to_rgb  # noqa: E402

from regard import plots  # noqa: E402
from regard.plots.drawing import COLOURS, LINE, fonts  # noqa: E402

HOSTILE = ["$a_1$", "\\frac{", "a\nb", "👩‍👩‍👧", "\x00\x07", "中文", "", "  ", "\ud800", "_", "$\\frac$", "long" * 9]


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).random(shape)


def labels(axis) -> list[str]:
    return [tick.get_text() for tick in axis.get_ticklabels()]


def texts(figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def colours(image) -> np.ndarray:
    """Where each cell stands on the colour scale, 0 … 1."""
    return np.asarray(image.norm(image.get_array()))


@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (12, 12, 2, 2), (30, 9, 2, 2)])
def test_a_grid_has_each_map_on_its_own_scale_at_its_place(shape):
    maps = random(*shape) * np.arange(1, shape[1] + 1)[:, None, None]
    figure = plots.grid(maps, row_labels=range(shape[0]), column_labels=range(shape[1]), title="all")
    (axes,) = figure.axes
    assert len(axes.images) == shape[0] * shape[1]
    for at, image in enumerate(axes.images):
        row, column = divmod(at, shape[1])
        weights = maps[row, column]
        np.testing.assert_allclose(colours(image), np.sqrt(weights / weights.max()))
        left, right, bottom, top = image.get_extent()
        assert column <= left < right <= column + 1 and row <= top < bottom <= row + 1
    assert labels(axes.yaxis) == [str(x) for x in range(shape[0])]
    assert labels(axes.xaxis) == [str(x) for x in range(shape[1])]
    width, height = figure.get_size_inches()
    assert max(width, height) < 14 and 0.3 * shape[0] <= height  # it fits a page


def test_a_grid_of_single_maps_wraps():
    maps = random(7, 3, 3)

    def places(**how) -> list[tuple[int, int]]:
        return [tuple(map(int, x.get_extent()[::3])) for x in plots.grid(maps, **how).axes[0].images]

    assert places(columns=3) == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (0, 2)]
    assert max(places(rows=2)) == (3, 0) and max(y for _, y in places(rows=2)) == 1
    assert max(x for x, _ in places()) == 2
    assert texts(plots.grid(maps, list("abcdefg"))) == list("abcdefg")
    assert len(plots.grid([random(2, 3, 3), random(3, 5, 4)]).axes[0].images) == 5
    for refused in ({"columns": 2, "rows": 3}, {"columns": 0}, {"titles": ["a"]}, {"column_labels": ["a"]}):
        with pytest.raises(ValueError, match=r"7 maps|for 7|for 3"):
            plots.grid(maps, **refused)
    with pytest.raises(ValueError, match="rows of their own"):
        plots.grid(random(2, 2, 3, 3), columns=2)
    for empty in ([], [[]]):
        with pytest.raises(ValueError, match="no map"):
            plots.grid(empty)


def test_zero_is_white_and_darker_is_more():
    image = plots.heat([[0.0, 0.25, 1.0]]).axes[0].images[0]
    shades = image.to_rgba(image.get_array())[0, :, :3]
    assert shades[0].tolist() == [1, 1, 1]
    scale = matplotlib.colors.LinearSegmentedColormap.from_list("x", COLOURS)(np.linspace(0, 1, 65))[:, :3]
    light = scale @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) < 0).all()
    assert plots.heat(np.zeros((2, 3))).axes[0].images[0].norm.vmax == 1  # nothing to scale to
    assert plots.heat([[np.nan, 0.5]]).axes[0].images[0].norm.vmax == 0.5


def test_heat_has_words_or_numbers():
    weights = random(3, 5)
    figure = plots.heat(weights, ["a", "b", "c"], list("vwxyz"), title="one")
    axes, scale = figure.axes
    np.testing.assert_allclose(colours(axes.images[0]), np.sqrt(weights / weights.max()))
    assert labels(axes.yaxis) == ["a", "b", "c"] and labels(axes.xaxis) == list("vwxyz")
    assert (axes.get_xlabel(), axes.get_ylabel(), scale.get_ylabel()) == ("keys", "queries", "weight")
    assert axes.get_xticklabels()[0].get_rotation() == 90
    assert list(axes.get_yticks()) == [0, 1, 2] and axes.get_ylim() == (2.5, -0.5)
    words = [f"w{i}" for i in range(65)]
    axes = plots.heat(random(64, 65), words[:64], words).axes[0]
    assert labels(axes.yaxis) == words[:64] and "w1" not in labels(axes.xaxis)
    axes = plots.heat(weights, rows=(30, 60), keys=(0, 50)).axes[0]
    assert axes.get_ylim() == (59.5, 29.5) and axes.get_xlim() == (-0.5, 49.5)
    with pytest.raises(ValueError, match="2 row_words for 3"):
        plots.heat(weights, ["a", "b"])
    with pytest.raises(ValueError, match=r"must be \[n, m\]"):
        plots.heat([1.0, 2.0])


def test_a_profile_is_bars_or_a_map():
    weights = [0.1, 0.2, 0.5, 0.15, 0.05]
    axes = plots.profile([-2, -1, 0, 1, 2], weights).axes[0]
    assert [(round(x.get_x() + x.get_width() / 2), x.get_height()) for x in axes.patches] == list(
        zip(range(-2, 3), weights, strict=True)
    )
    axes = plots.profile(None, random(3, 5)).axes[0]
    assert axes.get_xlim() == (-2.5, 2.5) and axes.get_ylim() == (1.5, -1.5)
    assert axes.lines[0].get_xydata().tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="one each"):
        plots.profile([0, 1], weights)
    with pytest.raises(ValueError, match="a profile is"):
        plots.profile(None, random(2, 2, 2))


@pytest.mark.parametrize("sparse", [False, True])
def test_lines_are_as_opaque_as_weights(sparse):
    weights = np.array([[0.7, 0.019, 0.02], [0.0, 1.0, 0.3]])
    given = [(i, j, float(weights[i, j])) for i in range(2) for j in range(3)] if sparse else weights
    figure = plots.lines(["a", "b"], ["x", "y", "z"], given, title="t")
    (drawn,) = figure.axes[0].collections
    assert drawn.get_colors()[:, 3].tolist() == [0.02, 0.3, 0.7, 1.0]
    heights = {0: (0.75, 2.25), 1: (0.5, 1.5, 2.5)}
    ends = [(heights[0].index(y[0, 1]), heights[1].index(y[1, 1])) for y in drawn.get_segments()]
    assert ends == [(0, 2), (1, 2), (0, 0), (1, 1)]
    assert np.allclose(drawn.get_colors()[:, :3], to_rgb(LINE))
    assert texts(figure) == ["a", "b", "x", "y", "z", "queries", "keys"]


def test_lines_refuse_what_cannot_be_read():
    plots.lines(range(80), range(80), [])
    with pytest.raises(ValueError, match="up to 80 tokens a side, got 81 queries and 2 keys: choose rows"):
        plots.lines(range(81), range(2), [])
    with pytest.raises(ValueError, match="outside the 1 queries"):
        plots.lines(["a"], ["b"], [(0, 1, 0.5)])
    with pytest.raises(ValueError, match=r"weights are \[3, 2\]"):
        plots.lines(["a"], ["b"], random(3, 2))


def test_marks_stand_upright_where_they_are_named():
    x = np.arange(1, 6)
    axes = plots.series({"a": (x, x)}, log="x", marks={"n* = 3": 3.0, "_$y$": 4.0}).axes[0]
    assert [tuple(line.get_xdata()) for line in axes.lines[1:]] == [(3.0, 3.0), (4.0, 4.0)]
    assert {text.get_text().strip() for text in axes.texts} == {"a", "n* = 3", "_$y$"}


def test_series_are_named_at_their_ends():
    x = np.arange(1, 6)
    values = {f"s{i}": (x, x * 0 + i) for i in range(9)} | {"_$x$": (x, x, x - 1, x + 1)}
    figure = plots.series(values, title="t", x_label="step", y_label="loss")
    (axes,) = figure.axes
    assert [tuple(line.get_ydata()) for line in axes.lines] == [tuple(given[1]) for given in values.values()]
    assert sorted(texts(figure)) == sorted(values) and len(axes.collections) == 1
    heights = sorted(text.get_position()[1] for text in axes.texts)
    assert min(np.diff(heights)) > 0.05 and heights[0] >= 0 and heights[-1] <= 1 + 1e-9
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == len(values)
    axes = plots.series({"a": (x, 10.0 ** (x - 1)), "b": (x, x * 0 + 1.0)}, log="y").axes[0]
    ends = {text.get_text(): axes.transAxes.transform(text.get_position())[1] for text in axes.texts}
    assert ends["a"] == pytest.approx(axes.transData.transform((5, 1e4))[1])
    assert ends["b"] == pytest.approx(axes.transData.transform((5, 1.0))[1])
    axes = plots.series({"a": (x - 1, x - 1)}, log="xy").axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert np.isnan(axes.lines[0].get_ydata()[0])
    plots.series({})
    for refused, message in (({"a": (x, -x)}, "log='y'"), ({"a": (x, x[1:])}, "one length"), ({"a": (x,)}, "must be")):
        with pytest.raises(ValueError, match=message):
            plots.series(refused, log="y")
    with pytest.raises(ValueError, match="log is 'z'"):
        plots.series({}, log="z")


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_files_are_whole_and_the_same_twice(tmp_path: Path, kind, magic):
    for name in ("a", "b"):
        plots.save(plots.heat(random(3, 3), list("abc"), list("abc"), title="t"), tmp_path / f"{name}.{kind}")
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("a", "b"))
    assert first.startswith(magic) and first == second
    assert sorted(x.name for x in tmp_path.iterdir()) == [f"a.{kind}", f"b.{kind}"]
    assert matplotlib.rcParams["svg.hashsalt"] is None  # put back


def test_threads_save_the_same_bytes(tmp_path: Path):
    def saved(name: int) -> bytes:
        file = tmp_path / f"{name}.svg"
        plots.save(plots.heat(random(3, 3), list("abc")), file)
        return file.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(saved, range(8)))) == 1
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch):
    figure = plots.heat(random(2, 2))
    for name in ("a.jpg", "a", "png"):
        with pytest.raises(ValueError, match=r"neither \.png, \.svg nor \.pdf"):
            plots.save(figure, tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"none.a\.png cannot be written"):
        plots.save(figure, tmp_path / "none" / "a.png")
    (tmp_path / "a.svg").write_text("old")

    def stopped(to, **_):
        to.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(figure, "savefig", stopped)
    with pytest.raises(KeyboardInterrupt):
        plots.save(figure, tmp_path / "a.svg")
    assert [x.name for x in tmp_path.iterdir()] == ["a.svg"] and (tmp_path / "a.svg").read_text() == "old"


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_any_word_can_be_drawn(tmp_path: Path, kind):
    n = len(HOSTILE)
    named = {word: ([0, 1], [i, i]) for i, word in enumerate(HOSTILE)}
    figures = (
        plots.heat(random(n, n), HOSTILE, HOSTILE, title=HOSTILE[0]),
        plots.lines(HOSTILE, HOSTILE, random(n, n), title=HOSTILE[2]),
        plots.grid(random(n, 2, 2), HOSTILE, columns=1, row_labels=HOSTILE, title="$"),
        plots.series(named, title="$\\frac$", x_label="$\\frac$", y_label="$\\frac$"),
    )
    for figure in figures:
        plots.save(figure, tmp_path / f"x.{kind}")
    assert labels(figures[0].axes[0].yaxis)[:3] == ["$a_1$", "\\frac{", "a↵b"]
    assert labels(figures[0].axes[0].xaxis)[4] == "▯▯" and labels(figures[0].axes[0].xaxis)[7] == "␣␣"
    assert labels(figures[0].axes[0].xaxis)[-1] == "longlonglongl…"


def test_matplotlib_is_asked_for_by_name(monkeypatch):
    fonts.cache_clear()
    for name in [x for x in sys.modules if x.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"figures need matplotlib; pip install 'regard\[plot\]'"):
        plots.heat(random(2, 2))


def test_figures_show_themselves_in_a_notebook():
    figure = plots.heat(np.eye(3))
    assert figure._repr_png_().startswith(b"\x89PNG")
