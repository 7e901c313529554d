"""Figures of maps, profiles, lines and series, from plain arrays, for paper: PNG, SVG or PDF through ``save``.

Each function returns a ``matplotlib.figure.Figure`` of its own: nothing global is touched, no display is needed.
matplotlib is an extra (``pip install 'regard[plot]'``). Maps are white where a weight is 0 and go by its square root,
so that faint structure shows. Words may hold anything: nothing in them is read as a formula; line ends and tabs show
as ↵ and ⇥, characters that no font here can draw as ▯.
"""

from regard.plots.curves import FAINT, MOST_LINES, lines, profile, series
from regard.plots.drawing import EDGE, SERIES, font, frame, inches, name_axes, part, save, thin_ticks
from regard.plots.maps import MOST_LABELS, grid, heat

__all__ = [
    "EDGE",
    "FAINT",
    "MOST_LABELS",
    "MOST_LINES",
    "SERIES",
    "font",
    "frame",
    "grid",
    "heat",
    "inches",
    "lines",
    "name_axes",
    "part",
    "profile",
    "save",
    "series",
    "thin_ticks",
]
