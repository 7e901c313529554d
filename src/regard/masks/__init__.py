"""Masks are values that compose: ``Causal() & Window(128) & Padding(lengths)``. **True = may attend**, everywhere.

A mask is lowered to one run of consecutive keys per query, ``lo[b, i] ≤ j < hi[b, i]``, where possible, else to a dense
bool mask. All masks have one alignment rule: query i is at key position i + offset, and offset is m − n by default, so
that the last query is aligned with the last key. ``print(mask)`` draws it.
"""

from regard.masks._from_torch import from_torch
from regard.masks._mask import Dense, Mask
from regard.masks._patterns import Causal, Padding, Prefix, Segments, Window
from regard.masks._row_mask import RowMask

__all__ = ["Causal", "Dense", "Mask", "Padding", "Prefix", "RowMask", "Segments", "Window", "from_torch"]
