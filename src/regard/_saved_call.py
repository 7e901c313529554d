"""``SavedCall``: q, k and the lowered options of one call, from which any exact weight can be computed later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._devices import widest, widest_dtype
from regard._errors import RegardError
from regard._lowered_scores import Scores, check_scores
from regard._observables import Index, index_tensor
from regard._register_pytree import register_pytree
from regard.kernels.choose_backend import fast_kernel
from regard.kernels.score_tiles import (
    Problem,
    bias_tile,
    full_precision,
    largest_products,
    result_dtype,
    row_max_and_sum,
    score_tile,
    softmax_tile,
    tile_shape,
    visible_tile,
)


@register_pytree
@dataclass(frozen=True, eq=False)
class SavedCall:
    """``q [B, H, n, d]``, ``k [B, G, m, d]`` and the options of one call that was observed with ``keep=True``.

    q and k are the caller's tensors, not copies: changing them in place changes what is computed here. The softmax sums
    of rows are computed again over all keys, so that rows add up to 1. Weights come from the reference kernel, tiles
    from the native or the Triton kernel where one can run.

    Raises ``RegardError`` if q, k and the options do not fit together: they may come from a file of anyone.
    """

    q: Tensor
    k: Tensor
    scores: Scores

    def __post_init__(self) -> None:
        check_scores(self.q, self.k, self.scores)
        # Exact weights are the weights before dropout.
        if self.scores.dropout:
            raise RegardError(f"dropout of a saved call must be 0, got {self.scores.dropout}")

    @property
    def batch_size(self) -> int:
        return self.q.shape[0]

    def weights(self, batch: int, head: int, rows: Index, keys: Index) -> Tensor:
        """Compute ``A[rows, keys]`` of one head."""
        row_index, key_index = self._indices(rows, keys)
        problem = self.select_head(batch, head)
        # Tile by tile, because there may be many rows.
        weights = self.q.new_empty(len(row_index), len(key_index), dtype=result_dtype(self.q.dtype))
        step = tile_shape(problem)[0]
        with full_precision(self.q):
            for i in range(0, len(row_index), step):
                weights[i : i + step] = _WeightRows(problem, row_index[i : i + step]).weights(key_index)
        return weights

    def visible(self, batch: int, head: int, rows: Index, keys: Index) -> Tensor:
        """Which of these keys each row may attend to: not masked, and without a bias of −inf."""
        row_index, key_index = self._indices(rows, keys)
        problem = self.select_head(batch, head)
        visible = torch.ones(len(row_index), len(key_index), dtype=torch.bool, device=self.q.device)
        step = tile_shape(problem)[0]
        for i in range(0, len(row_index), step):
            some_rows = row_index[i : i + step]
            tile = visible_tile(problem, some_rows, key_index, bias_tile(problem, some_rows, key_index))
            if tile is not None:
                visible[i : i + step] = tile[0, 0]
        return visible

    def row_max_and_sum(self, batch: int, head: int, rows: slice | None = None) -> tuple[Tensor, Tensor] | None:
        """``row_max`` and ``row_sum`` of a head's rows, not by the reference; None if only that can compute them."""
        problem = _select_rows(self.select_head(batch, head), rows)
        kernel = fast_kernel(problem.q)
        if kernel is None:
            return None
        sums = kernel.row_max_and_sum(problem.q, problem.k, problem.scores)
        if sums is None:
            return None
        row_max, row_sum = sums
        return row_max[0, 0], row_sum[0, 0]

    def bin_masses(
        self, batch: int, head: int, rows: slice, edges: Tensor, sums: tuple[Tensor, Tensor] | None = None
    ) -> Tensor | None:
        """``[rows, bins]``: the weight of each row on the keys ``edges[t] ≤ j < edges[t + 1]``.

        ``sums``: the ``row_max_and_sum`` of these rows, if they are known. Returns None where
        ``row_max_and_sum`` does.
        """
        if sums is None:
            sums = self.row_max_and_sum(batch, head, rows)
        if sums is None:
            return None
        problem = _select_rows(self.select_head(batch, head), rows)
        kernel = fast_kernel(problem.q)
        if kernel is None:
            return None
        row_max = sums[0].reshape(1, 1, -1)
        row_sum = sums[1].reshape(1, 1, -1)
        masses: Tensor = kernel.bin_masses(problem.q, problem.k, row_max, row_sum, problem.scores, edges)
        return masses[0, 0]

    def tile(self, batch: int, head: int, rows: Index, keys: Index, size: int, counted: Tensor) -> Tensor:
        """Pool a region to at most size × size: the mean over its counted rows of the weight on a bin of keys."""
        row_index = index_tensor(rows, self.q.shape[2], "rows").cpu()
        key_index = index_tensor(keys, self.k.shape[2], "keys").cpu()
        height = min(size, len(row_index))
        width = min(size, len(key_index))
        masses = None
        # The native and the Triton kernel take consecutive rows and keys only.
        if height and width and _is_run(row_index) and _is_run(key_index):
            # Bin t begins at key ⌈t·m/width⌉ of the region.
            edges = int(key_index[0]) + -(-torch.arange(width + 1) * len(key_index) // width)
            masses = self.bin_masses(batch, head, slice(int(row_index[0]), int(row_index[-1]) + 1), edges)
        # Until here the indices are read on the CPU, from here on they select on the device of q.
        row_index = row_index.to(self.q.device)
        if masses is None:
            key_index = key_index.to(self.q.device)
            masses = self._reference_masses(self.select_head(batch, head), row_index, key_index, width)
        return pool_rows(masses, height, counted.to(masses.device)[row_index]).to(result_dtype(self.q.dtype))

    def _reference_masses(self, problem: Problem, row_index: Tensor, key_index: Tensor, width: int) -> Tensor:
        """``[rows, width]``: the weight of each row on each bin of any keys, by the reference kernel."""
        key_bin = torch.arange(len(key_index), device=key_index.device) * width // max(1, len(key_index))
        masses = self.q.new_zeros(len(row_index), width, dtype=widest_dtype(self.q.device))
        row_step, key_step = tile_shape(problem)
        with full_precision(self.q):
            for i in range(0, len(row_index), row_step):
                weight_rows = _WeightRows(problem, row_index[i : i + row_step])
                for j in range(0, len(key_index), key_step):
                    weights = widest(weight_rows.weights(key_index[j : j + key_step]))
                    masses[i : i + row_step].index_add_(1, key_bin[j : j + key_step], weights)
        return masses

    def select_head(self, batch: int, head: int) -> Problem:
        """One head of one batch entry."""
        group = head * self.k.shape[1] // self.q.shape[1]
        q = self.q[batch : batch + 1, head : head + 1]
        k = self.k[batch : batch + 1, group : group + 1]
        return Problem(q, k, self.scores.select_head(batch, head))

    def _indices(self, rows: Index, keys: Index) -> tuple[Tensor, Tensor]:
        device = self.q.device
        row_index = index_tensor(rows, self.q.shape[2], "rows")
        key_index = index_tensor(keys, self.k.shape[2], "keys")
        return row_index.to(device), key_index.to(device)


class _WeightRows:
    """A few rows of one head, with their maxima and sums over all keys."""

    def __init__(self, problem: Problem, rows: Tensor) -> None:
        m = problem.k.shape[2]
        step = tile_shape(problem)[1]
        # The same grid of tiles as in the forward pass, so that every score is computed in the same way.
        spans = [slice(j, min(j + step, m)) for j in range(0, m, step)]
        self.problem = problem
        self.rows = rows
        self.largest = largest_products(problem, rows, spans)
        self.row_max, self.row_sum = row_max_and_sum(problem, rows, spans, self.largest)

    def weights(self, keys: Tensor) -> Tensor:
        """``A [rows, keys]``."""
        tile = score_tile(self.problem, self.rows, keys, self.largest)
        weights = softmax_tile(tile.logits, self.row_max, self.row_sum)
        if tile.visible is not None:
            weights = torch.where(tile.visible, weights, 0.0)
        return weights[0, 0]


def pool_rows(masses: Tensor, height: int, counted: Tensor) -> Tensor:
    """``[rows, w] → [height, w]``: row bin ⌊i·height/rows⌋, the mean over the rows that count."""
    if not bool(counted.all()):
        masses = torch.where(counted[:, None], masses, 0.0)
    if height == len(masses):
        return masses
    bins = torch.arange(len(masses), device=masses.device) * height // len(masses)
    masses = widest(masses)
    sums = masses.new_zeros(height, masses.shape[1]).index_add_(0, bins, masses)
    rows = masses.new_zeros(height).index_add_(0, bins, counted.to(masses.dtype))
    return sums / rows.clamp(min=1).unsqueeze(-1)


def _select_rows(problem: Problem, rows: slice | None) -> Problem:
    if rows is None:
        return problem
    return Problem(problem.q[:, :, rows], problem.k, problem.scores.select_rows(rows))


def _is_run(indices: Tensor) -> bool:
    """Whether the indices are consecutive."""
    return int(indices[-1]) - int(indices[0]) + 1 == len(indices) and bool((indices.diff() == 1).all())
