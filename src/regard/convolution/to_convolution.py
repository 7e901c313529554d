"""From a head to the convolution that comes nearest to it, and how near that is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from regard.convolution.to_attention import AttentionConvolution
from regard.convolution.whole_layer import convolution_of
from regard.nn import MultiHeadAttention
from regard.observables import Observation
from regard.positions.common import check_kind
from regard.shapes import integer
from regard.watching.places import Where

__all__ = ["HeadConvolution", "to_convolution"]

CELLS = 2**20  # weights in hand at once


@dataclass(frozen=True)
class HeadConvolution:
    """``A_ij ≈ P_ij = p(j − i) / Σ_{j' seen by i} p(j' − i)``: one head as a convolution with the kernel p

    The division matters at borders and under masks, where a row sees a part of the kernel only: rows of P sum to 1 as
    rows of A do. A row that sees none of it is 0.

    - ``kernel``: p(δ), the mean of A_{i, i+δ} over the rows that see as many places of the kernel as any row does: not
      those at a border. ``[2r + 1]`` or ``[2r + 1, 2r + 1]`` (rows down, columns right), δ = −r … r.
    - ``centre``: Σ_δ p(δ) δ / Σ p, an entry an axis;  ``width``: √(Σ_δ p(δ) ‖δ − centre‖² / Σ p).
    - ``fit``: 1 − Σ (A − P)² / Σ A², not below 0; ``uniform`` is the fit of a map that looks at all keys alike, by the
      same kernel's size: a broad head has a large fit that means nothing.
    - ``off``: max_i Σ_j |A_ij − P_ij|, from 0 to 2. Outputs of the head differ by at most ``off · max_j ‖v_j W_O‖`` in
      any norm; ``bound`` is that, where the norms were taken (``regard.watch(…, values=True)``).

    >>> x = torch.zeros(1, 1, 16, 2)  # one head that looks at its neighbours alone, and at all three alike
    >>> _, seen = regard.attention(x, x, x, mask=regard.Window(1), observe=regard.Observe(keep=True))
    >>> found = to_convolution(seen, radius=1)[0]
    >>> found.kernel, round(found.fit, 6)
    (tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64), 1.0)
    """

    head: int
    kernel: Tensor
    centre: tuple[float, ...]
    width: float
    fit: float
    uniform: float
    off: float
    bound: float | None


@overload
def to_convolution(
    observed: Observation, *, radius: int = ..., heads: Sequence[int] | None = ...
) -> list[HeadConvolution]: ...


@overload
def to_convolution(observed: AttentionConvolution | MultiHeadAttention) -> nn.Conv1d | nn.Conv2d: ...


def to_convolution(
    observed: Observation | AttentionConvolution | MultiHeadAttention,
    *,
    radius: int = 2,
    heads: Sequence[int] | None = None,
) -> list[HeadConvolution] | nn.Conv1d | nn.Conv2d:
    """The nearest convolution of each head that was observed, from exact weights: watch with ``Observe(keep=True)``

    On a line, or with ``Observe(grid=(height, width))`` in the plane, where class tokens stand nowhere: their rows do
    not count, and what a patch gives them counts as an error. ``radius`` r makes kernels of 2r + 1 taps an axis.

    A layer with one head a tap, in place of an observation, gives the one convolution that it is: ``convolution_of``.

    >>> import regard
    >>> near = regard.Quadratic(4, 4, heads=1, centers=[[0.0, 1.0]], alpha=30.0)
    >>> q = torch.zeros(1, 1, 16, 2)
    >>> observe = regard.Observe(grid=(4, 4), keep=True)
    >>> _, seen = regard.attention(q, q, q, bias=near, observe=observe)
    >>> found = to_convolution(seen, radius=1)[0]
    >>> [round(x, 2) for x in found.centre], round(found.fit, 2)
    ([0.0, 1.0], 1.0)
    """
    if isinstance(observed, AttentionConvolution | MultiHeadAttention):
        return convolution_of(observed)
    check_kind("observed", observed, Observation)
    return _of_each(observed, integer("radius", radius), heads)


def _of_each(observation: Observation, radius: int, heads: Sequence[int] | None) -> list[HeadConvolution]:
    n, m, grid = observation.n, observation.m, observation.observe.grid
    if n is None or m is None or observation.counted is None or not observation.kept:
        raise ValueError("a head's convolution needs one call's q and k; observe with Observe(keep=True)")
    if grid is not None and n > m:
        raise ValueError(f"there are {n} queries and {m} keys; on a grid every query must stand at a key")
    where = Where(n, m, grid)
    return [_nearest(observation, head, radius, where) for head in (observation.heads if heads is None else heads)]


def _nearest(observation: Observation, head: int, radius: int, where: Where) -> HeadConvolution:
    axes, side = 1 if where.grid is None else 2, 2 * radius + 1
    taps = side**axes
    p, most, rows = torch.zeros(taps + 1, dtype=torch.float64), -1, 0  # the last one lies further
    for A, sees, tap in _rows(observation, head, radius, where):
        many = (sees & (tap < taps)).sum(-1)
        if int(many.max()) > most:
            p, most, rows = torch.zeros_like(p), int(many.max()), 0
        inner = many == most
        p.index_add_(0, tap[inner].flatten(), A[inner].flatten())
        rows += int(inner.sum())
    p /= max(rows, 1)
    p[-1] = 0
    errors = {"A": _Errors(), "uniform": _Errors()}
    for A, sees, tap in _rows(observation, head, radius, where):
        errors["A"].add(A, _stochastic(p[tap] * sees))
        errors["uniform"].add(_stochastic(sees.double()), _stochastic((tap < taps) * sees.double()))
    kernel = p[:-1].view((side,) * axes)
    off = errors["A"].off
    norms = observation.value_norm
    bound = None if norms is None else off * float(norms[:, observation.at(head)].max())
    centre, width = _moments(kernel)
    fits = {name: x.fit for name, x in errors.items()}
    return HeadConvolution(head, kernel, centre, width, fits["A"], fits["uniform"], off, bound)


def _rows(observation: Observation, head: int, radius: int, where: Where) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A few rows at a time: exact weights, which keys are seen, and which tap a pair stands at, ``[r, m]`` each."""
    assert observation.counted is not None
    side = 2 * radius + 1
    query, key = where.coordinates()
    somewhere = torch.ones(where.m, dtype=torch.bool)
    if where.grid is not None:
        somewhere = torch.arange(where.m) >= where.m - where.grid[0] * where.grid[1]
    step = max(1, CELLS // where.m)
    for batch in range(len(observation.counted)):
        counted = observation.counted[batch, observation.at(head)].cpu() & ~where.nowhere()
        for first in range(0, where.n, step):
            rows = torch.arange(first, min(first + step, where.n))
            rows = rows[counted[rows]]
            if not len(rows):
                continue
            A = observation.weights(head, rows, batch=batch).cpu().double()
            sees = observation.sees(head, rows, batch=batch).cpu()
            delta = (key - query[rows].unsqueeze(1)).long() + radius  # [r, m, axes]
            inside = ((delta >= 0) & (delta < side)).all(-1) & somewhere
            tap = delta[..., 0] if where.grid is None else delta[..., 0] * side + delta[..., 1]
            yield A, sees, torch.where(inside, tap, side ** delta.shape[-1])


def _stochastic(x: Tensor) -> Tensor:
    """Rows divided by their sums; rows of 0 stay so."""
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total > 0, total, 1.0)


