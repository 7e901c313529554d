"""Figures of plain data: what is drawn is what was given, words stay words, files are whole and the same twice."""

from __future__ import annotations

import re
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: E402
from matplotlib.colors import to_rgb  # noqa: E402

from regard import plots  # noqa: E402
from regard.plots._drawing import MAP_COLOURS, WEIGHT_COLOUR, fonts  # noqa: E402

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
    axes, scale = figure.axes
    assert labels(scale.xaxis) == ["0", "max"] and "weight" in scale.texts[0].get_text()
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
        with pytest.raises(ValueError, match=r"7 maps|titles|column_labels"):
            plots.grid(maps, **refused)
    with pytest.raises(ValueError, match="columns and rows"):
        plots.grid(random(2, 2, 3, 3), columns=2)
    for empty in ([], [[]]):
        with pytest.raises(ValueError, match="at least one map"):
            plots.grid(empty)


def test_zero_is_white_and_darker_is_more():
    image = plots.heatmap([[0.0, 0.25, 1.0]]).axes[0].images[0]
    shades = image.to_rgba(image.get_array())[0, :, :3]
    assert shades[0].tolist() == [1, 1, 1]
    scale = matplotlib.colors.LinearSegmentedColormap.from_list("x", MAP_COLOURS)(np.linspace(0, 1, 65))[:, :3]
    light = scale @ [0.2126, 0.7152, 0.0722]
    assert (np.diff(light) < 0).all()
    assert plots.heatmap(np.zeros((2, 3))).axes[0].images[0].norm.vmax == 1  # nothing to scale to
    assert plots.heatmap([[np.nan, 0.5]]).axes[0].images[0].norm.vmax == 0.5


def test_heat_has_words_or_numbers():
    weights = random(3, 5)
    figure = plots.heatmap(weights, ["a", "b", "c"], list("vwxyz"), title="one")
    axes, scale = figure.axes
    np.testing.assert_allclose(colours(axes.images[0]), np.sqrt(weights / weights.max()))
    assert labels(axes.yaxis) == ["a", "b", "c"] and labels(axes.xaxis) == list("vwxyz")
    assert (axes.get_xlabel(), axes.get_ylabel(), scale.get_ylabel()) == ("keys", "queries", "weight (a row sums to 1)")
    assert axes.get_xticklabels()[0].get_rotation() == 90
    assert list(axes.get_yticks()) == [0, 1, 2] and axes.get_ylim() == (2.5, -0.5)
    words = [f"w{i}" for i in range(65)]
    axes = plots.heatmap(random(64, 65), words[:64], words).axes[0]
    assert labels(axes.yaxis) == words[:64] and "w1" not in labels(axes.xaxis)
    axes = plots.heatmap(weights, rows=(30, 60), keys=(0, 50)).axes[0]
    assert axes.get_ylim() == (59.5, 29.5) and axes.get_xlim() == (-0.5, 49.5)
    with pytest.raises(ValueError, match="row_labels"):
        plots.heatmap(weights, ["a", "b"])
    with pytest.raises(ValueError, match=r"must be \[n, m\]"):
        plots.heatmap([1.0, 2.0])


def test_labels_that_are_left_out_are_announced():
    """A part of the tokens reads like another text."""
    words = [f"w{i}" for i in range(45)]
    for font_size in (7, 14, 24):
        axes = plots.heatmap(random(45, 45), words, words, style=plots.FigureStyle(font_size=font_size)).axes[0]
        assert labels(axes.xaxis) == labels(axes.yaxis) == words  # the figure grows
        assert (axes.get_xlabel(), axes.get_ylabel()) == ("keys", "queries")
    axes = plots.heatmap(random(45, 45), words, words, style=plots.FigureStyle(width="column", font_size=8)).axes[0]
    shown = labels(axes.xaxis)
    step = words.index(shown[1])
    assert step > 1 and shown == words[::step]
    assert axes.get_xlabel().startswith(f"keys (every {step}") and axes.get_ylabel().startswith(
        f"queries (every {step}"
    )

    # One long side without labels does not make the figure huge.
    wide = plots.heatmap(random(3, 500), words[:3], style=plots.FigureStyle(font_size=14))
    assert wide.get_figwidth() < 20


def test_a_profile_is_bars_or_a_map():
    weights = [0.1, 0.2, 0.5, 0.15, 0.05]
    axes = plots.profile([-2, -1, 0, 1, 2], weights).axes[0]
    assert [(round(x.get_x() + x.get_width() / 2), x.get_height()) for x in axes.patches] == list(
        zip(range(-2, 3), weights, strict=True)
    )
    axes = plots.profile(None, random(3, 5)).axes[0]
    assert axes.get_xlim() == (-2.5, 2.5) and axes.get_ylim() == (1.5, -1.5)
    assert axes.lines[0].get_xydata().tolist() == [[0, 0]]
    with pytest.raises(ValueError, match="offsets"):
        plots.profile([0, 1], weights)
    with pytest.raises(ValueError, match="a profile"):
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
    assert np.allclose(drawn.get_colors()[:, :3], to_rgb(WEIGHT_COLOUR))
    assert texts(figure) == ["a", "b", "x", "y", "z", "queries", "keys"]


