"""Parts of a sum as horizontal bars, positive to the right and negative to the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from regard._errors import RegardError
from regard.plots import _drawing as figures
from regard.plots._figure_style import FigureStyle, current_style, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from numpy.typing import ArrayLike

MOST_BARS = 60  # more bars would not fit on a page
LABEL_LENGTH = 44  # characters


@styled
def bars(
    labels: Sequence[object],
    values: ArrayLike,
    *,
    title: str | None = None,
    value_label: str = "value",
    style: FigureStyle | None = None,
) -> Figure:
    """Draw signed numbers as bars, the first one at the top.

    - ``labels``: one per bar, at most 60.
    - ``values``: one number per bar.
    - ``value_label``: what the numbers are.
    - ``style``: width, font, palette and title; see ``FigureStyle``.

    >>> figure = bars(["head 1", "head 0"], [1.5, -0.5], title="two parts")
    >>> [float(bar.get_width()) for bar in figure.axes[0].patches]
    [1.5, -0.5]
    """
    numbers = np.asarray(values, dtype=float)
    if numbers.ndim != 1 or len(labels) != len(numbers) or not 0 < len(numbers) <= MOST_BARS:
        raise RegardError(
            f"bars takes one label per value and 1 to {MOST_BARS} values, got {len(labels)} labels and "
            f"values {list(numbers.shape)}"
        )
    count = len(numbers)
    names = [_shortened(figures.drawable_text(label, 10**3)) for label in labels]
    left = 0.25 + figures.text_width(names, most=LABEL_LENGTH)
    height = (0.17 * count + 0.1) * current_style().scale
    figure, axes = figures.new_figure(3, height, left=left, bottom=0.45, title=title, keep_height=True)
    # Negative bars have the other colour of the palette.
    colours = []
    for number in numbers:
        colours.append(figures.line_colours()[1 if number < 0 else 0])
    axes.barh(np.arange(count), numbers, height=0.75, color=colours)
    axes.axvline(0, color=figures.EDGE_COLOUR, linewidth=0.5)
    axes.set_ylim(count - 0.5, -0.5)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_yticks(np.arange(count), names, **figures.font_options())
    axes.tick_params(axis="y", length=0)
    figures.label_axes(axes, value_label, None)
    return figure


def _shortened(label: str) -> str:
    """A label without its beginning if it is too long: the last parts of a path say the most."""
    most = LABEL_LENGTH
    style = current_style()
    if style.inches is not None:
        # At most half of the width is for labels; a character takes 0.64 of the font size.
        most = min(most, int(0.5 * style.inches * 72 / (0.64 * style.font_size)))
    if len(label) <= most:
        return label
    return "…" + label[len(label) - most + 1 :]
