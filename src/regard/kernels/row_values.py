"""What a backward pass does besides the gradients of the output: gradients of row values, and attribution.

    entropy     H_i = lse_i − Σ_j A_ij s_ij − A_sink·sink     ∂H_i/∂s_ij = −A_ij (log A_ij + H_i)
    logit_max   M_i = max_j s_ij                              ∂M_i/∂s_ij = 1 at the row's ``peak_at``, else 0
    attribution c_ij = A_ij (g_i·v_j), g = ∂L/∂out            the first-order effect of each weight on a loss L

Row values are those before dropout; contributions are those of the weights that dropout left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._shapes import aligned
from regard.kernels.score_tiles import Problem, Tile, score_tile, softmax_tile, take_span


@dataclass(frozen=True)
class RowValueGradients:
    """The gradients of a loss by row values, ``[B, H, n]`` each.

    - ``grad_entropy``, ``grad_logit_max``: the gradients; None: the loss does not contain the value.
    - ``entropy``, ``peak_at``: what the forward pass measured. The reference computes both again in its own precision.
    """

    entropy: Tensor
    peak_at: Tensor
    grad_entropy: Tensor | None
    grad_logit_max: Tensor | None

    def native_arguments(self) -> dict[str, Tensor]:
        """The arguments of the compiled backward pass."""
        arguments = {}
        if self.grad_entropy is not None:
            arguments["grad_entropy"] = aligned(self.grad_entropy.float().contiguous())
            arguments["entropy"] = aligned(self.entropy.float().contiguous())
        if self.grad_logit_max is not None:
            arguments["grad_logit_max"] = aligned(self.grad_logit_max.float().contiguous())
            arguments["peak_at"] = aligned(self.peak_at.contiguous())
        return arguments


@dataclass(frozen=True)
class Contributions:
    """Sums of the contributions c_ij of one call.

    - ``keys [B, H, m]``: Σ_i c_ij, per query head also where heads share keys.
    - ``rows [B, H, n]``: Σ_j c_ij = g_i·out_i.
    - ``map [B, H, g, g]``: sums over bins of queries and keys, row bin ⌊i·g/n⌋, key bin ⌊j·g/m⌋. None if g is 0.
    """

    keys: Tensor
    rows: Tensor
    map: Tensor | None


class ContributionSums:
    """The running sums of ``Contributions`` in the tiles of the reference kernel."""

    def __init__(self, problem: Problem, size: int) -> None:
        B, H, n, m = problem.sizes
        self.sizes = (n, m)
        self.size = size
        self.keys = problem.q.new_zeros(B, H, m, dtype=problem.dtype)
        self.rows = problem.q.new_zeros(B, H, n, dtype=problem.dtype)
        self.map = problem.q.new_zeros(B, H, size, size, dtype=problem.dtype)

    def add(self, contributions: Tensor, rows: slice, keys: slice) -> None:
        """Add a tile ``[B, H, rows, keys]``."""
        take_span(self.keys, keys).add_(contributions.sum(2))
        take_span(self.rows, rows).add_(contributions.sum(3))
        if self.size:
            n, m = self.sizes
            device = contributions.device
            row_bins = torch.arange(rows.start, rows.stop, device=device) * self.size // n
            key_bins = torch.arange(keys.start, keys.stop, device=device) * self.size // m
            by_key = contributions.new_zeros(*contributions.shape[:3], self.size)
            self.map.index_add_(2, row_bins, by_key.index_add_(3, key_bins, contributions))

    def result(self, dtype: torch.dtype) -> Contributions:
        """The sums in a dtype."""
        return Contributions(self.keys.to(dtype), self.rows.to(dtype), self.map.to(dtype) if self.size else None)


class RowValueTiles:
    """Entropy and ``peak_at`` of the rows of one tile of queries, and their share of dS; for the reference kernel."""

    def __init__(
        self,
        problem: Problem,
        rows: slice,
        spans: list[slice],
        largest: Tensor | None,
        softmax: tuple[Tensor, Tensor],
        gradients: RowValueGradients,
    ) -> None:
        """``softmax``: row_max and row_sum of the rows, ``[B, H, rows, 1]``."""
        row_max, row_sum = softmax
        self.row_max = row_max
        self.row_sum = row_sum
        # Rows without keys have row_max −inf and row_sum 0; these stand-ins keep their logarithms finite.
        self.shift = torch.where(row_sum == 0, 0.0, row_max) + torch.where(row_sum == 0, 1.0, row_sum).log()
        self.grad_entropy = _rows_of(gradients.grad_entropy, rows, problem)
        self.grad_logit_max = _rows_of(gradients.grad_logit_max, rows, problem)
        self.entropy = torch.zeros_like(row_sum)
        self.peak_at = torch.full_like(row_sum, -1, dtype=torch.int64)
        peak = torch.full_like(row_sum, -math.inf)
        for keys in spans:
            tile = score_tile(problem, rows, keys, largest)
            self.entropy -= self._weighted_logs(tile, softmax_tile(tile.logits, row_max, row_sum)).sum(-1, keepdim=True)
            tile_peak, index = tile.logits.max(-1, keepdim=True)
            # Strictly larger: of equal logits the lowest key wins.
            self.peak_at = torch.where(tile_peak > peak, index + keys.start, self.peak_at)
            peak = torch.maximum(peak, tile_peak)
        # A learned sink is one more outcome of the distribution.
        if problem.scores.sinks is not None:
            log_weight = problem.scores.sinks.to(problem.dtype).view(1, -1, 1, 1) - self.shift
            self.entropy -= weighted_log(log_weight.exp(), log_weight)

    def _weighted_logs(self, tile: Tile, weights: Tensor) -> Tensor:
        """``A log A``, 0 at hidden keys."""
        terms = weighted_log(weights, tile.logits - self.shift)
        return terms if tile.visible is None else torch.where(tile.visible, terms, 0.0)

    def d_logits(self, tile: Tile, weights: Tensor, keys: slice) -> Tensor:
        """What the row values add to dS of one tile."""
        gradient = torch.zeros_like(weights)
        if self.grad_entropy is not None:
            gradient -= self.grad_entropy * (self._weighted_logs(tile, weights) + weights * self.entropy)
        if self.grad_logit_max is not None:
            is_peak = torch.arange(keys.start, keys.stop, device=weights.device) == self.peak_at
            gradient += torch.where(is_peak, self.grad_logit_max, 0.0)
        return gradient


def weighted_log(weights: Tensor, logs: Tensor) -> Tensor:
    """``A log A``, which is 0 where A is 0."""
    return torch.where(weights == 0, 0.0, weights * logs)


def sink_gradient_of_entropy(
    sinks: Tensor, row_max: Tensor, row_sum: Tensor, entropy: Tensor, grad_entropy: Tensor
) -> Tensor:
    """``−Σ_{b,i} h A_sink (log A_sink + H)`` for each head, where h is the gradient of the entropy H."""
    # With a sink row_sum is never 0, because the sink is in it; −inf disables a sink.
    safe_sum = torch.where(row_sum == 0, 1.0, row_sum)
    safe_max = torch.where(row_sum == 0, 0.0, row_max)
    log_weight = sinks.to(row_max.dtype).view(1, -1, 1) - safe_max - safe_sum.log()
    weight = log_weight.exp()
    terms = weighted_log(weight, log_weight) + weight * entropy.to(row_max.dtype)
    return -(grad_entropy.to(row_max.dtype) * terms).sum((0, 2))


def _rows_of(gradient: Tensor | None, rows: slice, problem: Problem) -> Tensor | None:
    """``[B, H, rows, 1]`` in the working dtype."""
    if gradient is None:
        return None
    return take_span(gradient, rows).to(problem.dtype).unsqueeze(-1)