def test_lines_refuse_what_cannot_be_read():
    plots.lines(range(80), range(80), [])
    with pytest.raises(ValueError, match=r"up to 80 .*got 81 queries and 2 keys"):
        plots.lines(range(81), range(2), [])
    with pytest.raises(ValueError, match="outside the 1 queries"):
        plots.lines(["a"], ["b"], [(0, 1, 0.5)])
    with pytest.raises(ValueError, match=r"weights has shape \[3, 2\]"):
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
    with pytest.raises(ValueError, match="log must be"):
        plots.series({}, log="z")


@pytest.mark.parametrize(
    ("kind", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF"), ("PNG", b"\x89PNG")]
)
def test_files_are_whole_and_the_same_twice(tmp_path: Path, kind, magic):
    for name in ("a", "b"):
        plots.save(plots.heatmap(random(3, 3), list("abc"), list("abc"), title="t"), tmp_path / f"{name}.{kind}")
    first, second = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("a", "b"))
    assert first.startswith(magic) and first == second
    assert sorted(x.name for x in tmp_path.iterdir()) == [f"a.{kind}", f"b.{kind}"]
    assert matplotlib.rcParams["svg.hashsalt"] is None  # put back


def test_threads_save_the_same_bytes(tmp_path: Path):
    def saved(name: int) -> bytes:
        file = tmp_path / f"{name}.svg"
        plots.save(plots.heatmap(random(3, 3), list("abc")), file)
        return file.read_bytes()

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(saved, range(8)))) == 1
    assert matplotlib.rcParams["svg.hashsalt"] is None


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch):
    figure = plots.heatmap(random(2, 2))
    for name in ("a.jpg", "a", "png"):
        with pytest.raises(ValueError, match=r"\.png, \.svg or \.pdf"):
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
        plots.heatmap(random(n, n), HOSTILE, HOSTILE, title=HOSTILE[0]),
        plots.lines(HOSTILE, HOSTILE, random(n, n), title=HOSTILE[2]),
        plots.grid(random(n, 2, 2), HOSTILE, columns=1, row_labels=HOSTILE, title="$"),
        plots.series(named, title="$\\frac$", x_label="$\\frac$", y_label="$\\frac$"),
    )
    for figure in figures:
        plots.save(figure, tmp_path / f"x.{kind}")
    assert labels(figures[0].axes[0].yaxis)[:3] == ["$a_1$", "\\frac{", "a↵b"]
    assert labels(figures[0].axes[0].xaxis)[4] == "▯▯" and labels(figures[0].axes[0].xaxis)[7] == "␣␣"
    assert labels(figures[0].axes[0].xaxis)[-1] == "longlonglongl…"


TOKENS = ["the", "quick", "▁brown", "fox", "jumps", "averyverylongtoken"] * 7
STYLES = [
    plots.FigureStyle(width="column"),
    plots.FigureStyle(width="page", font="serif", font_size=9, palette="viridis"),
    plots.FigureStyle(width=4.5, font_size=6, palette="grey", title=False),
]


def all_figures(style):
    title = "a title that is longer than a narrow figure is wide, with more words than fit"
    x = np.arange(1, 9)
    yield plots.heatmap(random(42, 42), TOKENS, TOKENS, title=title, style=style)
    yield plots.heatmap(random(90, 70), title=title, style=style)
    yield plots.grid(random(3, 9, 4, 4), row_labels=range(3), column_labels=range(1000, 1009), title=title, style=style)
    yield plots.lines(TOKENS[:20], TOKENS[:30], random(20, 30), title=title, style=style)
    yield plots.profile(None, random(41), title=title, style=style)
    yield plots.profile(None, random(5, 7), title=title, style=style)
    yield plots.series({"one": (x, x), "another": (x, 2 * x)}, title=title, x_label="n", y_label="cost", style=style)


def shown_ticks(axis) -> list:
    """The labels of the ticks within the limits; matplotlib has others, and does not draw them."""
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low - 1e-9 <= tick.get_loc() <= high + 1e-9]
    labels = [label for tick in ticks for label in (tick.label1, tick.label2)]
    return [label for label in labels if label.get_visible() and label.get_text().strip()]


