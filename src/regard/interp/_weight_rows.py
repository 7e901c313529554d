"""Exact weights of a few rows of all heads at once, with and without sinks, and sums of weights by relative offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._observables import Observation
from regard._saved_call import SavedCall
from regard.kernels.score_tiles import Problem, full_precision, largest_products, score_tile

LEAST_REST = 1e-3  # a row counts in A' if at least this share of its weight is outside the sinks
LEAST_LOGIT = -700.0  # smaller logits are raised to this, because e^x would be subnormal, which is slow
LEAST_WEIGHT = 1e-300  # smaller weights become 0, also those of raised logits


@dataclass(frozen=True)
class KeyOffsets:
    """The offsets key − query of n queries and m keys, on a line or on a grid of patches.

    The last query is at the position of the last key. The patches of a ``grid`` (height, width) are the last keys; the
    ``m − height·width`` keys before them are other tokens, such as a class token, and have no position on the grid.
    Every possible offset has an index from 0 to ``count − 1``; a pair without an offset has the index ``count``.
    """

    n: int
    m: int
    grid: tuple[int, int] | None

    @property
    def count(self) -> int:
        """How many different offsets there are."""
        if self.grid is None:
            return self.n + self.m - 1
        return (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1)

    def offsets(self) -> Tensor:
        """The offset of each index, ``[1 or 2, count]``; on a grid the first row is down, the second across."""
        if self.grid is None:
            return torch.arange(1 - self.m, self.n).double().unsqueeze(0)
        height, width = self.grid
        down = torch.arange(1 - height, height)
        across = torch.arange(1 - width, width)
        return torch.stack([down.repeat_interleave(2 * width - 1), across.repeat(2 * height - 1)]).double()

    def coordinates(self) -> tuple[Tensor, Tensor]:
        """The positions of the queries ``[n, axes]`` and of the keys ``[m, axes]``, float64; 0 outside of the grid."""
        query = torch.arange(self.n) + self.m - self.n
        key = torch.arange(self.m)
        if self.grid is None:
            return query.double().unsqueeze(-1), key.double().unsqueeze(-1)
        return self._grid_positions(query), self._grid_positions(key)

    def outside_grid(self) -> Tensor:
        """Bool ``[n]``: True for the queries that have no position on the grid."""
        if self.grid is None:
            return torch.zeros(self.n, dtype=torch.bool)
        return torch.arange(self.n) + self.m - self.n < self.m - self.grid[0] * self.grid[1]

    def indices(self, rows: slice) -> Tensor:
        """The index of the offset of each pair (query of ``rows``, key), ``[r, m]``."""
        query, key = self.coordinates()
        query = query[rows].long()
        if self.grid is None:
            return key.long().squeeze(-1) - query + self.m - 1
        height, width = self.grid
        delta = key.long() - query.unsqueeze(1)
        indices = (delta[..., 0] + height - 1) * (2 * width - 1) + delta[..., 1] + width - 1
        other_tokens = torch.arange(self.m) < self.m - height * width
        return indices.masked_fill(other_tokens | self.outside_grid()[rows].unsqueeze(-1), self.count)

    def by_offset(self, x: Tensor, rows: slice, indices: Tensor) -> Tensor:
        """``x [K, r, m]`` with one column per offset of ``index_span(rows)``; 0 if a row has no key there."""
        K, r, m = x.shape
        if self.grid is not None:
            return x.new_zeros(K, r, self.count + 1).scatter_(2, indices.expand_as(x), x)
        # Written as rows of `wide` numbers and read as rows of `wide + 1`, each row is shifted by one more column than
        # the row before it, so that equal offsets are in one column.
        wide = m + r - 1
        table = x.new_zeros(K, r * (wide + 1))
        table[:, : r * wide].view(K, r, wide)[:, :, r - 1 :] = x
        return table.view(K, r, wide + 1)[:, :, :wide]

    def index_span(self, rows: slice) -> slice:
        """The offset indices of the columns that ``by_offset`` gives for these rows."""
        if self.grid is not None:
            return slice(0, self.count + 1)
        return slice(self.n - rows.stop, self.n - rows.start + self.m - 1)

    def _grid_positions(self, tokens: Tensor) -> Tensor:
        assert self.grid is not None
        height, width = self.grid
        patch = tokens - (self.m - height * width)
        positions = torch.stack([torch.div(patch, width, rounding_mode="floor"), patch % width], -1)
        return positions.masked_fill((patch < 0).unsqueeze(-1), 0).double()


@dataclass(frozen=True)
class WeightRows:
    """A few rows of one text in all heads, split into sink keys and the rest.

    ``A`` are the weights. ``A'`` are the weights without the sinks, each row divided by its remaining sum. Where a
    tensor has a first dimension of 2, it holds a value for A and one for A'. Weights are stored as ``e^x``, where x is
    the logit minus the largest one of its row; ``scale`` turns them into A or A'.
    """

    rows: slice
    rest: Tensor  # [H, r, m] e^x, 0 at the sinks
    sunk: Tensor  # [H, r, S] e^x at the sinks
    rest_sum: Tensor  # [H, r] Σ rest
    sunk_sum: Tensor  # [H, r] Σ sunk
    entropy: Tensor  # [2, H, r] −Σ A ln A
    scale: Tensor  # [2, H, r] factor from e^x to A or A'; 0 in rows that do not count
    counts: Tensor  # [2, H, r] bool: the row is a real query, not padding, and sees a key; see ``weight_rows`` for A'
    visible: Tensor  # [2, H, r] number of keys that a row may attend to
    visible_keys: Tensor  # [2, 1 or H, r, m] bool

    def sums(self, rest: Tensor, sunk: Tensor) -> Tensor:
        """Sums over the rows of A and A' ``[2, H]``, from values per row ``[H, r]`` of the rest and of the sinks."""
        return torch.stack([(self.scale[0] * (rest + sunk)).sum(-1), (self.scale[1] * rest).sum(-1)])


