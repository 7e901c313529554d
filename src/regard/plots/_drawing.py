"""Helpers of all figures: colours, fonts, figures sized in inches, text that can be drawn, and saving."""

from __future__ import annotations

import importlib
import io
import math
import os
import textwrap
import threading
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from regard._errors import RegardError
from regard._files import atomic_write
from regard.plots._figure_style import BASE_FONT_SIZE, current_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# White to near-black through blue. The lightness (Oklab) falls by the same amount from colour to colour, so that equal
# differences in value look equal, also when printed in grey.
MAP_COLOURS = ["#ffffff", "#b4e9ff", "#71cdfe", "#2aacff", "#1a87ed", "#3064c9", "#36469b", "#2f2d69", "#1f1b35"]
# Values of either sign: orange is negative, white is 0, blue is positive.
SIGNED_COLOURS = ["#6b3000", "#b65708", "#ee964b", "#fbd3ae", "#ffffff", "#b9e2fb", "#5cb1ee", "#2271bd", "#163f75"]
# The palette of Okabe and Ito without yellow.
LINE_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000"]
WEIGHT_COLOUR = "#1a5fb4"
TEXT_COLOUR = "#222222"
EDGE_COLOUR = "#999999"
GREYS = ["#000000", "#5a5a5a", "#8c8c8c", "#b4b4b4"]  # of lines; their styles differ too
# Font sizes in points, in the default style.
SMALL = BASE_FONT_SIZE
TITLE = 9.0
GENERIC_FONTS = {"sans-serif": "DejaVu Sans", "serif": "DejaVu Serif", "monospace": "DejaVu Sans Mono"}
MOST_TITLE_LINES = 3
LEAST_AXES = 0.6  # inches of the axes that a fixed width must leave
# Real text in files: SVG refers to fonts by name, PDF embeds TrueType, both can be searched and edited.
FILE_OPTIONS = {"svg.hashsalt": "regard", "svg.fonttype": "none", "pdf.fonttype": 42}
# Fonts for scripts that matplotlib's own fonts do not cover; used if they are installed.
OTHER_FONTS = (
    *("Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "Noto Emoji"),
    *("Arial Unicode MS", "PingFang SC", "Hiragino Sans", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic"),
)
# The metadata that leaves the date out of each format, so that the same figure gives the same bytes.
WITHOUT_DATE: dict[str, dict[str, None]] = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
VISIBLE_WHITESPACE = {"\n": "↵", "\t": "⇥"}

# The salt of the ids in an SVG file is a global setting of matplotlib, so only one thread may save at a time.
_SAVING = threading.Lock()


def import_matplotlib(name: str) -> Any:
    """A module of matplotlib, imported only when something is drawn.

    >>> import_matplotlib(".figure").Figure.__name__
    'Figure'
    """
    try:
        return importlib.import_module(f"matplotlib{name}")
    except ImportError:
        raise ImportError("figures need matplotlib; pip install 'regard[plot]'") from None


def map_colours() -> Any:
    """The colour map of weights in the current palette."""
    palette = current_style().palette
    if palette == "viridis":
        return import_matplotlib("").colormaps["viridis"]
    colours = MAP_COLOURS
    if palette == "grey":
        colours = ["#ffffff", "#000000"]
    return import_matplotlib(".colors").LinearSegmentedColormap.from_list("regard", colours)


def signed_colours() -> Any:
    """The colour map of values of either sign in the current palette; its middle is 0."""
    palette = current_style().palette
    colours = SIGNED_COLOURS
    if palette == "viridis":
        # Viridis has no middle that reads as zero.
        colours = ["#440154", "#9a7cb0", "#ffffff", "#8ed08a", "#21711d"]
    if palette == "grey":
        colours = ["#ffffff", "#000000"]
    return import_matplotlib(".colors").LinearSegmentedColormap.from_list("regard signed", colours)


def line_colours() -> list[str]:
    """The colours of curves in the current palette, to be used in this order.

    >>> line_colours() == LINE_COLOURS
    True
    """
    palette = current_style().palette
    if palette == "grey":
        return GREYS
    if palette == "viridis":
        viridis = import_matplotlib("").colormaps["viridis"]
        to_hex = import_matplotlib(".colors").to_hex
        # Neighbouring colours of a curve are far apart; the yellow end would be pale on white.
        return [to_hex(viridis(k / 6)) for k in (0, 4, 2, 5, 1, 3)]
    return LINE_COLOURS


def axes_width(content: float, left: float, right: float = 0.15) -> float:
    """The width of the axes in inches: ``content``, or what margins (at the base font size) leave of a fixed width."""
    style = current_style()
    if style.inches is None:
        return content
    width = style.inches - (left + right) * style.scale
    if width < LEAST_AXES:
        least = LEAST_AXES + (left + right) * style.scale
        raise RegardError(f"width must be at least {least:.2f} inches for these labels, got {style.inches:g}")
    return width


def new_figure(
    width: float,
    height: float,
    *,
    left: float,
    bottom: float,
    right: float = 0.15,
    top: float = 0.1,
    title: str | None,
    keep_height: bool = False,
) -> tuple[Figure, Any]:
    """A figure and its axes of ``width × height`` inches, with these margins in inches and a title at the top left.

    Margins are for the base font size, and grow with the font of the style. If the style has a width, the axes get what
    the margins leave, and keep their proportions, or their height with ``keep_height``.

    >>> figure, axes = new_figure(2, 1, left=0.5, bottom=0.5, title="a title")
    >>> figure.texts[0].get_text(), (axes.get_position().size * figure.get_size_inches()).round(2).tolist()
    ('a title', [2.0, 1.0])
    """
    style = current_style()
    if not style.title:
        title = None
    # Margins are for labels, so only the axes give way to a fixed width.
    fitted = axes_width(width, left, right)
    if style.inches is not None and not keep_height:
        height *= fitted / width
    width = fitted
    title_lines = []
    if title is not None:
        if style.inches is None:
            # The margin grows if the title is wider than the axes.
            title_lines = [drawable_text(title, 120)]
            right = max(right, text_width([title], TITLE, 120) + 0.2 - left - width / style.scale)
        else:
            # A fixed width cannot grow, so the title gets several lines.
            most_characters = max(8, int((style.inches - 0.2) / text_width(["0"], TITLE * style.scale)))
            lines = textwrap.wrap(
                drawable_text(title, 240), most_characters, max_lines=MOST_TITLE_LINES, placeholder=" …"
            )
            title_lines = [drawable_text(line, most_characters) for line in lines]
        top = top + 0.1 + 0.15 * len(title_lines)
    left, right, bottom, top = (margin * style.scale for margin in (left, right, bottom, top))
    total_width = left + width + right
    total_height = bottom + height + top
    figure = _figure_class()(figsize=(total_width, total_height), dpi=200, facecolor="white", layout="none")
    box = (left / total_width, bottom / total_height, width / total_width, height / total_height)
    axes = figure.add_axes(box)
    if title is not None:
        x = 0.1 / total_width
        y = 1 - 0.08 / total_height
        figure.text(x, y, "\n".join(title_lines), va="top", **font_options(size=TITLE * style.scale))
    axes.spines[:].set(linewidth=0.5, color=EDGE_COLOUR)
    thin_ticks(axes)
    return figure, axes


@lru_cache(maxsize=1)
def _figure_class() -> Any:
    """A matplotlib figure that notebooks display as PNG; otherwise they display only figures made by pyplot."""

    class NotebookFigure(import_matplotlib(".figure").Figure):  # type: ignore[misc]
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=100)
            return file.getvalue()

    return NotebookFigure


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure as ``.png``, ``.svg`` or ``.pdf``. Text stays text in SVG and PDF.

    The file is complete or absent, and the same figure gives the same bytes.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save(regard.plots.heatmap([[1.0, 0.0], [0.3, 0.7]]), f"{folder}/map.svg")
    ...     os.listdir(folder)
    ['map.svg']
    """
    file = Path(path)
    extension = figure_format(file)
    with atomic_write(file) as temporary:
        try:
            with temporary.open("wb") as stream:
                _render(figure, stream, extension)
        except OSError as error:
            raise type(error)(f"{file} cannot be written: {error.strerror or error}") from None


def svg_text(figure: Figure) -> str:
    """A figure as the text of an SVG file, the same that ``save`` writes.

    >>> svg_text(regard.plots.heatmap([[1.0, 0.0], [0.3, 0.7]])).startswith("<?xml")
    True
    """
    stream = io.BytesIO()
    _render(figure, stream, "svg")
    return stream.getvalue().decode()


def _render(figure: Figure, stream: IO[bytes], extension: str) -> None:
    with _SAVING, import_matplotlib("").rc_context(FILE_OPTIONS):
        figure.savefig(stream, format=extension, metadata=WITHOUT_DATE[extension], dpi="figure", facecolor="white")


def figure_format(file: Path) -> str:
    """The format of a figure, "png", "svg" or "pdf", from the name of its file; others are refused."""
    extension = file.suffix.lower().removeprefix(".")
    if extension not in WITHOUT_DATE:
        raise RegardError(f"a figure is saved as .png, .svg or .pdf, got {file.name!r}")
    return extension


# --- text ------------------------------------------------------------------------------------------------------------


@lru_cache
def fonts(family: str = "sans-serif") -> tuple[list[str], frozenset[int]]:
    """The font families to draw with, and the code points they contain; matplotlib warns about all others."""
    manager = import_matplotlib(".font_manager")
    installed = manager.fontManager.get_font_names()
    first = GENERIC_FONTS.get(family, family)
    if first not in installed:
        raise RegardError(f"font must be sans-serif, serif, monospace or an installed font family, got {family!r}")
    # DejaVu comes with matplotlib, so a character that the first font lacks is drawn in the same way everywhere.
    candidates = [first, "DejaVu Sans", "DejaVu Sans Mono", *[name for name in OTHER_FONTS if name in installed]]
    families = list(dict.fromkeys(candidates))
    code_points: set[int] = set()
    for name in families:
        code_points.update(manager.get_font(manager.findfont(name)).get_charmap())
    return families, frozenset(code_points)


def font_options(*, tokens: bool = False, **more: Any) -> dict[str, Any]:
    """Options of matplotlib's text functions in the current style; text is never read as a formula.

    - ``tokens``: for tokens, which are monospace, so that spaces and similar characters can be told apart.

    >>> font_options(size=9)["size"], font_options()["parse_math"]
    (9, False)
    """
    style = current_style()
    family = "monospace" if tokens else style.font
    options = {
        "family": fonts(family)[0],
        "size": style.font_size,
        "color": TEXT_COLOUR,
        "parse_math": False,
        "usetex": False,
    }
    return options | more


def drawable_text(text: object, most: int = 14) -> str:
    """Text with characters that can be drawn, shortened to ``most``; invisible format characters are left out."""
    code_points = fonts(current_style().font)[1]
    characters = []
    for character in str(text):
        character = VISIBLE_WHITESPACE.get(character, character)
        category = unicodedata.category(character)
        # Format characters and variation selectors only change how their neighbours are drawn; they have no width.
        if category == "Cf" or "\ufe00" <= character <= "\ufe0f":
            continue
        if ord(character) not in code_points or category[0] == "C":
            character = "▯"
        characters.append(character)
    drawable = "".join(characters)
    drawable = drawable.strip(" ") or drawable.replace(" ", "␣")
    return drawable if len(drawable) <= most else drawable[: most - 1] + "…"


def text_width(texts: Iterable[object] | None, size: float = SMALL, most: int = 14) -> float:
    """The width of the widest text in inches: a character takes 0.64 of the font size, an East Asian one all of it.

    >>> text_width(["a", "cat"]) == text_width(["cat"]) < text_width(["attention"])
    True
    """
    widest = 0.0
    for text in texts or ():
        width = 0.0
        for character in drawable_text(text, most):
            width += 1.02 if unicodedata.east_asian_width(character) in "WF" else 0.64
        widest = max(widest, width)
    return widest * size / 72


# --- axes ------------------------------------------------------------------------------------------------------------


def thin_ticks(axes: Any) -> None:
    """Thin grey ticks with small numbers.

    >>> _, axes = new_figure(2, 1, left=0.5, bottom=0.5, title=None)
    >>> thin_ticks(axes)
    >>> axes.xaxis.get_tick_params()["width"]
    0.5
    """
    current = current_style()
    style: dict[str, Any] = {"width": 0.5, "color": EDGE_COLOUR, "labelsize": current.font_size}
    style |= {"labelcolor": TEXT_COLOUR, "labelfontfamily": fonts(current.font)[0]}
    axes.tick_params(length=2, **style)
    axes.tick_params(which="minor", length=1, **style)


def label_axes(axes: Any, x_label: str | None, y_label: str | None) -> None:
    """Write the names of both axes; nothing in them is read as a formula.

    >>> _, axes = new_figure(2, 1, left=0.5, bottom=0.5, title=None)
    >>> label_axes(axes, "tokens", "$n^2$")
    >>> axes.get_ylabel()
    '$n^2$'
    """
    axes.set_xlabel(drawable_text(x_label or "", 60), **font_options())
    axes.set_ylabel(drawable_text(y_label or "", 60), **font_options())


def label_step(inches: float, count: int, needed: float) -> int:
    """Every how many-th of ``count`` labels on ``inches`` is drawn, so that each has ``needed`` inches.

    >>> label_step(2.0, 10, 0.15), label_step(2.0, 40, 0.15)
    (1, 3)
    """
    return max(1, math.ceil(needed * count / inches - 1e-9))


def line_height() -> float:
    """The inches that one line of text needs.

    >>> 0.1 < line_height() < 0.2
    True
    """
    return 1.25 * current_style().font_size / 72


def check_count(name: str, values: Sequence[Any] | None, count: int) -> list[Any] | None:
    """Labels as a list of ``count`` entries, or None."""
    if values is None:
        return None
    if len(values) != count:
        raise RegardError(f"{name} must have {count} entries, got {len(values)}")
    return list(values)
