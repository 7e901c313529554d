"""Which rank has which part of a sequence, and which pairs of query and key parts a mask does not hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from regard._errors import RegardError

LAYOUTS = ("blocks", "zigzag")


@dataclass(frozen=True)
class Band:
    """The keys j that query i may attend to: ``least ≤ j − i ≤ most``, counted along the whole sequence."""

    least: int
    most: int


@dataclass(frozen=True)
class Rectangle:
    """One span of queries against one span of keys: their local rows, and their first positions in the sequence."""

    rows: slice
    keys: slice
    first_row: int
    first_key: int

    @property
    def shift(self) -> int:
        """The difference of the first positions: local query i has the same position as local key i + shift."""
        return self.first_row - self.first_key

    @property
    def sides(self) -> tuple[int, int]:
        """The numbers of rows and of keys."""
        return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start

    def bounds(self, band: Band, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        """Return the kernel's bounds ``lo, hi [1, rows]`` of visible keys; None if a bound hides nothing."""
        rows, keys = self.sides
        position = torch.arange(rows, device=device).unsqueeze(0) + self.shift
        lo = None
        hi = None
        if band.least > 1 - rows - self.shift:
            lo = (position + band.least).clamp(0, keys)
        if band.most < keys - 1 - self.shift:
            hi = (position + (band.most + 1)).clamp(0, keys)
        return lo, hi


def rectangles(queries: list[range], keys: list[range], band: Band) -> Iterator[Rectangle]:
    """Yield the rectangles in which at least one query sees a key."""
    # Local row and column numbers continue from one span to the next, although the spans are not adjacent.
    row = 0
    for q in queries:
        column = 0
        for k in keys:
            nearest = k.start - (q.stop - 1)
            farthest = (k.stop - 1) - q.start
            # The offsets j − i of this rectangle overlap those of the band.
            if q and k and max(nearest, band.least) <= min(farthest, band.most):
                yield Rectangle(slice(row, row + len(q)), slice(column, column + len(k)), q.start, k.start)
            column += len(k)
        row += len(q)


def ranges(ends: list[int]) -> list[range]:
    """Return the ranges between neighbouring ends."""
    return [range(a, b) for a, b in pairwise(ends)]


def span_lengths(spans: list[list[range]]) -> list[int]:
    """Return the number of rows of each rank."""
    return [sum(map(len, own)) for own in spans]


def split_sequence(length: int, ranks: int, layout: str) -> list[list[range]]:
    """Return the spans of the sequence that each rank has; ``attention`` describes the layouts.

    >>> split_sequence(8, 2, "zigzag")
    [[range(0, 2), range(6, 8)], [range(2, 6)]]
    """
    count = ranks if layout == "blocks" else 2 * ranks
    ends = [0]
    for block in range(count):
        ends.append(ends[-1] + length // count + (block < length % count))
    blocks = ranges(ends)
    if layout == "blocks":
        return [[block] for block in blocks]

    spans = []
    for r in range(ranks):
        early = blocks[r]
        late = blocks[count - 1 - r]
        # The last rank's two blocks are neighbours, so they are one span.
        spans.append([range(early.start, late.stop)] if early.stop == late.start else [early, late])
    return spans


def spans_from_lengths(lengths: list[int], layout: str, what: str) -> list[list[range]]:
    """Return the spans of ranks with these lengths; "blocks" accepts any, "zigzag" only those of ``split_sequence``."""
    if layout == "blocks":
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        return [[block] for block in ranges(ends)]
    spans = split_sequence(sum(lengths), len(lengths), layout)
    expected = span_lengths(spans)
    if expected != lengths:
        raise RegardError(
            f"the ranks have {lengths} {what}; in layout 'zigzag' a sequence of {sum(lengths)} must be split as "
            f"{expected}: use shard(), or layout='blocks', which accepts any lengths"
        )
    return spans
