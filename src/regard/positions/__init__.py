"""Position schemes, one per file.

added to the input    Sinusoidal, Learned
applied to q and k    Rotary (with LinearScaling, NTKScaling)
added to scores       ALiBi, T5Buckets, RelativeTable, RelativeKeys, Grid, Quadratic; ``a + b`` adds two of them
used as q and k       hard_selection
"""

from regard.positions._added_to_input import AddedToInput
from regard.positions._alibi import ALiBi, published_slopes
from regard.positions._grid_bias import Grid
from regard.positions._hard_selection import hard_selection
from regard.positions._learned import Learned
from regard.positions._quadratic import Quadratic
from regard.positions._relative_keys import RelativeKeys
from regard.positions._relative_table import RelativeTable
from regard.positions._rotary import LinearScaling, NTKScaling, Rotary, Scaling
from regard.positions._sinusoidal import Sinusoidal
from regard.positions._t5_buckets import T5Buckets

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
