"""Figures of maps, profiles, lines and curves from plain arrays; ``save`` writes PNG, SVG or PDF.

Every figure function takes ``style=FigureStyle(width="column", font_size=8, …)``: width, font, palette and title.

Each function returns a ``matplotlib.figure.Figure`` of its own: no global state changes, no display is needed.
matplotlib is an extra (``pip install 'regard[plot]'``). Maps are white where a weight is 0 and show its square root, so
that small weights are visible. Labels may contain any text: it is never parsed as a formula. Line ends and tabs are
drawn as ↵ and ⇥, characters that no font has as ▯.
"""

from regard.plots._bars import MOST_BARS, bars
from regard.plots._curves import FAINTEST_LINE, MOST_LINES, lines, profile, series
from regard.plots._drawing import (
    EDGE_COLOUR,
    LINE_COLOURS,
    font_options,
    import_matplotlib,
    label_axes,
    label_step,
    line_colours,
    line_height,
    new_figure,
    save,
    svg_text,
    text_width,
    thin_ticks,
)
from regard.plots._figure_style import FigureStyle, current_style, styled
from regard.plots._graph import graph
from regard.plots._maps import MOST_LABELS, grid, heatmap, signed_heatmap

__all__ = [
    "EDGE_COLOUR",
    "FAINTEST_LINE",
    "LINE_COLOURS",
    "MOST_BARS",
    "MOST_LABELS",
    "MOST_LINES",
    "FigureStyle",
    "bars",
    "current_style",
    "font_options",
    "graph",
    "grid",
    "heatmap",
    "import_matplotlib",
    "label_axes",
    "label_step",
    "line_colours",
    "line_height",
    "lines",
    "new_figure",
    "profile",
    "save",
    "series",
    "signed_heatmap",
    "styled",
    "svg_text",
    "text_width",
    "thin_ticks",
]
