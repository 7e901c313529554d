"""Masks are values that compose: ``Causal() & Window(128) & Padding(lengths)``. **True = may attend**, everywhere.

A mask compiles to one run of keys a row, ``lo[b, i] ≤ j < hi[b, i]``, where it is one, and to a dense bool mask where
it is not. One alignment rule: query i stands at key position i + offset, and offset = m − n unless said otherwise, so
that the last query sees the last key. ``print(mask)`` draws it.
"""

from regard.masks.base import Dense, Mask
from regard.masks.convert import from_torch
from regard.masks.kinds import Causal, Padding, Prefix, Segments, Window

__all__ = ["Causal", "Dense", "Mask", "Padding", "Prefix", "Segments", "Window", "from_torch"]
