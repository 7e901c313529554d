"""Figures of maps, profiles, lines and series, from plain arrays, for paper: PNG, SVG or PDF through ``save``.

Each function returns a ``matplotlib.figure.Figure`` of its own: nothing global is touched, no display is needed.
matplotlib is an extra (``pip install 'regard[plot]'``). Maps are white where a weight is 0 and go by its square root,
so that faint structure shows. Words may hold anything: nothing in them is read as a formula; line ends and tabs show
as ↵ and ⇥, characters that no font here can draw as ▯.
"""

from __future__ import annotations

import importlib
import io
import os
import secrets
import threading
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

__all__ = [
    *("FAINT", "MOST_LABELS", "MOST_LINES", "grid", "heat", "lines", "profile", "save", "series"),
    *("font", "frame", "inches", "name_axes", "part", "thin_ticks"),  # for figures made elsewhere
]

FAINT = 0.02  # a line of less weight is not drawn
MOST_LABELS, MOST_LINES = 64, 80  # words along a side of a map, and of a figure of lines

# White to near-black through blue; Oklab's lightness falls in equal steps, so that equal steps look equal, in grey too.
COLOURS = ["#ffffff", "#b4e9ff", "#71cdfe", "#2aacff", "#1a87ed", "#3064c9", "#36469b", "#2f2d69", "#1f1b35"]
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]  # Okabe and Ito's, less yellow
LINE, INK, EDGE, SMALL, TITLE = "#1a5fb4", "#222222", "#999999", 7.0, 9.0  # colours; sizes in points
OTHER_FONTS = (  # for scripts that matplotlib's own fonts lack, where installed
    *("Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Emoji"),
    *("Arial Unicode MS", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
)
SEEN_AS = {"\n": "↵", "\t": "⇥"}

_SAVING = threading.Lock()  # the salt of an SVG's names can only be set for the whole of matplotlib


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
    row_labels, column_labels = _count("row_labels", row_labels, high), _count("column_labels", column_labels, wide)
    titles = _count("titles", titles, sum(map(len, table)))
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
                axes.text(x, y, _shown(next(names), int(cell * 17)), va="bottom", **font())
    axes.add_collection(part(".collections").LineCollection(boxes, colors=EDGE, linewidths=0.3, zorder=3))
    axes.set(xlim=(0, wide), ylim=(high * (1 + above), 0), xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0, pad=2, labeltop=True, labelbottom=False)
    if column_labels:
        axes.set_xticks(np.arange(wide) + 0.5, [_shown(x, max(3, int(cell * 17))) for x in column_labels], **font())
    if row_labels:
        middles = np.arange(high) * (1 + above) + above + 0.5
        axes.set_yticks(middles, [_shown(x, 40) for x in row_labels], **font())
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
    row_words, key_words = _count("row_words", row_words, n), _count("key_words", key_words, m)
    row_words, key_words = (None if x is None or len(x) > MOST_LABELS else x for x in (row_words, key_words))
    (y, y_end), (x, x_end) = rows or (0, n), keys or (0, m)
    span = (x - 0.5, x_end - 0.5, y_end - 0.5, y - 0.5)  # a token's cell reaches half a token to either side
    figure, axes = _coloured(weights, span, row_words, key_words, title)
    name_axes(axes, "keys", "queries")
    return figure


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
        figure, axes = _coloured(values, (dx[0] - 0.5, dx[-1] + 0.5, dy[-1] + 0.5, dy[0] - 0.5), None, None, title)
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
        axes.text(-0.02, at, _shown(word), ha="right", va="center", **font())
    for at, word in zip(y_key, key_words, strict=True):
        axes.text(1.02, at, _shown(word), ha="left", va="center", **font())
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
        axes.text(at_x, 1.0, f" {_shown(name, 24)}", transform=axes.get_xaxis_transform(), va="top", **font())
    name_axes(axes, x_label, y_label)
    _name_ends(axes, drawn, 0.15 / height)
    return figure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``.png``, ``.svg`` or ``.pdf``: whole or not at all, and the same bytes for the same figure.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(heat([[1.0, 0.0], [0.3, 0.7]]), f"{folder}/map.svg")
    ...     os.listdir(folder)
    ['map.svg']
    """
    file = Path(path)
    kind = file.suffix.lower().removeprefix(".")
    if kind not in ("png", "svg", "pdf"):
        raise ValueError(f"{file.name!r} is neither .png, .svg nor .pdf")
    undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    temporary = file.with_name(f".{secrets.token_hex(6)}.{kind}")
    try:
        with _SAVING, part("").rc_context({"svg.hashsalt": "regard"}), open(temporary, "xb") as to:
            figure.savefig(to, format=kind, metadata=undated, dpi="figure", facecolor="white")
        os.replace(temporary, file)
    except OSError as error:
        raise type(error)(f"{file} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)


def part(name: str) -> Any:
    """A module of matplotlib, which is imported when something is drawn and not before.

    >>> part(".figure").Figure.__name__
    'Figure'
    """
    try:
        return importlib.import_module(f"matplotlib{name}")
    except ImportError:
        raise ImportError("figures need matplotlib; pip install 'regard[plot]'") from None


@lru_cache
def _fonts() -> tuple[list[str], frozenset[int]]:
    """The families to draw with, and every character they have: matplotlib warns of each other one."""
    manager = part(".font_manager")
    there = manager.fontManager.get_font_names()
    families = ["DejaVu Sans Mono", "DejaVu Sans", *(name for name in OTHER_FONTS if name in there)]
    known = (manager.get_font(manager.findfont(name)).get_charmap() for name in families)
    return families, frozenset().union(*known)


def font(**more: Any) -> dict[str, Any]:
    """How words are set: as they are, never as a formula.

    >>> font(size=9)["size"], font()["parse_math"]
    (9, False)
    """
    return {"family": _fonts()[0], "size": SMALL, "color": INK, "parse_math": False, "usetex": False} | more


def _shown(word: object, most: int = 14) -> str:
    """A word as it can be drawn, shortened; what joins or turns characters unseen is left out."""
    known = _fonts()[1]
    seen = []
    for c in (SEEN_AS.get(c, c) for c in str(word)):
        kind = unicodedata.category(c)
        if kind != "Cf" and not "\ufe00" <= c <= "\ufe0f":
            seen.append(c if ord(c) in known and kind[0] != "C" else "▯")
    text = "".join(seen)
    text = text.strip(" ") or text.replace(" ", "␣")
    return text if len(text) <= most else text[: most - 1] + "…"


def inches(words: Iterable[object] | None, size: float = SMALL, most: int = 14) -> float:
    """The width of the widest word: a character takes 0.6 of the size, one of East Asia all of it.

    >>> inches(["a", "cat"]) == inches(["cat"]) < inches(["attention"])
    True
    """
    texts = (_shown(word, most) for word in words or ())
    wide = (sum(1.02 if unicodedata.east_asian_width(c) in "WF" else 0.61 for c in text) for text in texts)
    return max(wide, default=0.0) * size / 72


def frame(
    width: float, height: float, *, left: float, bottom: float, right: float = 0.15, top: float = 0.1, title: str | None
) -> tuple[Figure, Any]:
    """A figure around axes of that size, in inches, with a title at the left that has room.

    >>> figure, axes = frame(2, 1, left=0.5, bottom=0.5, title="a title")
    >>> figure.texts[0].get_text(), (axes.get_position().size * figure.get_size_inches()).round(2).tolist()
    ('a title', [2.0, 1.0])
    """
    if title is not None:
        top, right = top + 0.25, max(right, inches([title], TITLE, 120) + 0.2 - left - width)
    wide, high = left + width + right, bottom + height + top
    figure = _figure()(figsize=(wide, high), dpi=200, facecolor="white", layout="none")
    axes = figure.add_axes((left / wide, bottom / high, width / wide, height / high))
    if title is not None:
        figure.text(0.1 / wide, 1 - 0.08 / high, _shown(title, 120), va="top", **font(size=TITLE))
    axes.spines[:].set(linewidth=0.5, color=EDGE)
    thin_ticks(axes)
    return figure, axes


@lru_cache(maxsize=1)
def _figure() -> Any:
    """matplotlib's figure, made to show itself in a notebook: of itself it does so through pyplot alone."""

    class Shown(part(".figure").Figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return Shown


def thin_ticks(axes: Any) -> None:
    """Ticks as all figures here have them: thin, grey, with small numbers.

    >>> _, axes = frame(2, 1, left=0.5, bottom=0.5, title=None)
    >>> thin_ticks(axes)
    >>> axes.xaxis.get_tick_params()["width"]
    0.5
    """
    style = {"width": 0.5, "color": EDGE, "labelsize": SMALL, "labelcolor": INK, "labelfontfamily": _fonts()[0]}
    axes.tick_params(length=2, **style)
    axes.tick_params(which="minor", length=1, **style)


def _image(axes: Any, weights: Any, span: tuple[float, float, float, float]) -> Any:
    """A map within (left, right, bottom, top), white at 0 and darkest at its maximum, by the square root."""
    colors = part(".colors")
    most = float(np.max(weights, where=np.isfinite(weights), initial=0.0)) or 1.0
    norm, colours = colors.PowerNorm(0.5, 0, most), colors.LinearSegmentedColormap.from_list("regard", COLOURS)
    return axes.imshow(weights, cmap=colours, norm=norm, extent=span, aspect="auto", origin="upper")


def _coloured(
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
    image = _image(axes, weights, span)
    bar = figure.colorbar(image, cax=scale)
    bar.outline.set(linewidth=0.5, edgecolor=EDGE)
    bar.set_label("weight", **font())
    thin_ticks(scale)
    for axis, words, (first, after) in ((axes.xaxis, key_words, span[:2]), (axes.yaxis, row_words, span[:1:-1])):
        if words is None:
            axis.set_major_locator(part(".ticker").MaxNLocator(8, integer=True))
            continue
        middles = first + (np.arange(len(words)) + 0.5) * (after - first) / len(words)
        axis.set_ticks(middles, [*map(_shown, words)], rotation=90 if axis is axes.xaxis else 0, **font())
    return figure, axes


def name_axes(axes: Any, x_label: str | None, y_label: str | None) -> None:
    """Names of both axes, as they are: nothing in them is read as a formula.

    >>> _, axes = frame(2, 1, left=0.5, bottom=0.5, title=None)
    >>> name_axes(axes, "tokens", "$n^2$")
    >>> axes.get_ylabel()
    '$n^2$'
    """
    axes.set_xlabel("" if x_label is None else _shown(x_label, 60), **font())
    axes.set_ylabel("" if y_label is None else _shown(y_label, 60), **font())


def _name_ends(axes: Any, ends: list[tuple[str, str, float, float]], apart: float) -> None:
    """Names at the right of lines, in the lines' colours, moved as far as it takes to be apart."""
    to_axes = axes.transScale + axes.transLimits
    axes.autoscale_view()
    heights = [(float(to_axes.transform((x, y))[1]), name, colour) for name, colour, x, y in ends]
    low = 0.0
    for at, (height, name, colour) in enumerate(sorted(heights)):
        low = min(max(height, low), 1.0 - apart * (len(heights) - 1 - at))
        axes.text(1.015, low, _shown(name), va="center", transform=axes.transAxes, **font(color=colour))
        low += apart


def _map(weights: ArrayLike) -> Any:
    found = np.asarray(weights, dtype=float)
    if found.ndim != 2 or not found.size:
        raise ValueError(f"a map must be [n, m] with something in it, got {list(found.shape)}")
    return found


def _count(name: str, given: Sequence[Any] | None, count: int) -> list[Any] | None:
    if given is not None and len(given) != count:
        raise ValueError(f"{len(given)} {name} for {count}; one each is needed")
    return None if given is None else list(given)


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