def shown_texts(figure) -> list:
    found = list(figure.texts)
    for axes in figure.axes:
        found += [*axes.texts, axes.xaxis.label, axes.yaxis.label, *shown_ticks(axes.xaxis), *shown_ticks(axes.yaxis)]
    return [text for text in found if text.get_visible() and text.get_text().strip()]


@pytest.mark.parametrize("style", STYLES, ids=["column", "page", "inches"])
def test_a_figure_has_its_width_and_every_text_is_inside(style, tmp_path: Path):
    for figure in all_figures(style):
        assert figure.get_figwidth() == pytest.approx(style.inches)
        assert bool(figure.texts) == style.title
        figure.set_dpi(72)  # fewer pixels, drawn faster
        FigureCanvasAgg(figure).draw()
        for axes in figure.axes:
            for axis in (axes.xaxis, axes.yaxis):
                boxes = [
                    tick.label1.get_window_extent() for tick in axis.get_major_ticks() if tick.label1.get_visible()
                ]
                boxes = [box for box in boxes if box.width > 1]
                assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
        for text in shown_texts(figure):
            box = text.get_window_extent()
            assert box.x0 >= -2 and box.x1 <= figure.bbox.width + 2, text.get_text()
            assert box.y0 >= -2 and box.y1 <= figure.bbox.height + 2, text.get_text()


def test_text_stays_text_in_files(tmp_path: Path):
    figure = plots.heatmap(random(3, 3), ["the", "cat", "sat"], ["x", "y", "z"], title="one <head>")
    plots.save(figure, tmp_path / "a.svg")
    found = re.findall(r"<text [^>]*>([^<]*)</text>", (tmp_path / "a.svg").read_text())
    assert {"the", "cat", "sat", "x", "y", "z", "keys", "queries", "one &lt;head&gt;"} <= set(found)
    assert "weight (a row sums to 1)" in found
    plots.save(figure, tmp_path / "a.pdf")
    assert b"/FontFile2" in (tmp_path / "a.pdf").read_bytes()  # TrueType, which editors can change
    assert matplotlib.rcParams["svg.fonttype"] == "path"  # put back


def test_words_are_monospace_and_the_rest_is_not():
    figure = plots.heatmap(random(2, 2), ["a", "b"], title="t")
    axes, scale = figure.axes
    assert axes.get_yticklabels()[0].get_fontfamily()[0] == "DejaVu Sans Mono"
    for text in (axes.xaxis.label, scale.yaxis.label, figure.texts[0]):
        assert text.get_fontfamily()[0] == "DejaVu Sans"
    style = plots.FigureStyle(font="serif", font_size=11)
    axes = plots.heatmap(random(2, 2), style=style).axes[0]
    assert axes.xaxis.label.get_fontfamily()[0] == "DejaVu Serif" and axes.xaxis.label.get_fontsize() == 11
    assert plots.heatmap(random(2, 2)).axes[0].xaxis.label.get_fontsize() == 7  # the style of one figure only


def test_palettes():
    dark = {}
    for palette in ("blue", "viridis", "grey"):
        image = plots.heatmap([[0.0, 1.0]], style=plots.FigureStyle(palette=palette)).axes[0].images[0]
        dark[palette] = [tuple(image.to_rgba(image.get_array())[0, k, :3].round(3)) for k in (0, 1)]
    assert dark["blue"][0] == dark["grey"][0] == (1, 1, 1) and dark["grey"][1] == (0, 0, 0)
    assert len(set(map(tuple, dark.values()))) == 3


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("width", ["wide", 0.5, 1e9, float("nan"), True]),
        ("font_size", [1, 100, "7", None]),
        ("font", ["", None]),
        ("palette", ["jet", None]),
        ("title", ["a title", None]),
    ],
)
def test_a_style_names_what_it_refuses(name, values):
    for value in values:
        with pytest.raises((ValueError, TypeError), match=name):
            plots.FigureStyle(**{name: value})


def test_what_a_style_cannot_do_is_refused():
    with pytest.raises(ValueError, match="font must be"):
        plots.heatmap(random(2, 2), style=plots.FigureStyle(font="No Such Font"))
    with pytest.raises(ValueError, match="width must be at least"):
        plots.lines(["a" * 14], ["b" * 14], [], style=plots.FigureStyle(width=1.5, font_size=12))
    with pytest.raises(TypeError, match="style must be a FigureStyle"):
        plots.heatmap(random(2, 2), style={"width": 3})


def test_matplotlib_is_asked_for_by_name(monkeypatch):
    fonts.cache_clear()
    for name in [x for x in sys.modules if x.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"figures need matplotlib; pip install 'regard\[plot\]'"):
        plots.heatmap(random(2, 2))


def test_figures_show_themselves_in_a_notebook():
    figure = plots.heatmap(np.eye(3))
    assert figure._repr_png_().startswith(b"\x89PNG")
