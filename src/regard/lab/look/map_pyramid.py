"""One head's attention map at every zoom level, computed tile by tile from q, k and the rows' sums.

A cell of level l covers 2^l rows × 2^l keys:

    cell(l, r, c) = mean over the counted rows of [r·2^l, (r+1)·2^l) of Σ_j A_ij, j in [c·2^l, (c+1)·2^l)

A row counts if it is a real query, not padding, and sees at least one key.

Level 0 has the exact weights. Coarse levels, up to ``COARSE`` cells per side, are computed once and stored. Tiles of
finer levels are computed on request; each covers at most ``COARSE`` rows and keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard._errors import RegardError
from regard._saved_call import SavedCall

TILE = 256  # cells per side of a tile
COARSE = 2048  # cells per side of the finest level that is stored
STRIP = 1024  # rows that are computed at once
SAMPLE_ROWS = 96  # rows that are sampled to find the darkest colour of a level
DARK_QUANTILE = 0.995  # share of a level's cells that are lighter than its darkest colour


class Pyramid:
    """The map of one head of one batch entry. ``counted``, bool ``[n]``: True for the rows that count."""

    def __init__(self, call: SavedCall, batch: int, head: int, counted: Tensor) -> None:
        self.call = call
        self.batch = batch
        self.head = head
        self.counted = counted.cpu()
        self.n = call.q.shape[2]
        self.m = call.k.shape[2]
        longest = max(self.n, self.m, 1)
        self.top = max(0, math.ceil(math.log2(longest / TILE)))  # the level at which one tile shows the whole map
        self.base = min(self.top, max(0, math.ceil(math.log2(longest / COARSE))))  # the finest level that is stored
        self.row_max_and_sum = call.row_max_and_sum(batch, head)

        # Short texts need no stored levels: every level is computed fast enough on request.
        self._levels: dict[int, tuple[Tensor, Tensor]] = {}
        if self.base:
            self._levels[self.base] = self._compute_level(self.base)
            for level in range(self.base + 1, self.top + 1):
                self._levels[level] = _next_level(*self._levels[level - 1])

    @property
    def bytes(self) -> int:
        """The bytes that this object holds. q and k are included, because a variant has its own copies."""
        total = self.call.q.nbytes + self.call.k.nbytes + 16 * self.n
        for cells, row_counts in self._levels.values():
            total += cells.nbytes + row_counts.nbytes
        return total

    def tile(self, level: int, x: int, y: int) -> Tensor:
        """Return the tile at x (along keys) and y (along queries): ``[rows, keys]``, at most ``TILE`` per side."""
        side = TILE << level
        if level > self.top or x * side >= max(1, self.m) or y * side >= max(1, self.n):
            raise RegardError(f"no tile x={x}, y={y} at level={level}: the map has {self.n} rows and {self.m} keys")
        if level in self._levels:
            cells = self._levels[level][0]
            return cells[y * TILE : (y + 1) * TILE, x * TILE : (x + 1) * TILE]
        rows = slice(y * side, min(self.n, (y + 1) * side))
        keys = slice(x * side, min(self.m, (x + 1) * side))
        return _pool_rows(self._bin_masses(rows, _bin_edges(keys, level)), self.counted[rows], level)[0]

    def weights(self, rows: slice) -> Tensor:
        """Return the exact weights of consecutive rows on all keys: ``[rows, m]``."""
        return self._bin_masses(rows, _bin_edges(slice(0, self.m), 0))

    def column(self, key: int) -> Tensor:
        """Return the weight of every row on one key: ``[n]``."""
        edges = torch.tensor([key, key + 1])
        weights = [torch.zeros(0)]
        for start in range(0, self.n, STRIP):
            weights.append(self._bin_masses(slice(start, min(self.n, start + STRIP)), edges)[:, 0])
        return torch.cat(weights)

    def darkest(self) -> list[float]:
        """Return, per level, a value that is larger than nearly all of its cells. Cells of 0 (masked) do not count."""
        # Fine levels of a long text are too large to compute, so a sample of rows is used.
        sample = self._sample_rows() if self.base else None
        values = []
        for level in range(self.top + 1):
            if level in self._levels:
                cells = self._levels[level][0]
            elif sample is not None:
                cells = _pool_keys(sample, level)
            else:
                cells = self._compute_level(level)[0]
            values.append(_dark_value(cells))
        return values

    def _sample_rows(self) -> Tensor:
        """Return the weights of up to ``SAMPLE_ROWS`` counted rows, evenly spaced: ``[rows, m]``."""
        counted = self.counted.nonzero().flatten()
        picks = torch.linspace(0, max(0, len(counted) - 1), min(SAMPLE_ROWS, len(counted))).long()
        edges = _bin_edges(slice(0, self.m), 0)
        rows = [torch.zeros(1, self.m)]  # zeros do not count, and there may be no counted row
        for row in counted[picks].tolist():
            rows.append(self._bin_masses(slice(row, row + 1), edges))
        return torch.cat(rows)

    def _compute_level(self, level: int) -> tuple[Tensor, Tensor]:
        """Return all cells of a level, and how many counted rows each row of cells has."""
        edges = _bin_edges(slice(0, self.m), level)
        cells = [torch.zeros(0, len(edges) - 1)]
        row_counts = [torch.zeros(0)]
        for start in range(0, self.n, STRIP):
            rows = slice(start, min(self.n, start + STRIP))
            strip, counts = _pool_rows(self._bin_masses(rows, edges), self.counted[rows], level)
            cells.append(strip)
            row_counts.append(counts)
        return torch.cat(cells), torch.cat(row_counts)

    def _bin_masses(self, rows: slice, edges: Tensor) -> Tensor:
        """Return the weight of each row in each bin of keys: ``[rows, bins]``."""
        if self.row_max_and_sum is not None:
            row_max, row_sum = self.row_max_and_sum
            masses = self.call.bin_masses(self.batch, self.head, rows, edges, (row_max[rows], row_sum[rows]))
            if masses is not None:
                return masses

        # The native kernel is not available for this call: the reference computes the weights.
        keys = slice(int(edges[0]), int(edges[-1]))
        weights = self.call.weights(self.batch, self.head, rows, keys).float()
        bins = torch.bucketize(torch.arange(keys.start, keys.stop), edges[1:], right=True)
        return weights.new_zeros(len(weights), len(edges) - 1).index_add_(1, bins, weights)


def _bin_edges(keys: slice, level: int) -> Tensor:
    """Return the first key of each bin of 2^level keys, and the end of the last bin."""
    return torch.cat([torch.arange(keys.start, keys.stop, 1 << level), torch.tensor([keys.stop])])


def _pool_rows(masses: Tensor, counted: Tensor, level: int) -> tuple[Tensor, Tensor]:
    """Return the means over groups of 2^level rows, and how many rows of each group count."""
    if not bool(counted.all()):
        masses = torch.where(counted[:, None], masses, 0.0)
    if level == 0:
        return masses, counted.float()
    return _group_means(masses, counted.float(), 1 << level)


def _next_level(cells: Tensor, row_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next coarser level: keys are added in pairs, rows are averaged in pairs."""
    return _group_means(_pool_keys(cells * row_counts[:, None], 1), row_counts, 2)


def _group_means(sums: Tensor, row_counts: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Add groups of ``size`` rows and divide by their counts. Returns the means and the counts."""
    missing = -len(sums) % size
    counts = pad(row_counts, (0, missing)).view(-1, size).sum(1)
    totals = pad(sums, (0, 0, 0, missing)).view(len(counts), size, -1).sum(1)
    return totals / counts.clamp(min=1)[:, None], counts


def _pool_keys(cells: Tensor, level: int) -> Tensor:
    """Add groups of 2^level columns."""
    size = 1 << level
    missing = -cells.shape[1] % size
    return pad(cells, (0, missing)).view(len(cells), -1, size).sum(2)


def _dark_value(cells: Tensor) -> float:
    values = cells.flatten()
    values = values[:: max(1, len(values) // 100_000)]  # torch.quantile is slow, and refuses large inputs
    values = values[values > 0]
    if not len(values):
        return 1.0
    # Where a few cells hold nearly all of the weight, the quantile alone would paint all others black.
    return max(float(values.quantile(DARK_QUANTILE)), 0.05 * float(values.max()))
