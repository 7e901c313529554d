"""Positions: added to the input, applied to q and k, or added to scores; one scheme a file.

added to the input    Sinusoidal, Learned
applied to q and k    Rotary (with LinearScaling, NTKScaling)
added to scores       ALiBi, T5Buckets, RelativeTable, RelativeKeys, Grid, Quadratic; ``a + b`` adds two of them
put into q and k      hard_selection
"""

from regard.positions.added import AddedToInput
from regard.positions.alibi import ALiBi, published_slopes
from regard.positions.grid import Grid
from regard.positions.learned import Learned
from regard.positions.quadratic import Quadratic
from regard.positions.relative_keys import RelativeKeys
from regard.positions.relative_table import RelativeTable
from regard.positions.rotary import LinearScaling, NTKScaling, Rotary, Scaling
from regard.positions.selection import hard_selection
from regard.positions.sinusoidal import Sinusoidal
from regard.positions.t5 import T5Buckets

__all__ = [
    "ALiBi",
    "AddedToInput",
    "Grid",
    "Learned",
    "LinearScaling",
    "NTKScaling",
    "Quadratic",
    "RelativeKeys",
    "RelativeTable",
    "Rotary",
    "Scaling",
    "Sinusoidal",
    "T5Buckets",
    "hard_selection",
    "published_slopes",
]
