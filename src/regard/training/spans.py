"""Who has which part of a sequence, and which parts of queries and keys meet under a mask."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["LAYOUTS", "Band", "Rectangle", "rectangles", "spans", "spans_of"]

LAYOUTS = ("blocks", "zigzag")


@dataclass(frozen=True)
class Band:
    """``least ≤ j − i ≤ most``: the keys that a query sees, both counted along the whole sequence."""

    least: int
    most: int


@dataclass(frozen=True)
class Rectangle:
    """One span of queries against one span of keys: where they stand locally, and how far apart they start."""

    rows: slice
    keys: slice
    first_row: int
    first_key: int

    @property
    def shift(self) -> int:
        """Row i of this rectangle stands at its key i + shift."""
        return self.first_row - self.first_key

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    def bounds(self, band: Band, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """``lo, hi [1, rows]`` as kernels take them; None where they hide nothing."""
        rows, keys = self.sides
        at = torch.arange(rows, device=device).unsqueeze(0) + self.shift
        lo = None if band.least <= 1 - rows - self.shift else (at + band.least).clamp(0, keys)
        hi = None if band.most >= keys - 1 - self.shift else (at + (band.most + 1)).clamp(0, keys)
        return lo, hi


def rectangles(queries: list[range], keys: list[range], band: Band) -> Iterator[Rectangle]:
    """The rectangles in which at least one query sees a key."""
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            nearest, farthest = k.start - (q.stop - 1), (k.stop - 1) - q.start
            if q and k and max(nearest, band.least) <= min(farthest, band.most):
                yield Rectangle(slice(row, row + len(q)), slice(column, column + len(k)), q.start, k.start)
            column += len(k)
        row += len(q)


def spans(length: int, ranks: int, layout: str) -> list[list[range]]:
    """The parts of the sequence that each rank has, in its own order; sizes differ by one where they must.

    ``blocks``: rank r has block r of P. ``zigzag``: blocks r and 2P − 1 − r of 2P, an early one and a late one, so that
    causal work is the same everywhere.

    >>> spans(8, 2, "zigzag")
    [[range(0, 2), range(6, 8)], [range(2, 6)]]
    """
    count = ranks if layout == "blocks" else 2 * ranks
    ends = [0]
    for block in range(count):
        ends.append(ends[-1] + length // count + (block < length % count))
    blocks = [range(a, b) for a, b in pairwise(ends)]
    if layout == "blocks":
        return [[block] for block in blocks]
    pairs = [(blocks[r], blocks[count - 1 - r]) for r in range(ranks)]
    return [[range(a.start, b.stop)] if a.stop == b.start else [a, b] for a, b in pairs]


def spans_of(lengths: list[int], layout: str, what: str) -> list[list[range]]:
    """``spans`` from what the ranks have; blocks may have any lengths, a zigzag's are given by their sum."""
    if layout == "blocks":
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return [[range(a, b)] for a, b in pairwise(ends)]
    found = spans(sum(lengths), len(lengths), layout)
    right = [sum(map(len, parts)) for parts in found]
    if right != lengths:
        raise ValueError(
            f"the ranks have {lengths} {what}; in layout 'zigzag' a sequence of {sum(lengths)} is split as {right}: "
            "split it with shard(), or use layout='blocks', where any lengths will do"
        )
    return found