def weight_rows(
    observation: Observation, batch: int, key_offsets: KeyOffsets, sinks: Tensor, cells: int
) -> Iterator[WeightRows]:
    """Yield the rows of one text, about ``cells`` weights at a time. ``sinks [S]``: the indices of the sink keys."""
    assert observation.counted is not None
    call, entry = observation.find_saved_call(batch)
    assert isinstance(call, SavedCall)
    entry_only = slice(entry, entry + 1)
    problem = Problem(call.q[entry_only], call.k[entry_only], call.scores.select_entry(entry))
    heads = len(observation.heads)
    n = key_offsets.n
    # Rows that see no key in one head only are found below. A row outside of the grid counts in no head.
    counted = observation.counted[batch].any(0).cpu() & ~key_offsets.outside_grid()
    # Hard attention holds the products of all d dimensions at once.
    copies = 1
    if problem.hard:
        copies = problem.q.shape[3]
    step = max(1, cells // (heads * key_offsets.m * copies))
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        x, visible_keys, learned_sinks = _logits(problem, rows)
        x = x.cpu().double()
        visible_keys = visible_keys.cpu()
        rest = torch.threshold_(x.exp(), LEAST_WEIGHT, 0.0)
        sunk = rest[..., sinks]
        rest.index_fill_(2, sinks, 0.0)
        rest_sum = rest.sum(-1)
        sunk_sum = sunk.sum(-1)
        total = rest_sum + sunk_sum + learned_sinks.cpu().double()
        total = torch.where(total > 0, total, 1.0)

        # A row counts in A' only if enough of its weight lies outside the sinks.
        visible_keys = torch.stack([visible_keys, visible_keys.index_fill(2, sinks, False)])
        visible = visible_keys.sum(-1).double().expand(2, heads, -1)
        counts_raw = counted[rows] & (visible[0] > 0)
        counts = torch.stack([counts_raw, counts_raw & (rest_sum / total >= LEAST_REST)])

        # A is e^x / total and A' is e^x / rest_sum, so −Σ A ln A = ln total · Σ A − Σ A x.
        totals = torch.stack([total, rest_sum.clamp(min=LEAST_REST * total)])
        weight_sums = torch.stack([rest_sum + sunk_sum, rest_sum])
        rest_times_x = torch.linalg.vecdot(rest, x)
        sunk_times_x = torch.linalg.vecdot(sunk, x[..., sinks])
        products = torch.stack([rest_times_x + sunk_times_x, rest_times_x])
        entropy = (weight_sums * totals.log() - products) / totals
        scale = counts / totals
        yield WeightRows(rows, rest, sunk, rest_sum, sunk_sum, entropy, scale, counts, visible, visible_keys)


def _logits(problem: Problem, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    """``x [H, r, m]``, logits minus the largest of the row; the visible keys; ``e^x [H, r]`` of learned sinks."""
    keys = slice(0, problem.k.shape[2])
    with full_precision(problem.q):
        tile = score_tile(problem, rows, keys, largest_products(problem, rows, [keys]))
    logits = tile.logits[0]
    largest = logits.amax(-1, keepdim=True)
    sinks = problem.scores.sinks
    if sinks is not None:
        sinks = sinks.to(largest.dtype).view(-1, 1, 1)
        largest = torch.maximum(largest, sinks)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    learned_sinks = torch.zeros_like(largest)
    if sinks is not None:
        learned_sinks = (sinks - largest).exp()
    x = logits.sub_(largest).clamp_(min=LEAST_LOGIT)
    if tile.visible is None:
        visible = torch.ones_like(x[:1], dtype=torch.bool)
    else:
        visible = tile.visible[0]
    return x, visible.expand(-1, *x.shape[1:]), learned_sinks.squeeze(-1)
