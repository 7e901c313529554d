"""A head's map at every zoom: cells of 2^l rows × 2^l keys, computed tile by tile from q, k and the rows' sums.

    cell(l, r, c) = mean over the counted rows of [r·2^l, (r+1)·2^l) of Σ_j A_ij, j in [c·2^l, (c+1)·2^l)

Level 0 has the exact weights. Coarse levels, up to ``COARSE`` cells a side, are computed once and kept; finer tiles are
made when they are looked at, and cover at most ``COARSE`` rows and keys each.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.kept import KeptCall

__all__ = ["TILE", "Pyramid"]

TILE = 256  # cells a side of a tile
COARSE = 2048  # cells a side of the finest level that is kept
STRIP = 1024  # rows that are computed at once
SAMPLED = 96  # rows that say how dark a level is
SHARE = 0.995  # of a level's cells that stay below its darkest colour


class Pyramid:
    """One head of one batch entry. ``counted [n]``: the rows that count."""

    def __init__(self, call: KeptCall, batch: int, head: int, counted: Tensor) -> None:
        self.call, self.batch, self.head, self.counted = call, batch, head, counted.cpu()
        self.n, self.m = call.q.shape[2], call.k.shape[2]
        longest = max(self.n, self.m, 1)
        self.top = max(0, math.ceil(math.log2(longest / TILE)))
        self.base = min(self.top, max(0, math.ceil(math.log2(longest / COARSE))))
        self.sums = call.sums(batch, head)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        if self.base:
            self._kept[self.base] = self._level(self.base)
            for level in range(self.base + 1, self.top + 1):
                self._kept[level] = _coarser(*self._kept[level - 1])

    @property
    def bytes(self) -> int:
        """What it holds; q and k are counted too, for those of a changed head are copies."""
        held = [self.call.q, self.call.k, *(x for pair in self._kept.values() for x in pair)]
        return sum(x.nbytes for x in held) + 16 * self.n

    def tile(self, level: int, x: int, y: int) -> Tensor:
        """``[rows, keys]``, at most ``TILE`` a side: tile x along keys and y along queries."""
        side = TILE << level
        if level > self.top or x * side >= max(1, self.m) or y * side >= max(1, self.n):
            raise ValueError(f"there is no tile {x}, {y} at level {level}: the map has {self.n} rows and {self.m} keys")
        if level in self._kept:
            cells = self._kept[level][0]
            return cells[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE]
        rows = slice(y * side, min(self.n, (y + 1) * side))
        keys = slice(x * side, min(self.m, (x + 1) * side))
        return _pooled(self._masses(rows, _edges(keys, level)), self.counted[rows], level)[0]

    def column(self, key: int) -> Tensor:
        """``[n]``: what every row gives to one key."""
        edges = torch.tensor([key, key + 1])
        parts = [self._masses(slice(i, min(self.n, i + STRIP)), edges)[:, 0] for i in range(0, self.n, STRIP)]
        return torch.cat(parts) if parts else torch.zeros(0)

    def darkest(self) -> list[float]:
        """For each level, what nearly all of its cells stay below; 0 cells (hidden keys) do not count."""
        found = []
        some = self.counted.nonzero().flatten()
        rows = (
            some[torch.linspace(0, max(0, len(some) - 1), min(SAMPLED, len(some))).long()].tolist() if len(some) else []
        )
        strips: list[Tensor] = []
        if self.base:
            strips = [self._masses(slice(i, i + 1), _edges(slice(0, self.m), 0)) for i in rows]
        for level in range(self.top + 1):
            if level in self._kept:
                cells = self._kept[level][0]
            elif self.base == 0:
                cells = self.tile(level, 0, 0) if level == self.top else self._whole(level)
            else:
                cells = torch.cat([_binned(strip, level) for strip in strips]) if strips else torch.zeros(1)
            found.append(_dark(cells))
        return found

    def _whole(self, level: int) -> Tensor:
        return torch.cat([self._strip(i, level)[0] for i in range(0, self.n, STRIP)])

    def _level(self, level: int) -> tuple[Tensor, Tensor]:
        parts = [self._strip(i, level) for i in range(0, self.n, STRIP)]
        return torch.cat([cells for cells, _ in parts]), torch.cat([rows for _, rows in parts])

    def _strip(self, start: int, level: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, min(self.n, start + STRIP))
        return _pooled(self._masses(rows, _edges(slice(0, self.m), level)), self.counted[rows], level)

    def _masses(self, rows: slice, edges: Tensor) -> Tensor:
        """``[rows, bins]``, by the native kernel where it can, else by the reference."""
        sums = None if self.sums is None else (self.sums[0][rows], self.sums[1][rows])
        found = None if sums is None else self.call.masses(self.batch, self.head, rows, edges, sums)
        if found is not None:
            return found
        keys = slice(int(edges[0]), int(edges[-1]))
        weights = self.call.weights(self.batch, self.head, rows, keys).float()
        bins = torch.bucketize(torch.arange(keys.start, keys.stop), edges[1:], right=True)
        return weights.new_zeros(len(weights), len(edges) - 1).index_add_(1, bins, weights)


def _edges(keys: slice, level: int) -> Tensor:
    """Where bins of 2^level keys begin, and the end of the last."""
    return torch.cat([torch.arange(keys.start, keys.stop, 1 << level), torch.tensor([keys.stop])])


def _pooled(masses: Tensor, counted: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Means over 2^level rows, and how many of them count."""
    kept = masses if bool(counted.all()) else torch.where(counted[:, None], masses, 0.0)
    if level == 0:
        return kept, counted.float()
    cells, size = -(-len(kept) // (1 << level)), 1 << level
    over = cells * size - len(kept)
    rows = torch.nn.functional.pad(counted.float(), (0, over)).view(cells, size).sum(1)
    sums = torch.nn.functional.pad(kept, (0, 0, 0, over)).view(cells, size, -1).sum(1)
    return sums / rows.clamp(min=1)[:, None], rows


def _coarser(cells: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The next level from one: keys added in pairs, rows by their mean."""
    sums = _binned(cells * rows[:, None], 1)
    odd = len(rows) % 2
    pairs = torch.nn.functional.pad(rows, (0, odd)).view(-1, 2).sum(1)
    sums = torch.nn.functional.pad(sums, (0, 0, 0, odd)).view(len(pairs), 2, -1).sum(1)
    return sums / pairs.clamp(min=1)[:, None], pairs


def _binned(cells: Tensor, level: int) -> Tensor:
    """Columns added by 2^level."""
    size = 1 << level
    over = -cells.shape[1] % size
    return torch.nn.functional.pad(cells, (0, over)).view(len(cells), -1, size).sum(2)


def _dark(cells: Tensor) -> float:
    seen = cells.flatten()
    seen = seen[:: max(1, len(seen) // 100_000)]
    seen = seen[seen > 0]
    if not len(seen):
        return 1.0
    return max(float(seen.quantile(SHARE)), 0.05 * float(seen.max()))