class _Errors:
    """Σ (A − P)², Σ A² and max_i Σ_j |A − P| over all rows."""

    def __init__(self) -> None:
        self.squared, self.whole, self.off = 0.0, 0.0, 0.0

    def add(self, A: Tensor, P: Tensor) -> None:
        self.squared += float((A - P).square().sum())
        self.whole += float(A.square().sum())
        self.off = max(self.off, float((A - P).abs().sum(-1).max()))

    @property
    def fit(self) -> float:
        return max(0.0, 1 - self.squared / self.whole) if self.whole else 0.0


def _moments(kernel: Tensor) -> tuple[tuple[float, ...], float]:
    """The centre of a kernel and the root of its mean squared distance from there; NaN for a kernel of zeros."""
    radius, total = kernel.shape[0] // 2, float(kernel.sum())
    if total == 0:
        return (float("nan"),) * kernel.ndim, float("nan")
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    marginals = [
        kernel.sum([d for d in range(kernel.ndim) if d != axis]) if kernel.ndim > 1 else kernel
        for axis in range(kernel.ndim)
    ]
    centre = tuple(float(x @ at) / total for x in marginals)
    spread = sum(float(x @ (at - c) ** 2) for x, c in zip(marginals, centre, strict=True)) / total
    return centre, max(spread, 0.0) ** 0.5
