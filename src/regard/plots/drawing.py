"""What all figures share: colours, fonts, a frame in inches, words as they can be drawn, files that appear whole."""

from __future__ import annotations

import importlib
import io
import os
import secrets
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    figure = shown_figure()(figsize=(wide, high), dpi=200, facecolor="white", layout="none")
    axes = figure.add_axes((left / wide, bottom / high, width / wide, height / high))
    if title is not None:
        figure.text(0.1 / wide, 1 - 0.08 / high, shown(title, 120), va="top", **font(size=TITLE))
    axes.spines[:].set(linewidth=0.5, color=EDGE)
    thin_ticks(axes)
    return figure, axes


@lru_cache(maxsize=1)
def shown_figure() -> Any:
    """matplotlib's figure, made to show itself in a notebook: of itself it does so through pyplot alone."""

    class Shown(part(".figure").Figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return Shown


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write ``.png``, ``.svg`` or ``.pdf``: whole or not at all, and the same bytes for the same figure.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(regard.plots.heat([[1.0, 0.0], [0.3, 0.7]]), f"{folder}/map.svg")
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
def fonts() -> tuple[list[str], frozenset[int]]:
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
    return {"family": fonts()[0], "size": SMALL, "color": INK, "parse_math": False, "usetex": False} | more


def shown(word: object, most: int = 14) -> str:
    """A word as it can be drawn, shortened; what joins or turns characters unseen is left out."""
    known = fonts()[1]
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
    texts = (shown(word, most) for word in words or ())
    wide = (sum(1.02 if unicodedata.east_asian_width(c) in "WF" else 0.61 for c in text) for text in texts)
    return max(wide, default=0.0) * size / 72


def thin_ticks(axes: Any) -> None:
    """Ticks as all figures here have them: thin, grey, with small numbers.

    >>> _, axes = frame(2, 1, left=0.5, bottom=0.5, title=None)
    >>> thin_ticks(axes)
    >>> axes.xaxis.get_tick_params()["width"]
    0.5
    """
    style = {"width": 0.5, "color": EDGE, "labelsize": SMALL, "labelcolor": INK, "labelfontfamily": fonts()[0]}
    axes.tick_params(length=2, **style)
    axes.tick_params(which="minor", length=1, **style)


def name_axes(axes: Any, x_label: str | None, y_label: str | None) -> None:
    """Names of both axes, as they are: nothing in them is read as a formula.

    >>> _, axes = frame(2, 1, left=0.5, bottom=0.5, title=None)
    >>> name_axes(axes, "tokens", "$n^2$")
    >>> axes.get_ylabel()
    '$n^2$'
    """
    axes.set_xlabel("" if x_label is None else shown(x_label, 60), **font())
    axes.set_ylabel("" if y_label is None else shown(y_label, 60), **font())


def count(name: str, given: Sequence[Any] | None, count: int) -> list[Any] | None:
    if given is not None and len(given) != count:
        raise ValueError(f"{len(given)} {name} for {count}; one each is needed")
    return None if given is None else list(given)
