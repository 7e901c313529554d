"""``FigureStyle``: the width, font, palette and title of a figure, as one value that every figure function takes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from regard._errors import RegardError, RegardTypeError

WIDTHS = {"column": 3.25, "page": 6.75}  # inches, as most journals and conferences ask for
LEAST_WIDTH = 1.5
MOST_WIDTH = 40.0
LEAST_FONT_SIZE = 4.0
MOST_FONT_SIZE = 24.0
PALETTES = ("blue", "viridis", "grey")
BASE_FONT_SIZE = 7.0  # the size in points that the margins of figures are made for

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class FigureStyle:
    """How a figure looks. Every figure function takes one as ``style=``.

    - ``width``: "column" (3.25 inches), "page" (6.75 inches) or a number of inches; None: as wide as the content needs.
    - ``font``: a font family; "sans-serif", "serif" and "monospace" are always there. Tokens stay monospace.
    - ``font_size``: of labels, in points; a title is larger by 2/7.
    - ``palette``: "blue" (white to dark blue, and the colours of Okabe and Ito for lines, all readable with colour
      blindness), "viridis", or "grey" for print without colour.
    - ``title``: False leaves the title out, for papers that have a caption.

    >>> style = FigureStyle(width="column", font_size=8, title=False)
    >>> style.inches
    3.25
    """

    width: str | float | None = None
    font: str = "sans-serif"
    font_size: float = BASE_FONT_SIZE
    palette: str = "blue"
    title: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.width, str):
            if self.width not in WIDTHS:
                raise RegardError(f'width must be "column", "page" or a number of inches, got {self.width!r}')
        elif self.width is not None:
            _check_number("width", self.width, LEAST_WIDTH, MOST_WIDTH, "inches")
        _check_number("font_size", self.font_size, LEAST_FONT_SIZE, MOST_FONT_SIZE, "points")
        if not isinstance(self.font, str) or not self.font:
            raise RegardError(f"font must be the name of a font family, got {self.font!r}")
        if self.palette not in PALETTES:
            raise RegardError(f"palette must be one of {', '.join(PALETTES)}, got {self.palette!r}")
        if not isinstance(self.title, bool):
            raise RegardTypeError(f"title of a style must be True or False, got {self.title!r}")

    @property
    def inches(self) -> float | None:
        """The width in inches; None if the content decides."""
        if isinstance(self.width, str):
            return WIDTHS[self.width]
        return self.width

    @property
    def scale(self) -> float:
        """The size of text relative to the size that margins are made for."""
        return self.font_size / BASE_FONT_SIZE


# The helpers of all figures read the style from here, so that it need not be passed through every call. A context
# variable, because several threads may draw at once.
_CURRENT: ContextVar[FigureStyle | None] = ContextVar("figure style", default=None)


def current_style() -> FigureStyle:
    """The style of the figure that is being drawn; the default outside of figure functions.

    >>> current_style().font_size
    7.0
    """
    return _CURRENT.get() or FigureStyle()


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Decorator of figure functions: their argument ``style`` is the current style while they draw.

    A function without ``style=`` uses that of the function that calls it.

    >>> @styled
    ... def draw(*, style=None):
    ...     return current_style().palette
    >>> draw(style=FigureStyle(palette="grey")), draw()
    ('grey', 'blue')
    """

    @functools.wraps(draw)
    def draw_in_style(*args: P.args, **kwargs: P.kwargs) -> R:
        with _use_style(kwargs.get("style")):
            return draw(*args, **kwargs)

    return draw_in_style


@contextmanager
def _use_style(style: Any) -> Iterator[None]:
    if style is None:
        yield
        return
    if not isinstance(style, FigureStyle):
        raise RegardTypeError(f"style must be a FigureStyle, got {type(style).__name__}")
    token = _CURRENT.set(style)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def _check_number(name: str, value: Any, least: float, most: float, unit: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most:
        raise RegardError(f"{name} must be between {least:g} and {most:g} {unit}, got {value!r}")
