"""Find the convolution nearest to each observed head, or the convolution that a whole layer computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import overload

import torch
from torch import Tensor, nn

from regard._checks import check_instance, check_integer
from regard._errors import RegardError
from regard._observables import Observation
from regard.convolution._to_attention import AttentionConvolution
from regard.interp._weight_rows import KeyOffsets
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

WEIGHTS_AT_ONCE = 2**20  # limits the memory on long inputs


@dataclass(frozen=True)
class HeadConvolution:
    """The convolution nearest to one head, with kernel p: ``A_ij ≈ P_ij = p(j − i) / Σ_{j' visible to i} p(j' − i)``.

    The division matters at borders and under masks, where a row sees only a part of the kernel: rows of P sum to 1, as
    rows of A do. If a row sees no tap of the kernel, its P is 0.

    - ``kernel``: p(δ) for δ = −r … r, ``[2r + 1]`` or ``[2r + 1, 2r + 1]`` (rows down, columns right). It is the mean
      of A_{i, i+δ} over the rows that see the most taps, so rows at a border are left out.
    - ``centre``: Σ_δ p(δ) δ / Σ p, one entry per axis.
    - ``width``: √(Σ_δ p(δ) ‖δ − centre‖² / Σ p).
    - ``fit``: 1 − Σ (A − P)² / Σ A², at least 0.
    - ``uniform_fit``: the fit of uniform attention. Compare it with ``fit``, which is large for any broad head.
    - ``row_error``: max_i Σ_j |A_ij − P_ij|, between 0 and 2.
    - ``output_bound``: ``row_error · max_j ‖v_j W_O‖``, a bound on the change of the head's output. None
      unless the value norms were recorded with ``regard.watch(…, values=True)``.

    >>> x = torch.zeros(1, 1, 16, 2)  # one head that attends equally to a token and its two neighbours
    >>> _, observation = regard.attention(x, x, x, mask=regard.Window(1), observe=regard.Observe(keep=True))
    >>> nearest = to_convolution(observation, radius=1)[0]
    >>> nearest.kernel, round(nearest.fit, 6)
    (tensor([0.3333, 0.3333, 0.3333], dtype=torch.float64), 1.0)
    """

    head: int
    kernel: Tensor
    centre: tuple[float, ...]
    width: float
    fit: float
    uniform_fit: float
    row_error: float
    output_bound: float | None


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
    """Find the convolution nearest to each observed head, or the convolution that a layer computes.

    - ``observed``: an observation made with ``Observe(keep=True)``, or a layer with one head per tap. For a layer the
      result is the one convolution that it computes (``convolution_of_layer``).
    - ``radius``: r; kernels have 2r + 1 taps per axis.
    - ``heads``: the numbers of the heads; all by default.

    With ``Observe(grid=(height, width))`` offsets are two-dimensional. Class tokens have no position on the grid: their
    rows are ignored, and the weight that a patch gives them counts as error.

    >>> import regard
    >>> near = regard.Quadratic(4, 4, heads=1, centers=[[0.0, 1.0]], alpha=30.0)
    >>> q = torch.zeros(1, 1, 16, 2)
    >>> observe = regard.Observe(grid=(4, 4), keep=True)
    >>> _, observation = regard.attention(q, q, q, bias=near, observe=observe)
    >>> nearest = to_convolution(observation, radius=1)[0]
    >>> [round(x, 2) for x in nearest.centre], round(nearest.fit, 2)
    ([0.0, 1.0], 1.0)
    """
    if isinstance(observed, AttentionConvolution | MultiHeadAttention):
        return convolution_of_layer(observed)
    check_instance("observed", observed, Observation)
    radius = check_integer("radius", radius)

    n = observed.n
    m = observed.m
    grid = observed.observe.grid
    if n is None or m is None or observed.counted is None or not observed.saved_calls:
        raise RegardError("observed must hold q and k of one call; observe with Observe(keep=True)")
    if grid is not None and n > m:
        raise RegardError(f"observed must have a key for every query on its grid, got {n} queries and {m} keys")
    offsets = KeyOffsets(n, m, grid)
    if heads is None:
        heads = observed.heads
    return [_nearest(observed, head, radius, offsets) for head in heads]


def _nearest(observation: Observation, head: int, radius: int, offsets: KeyOffsets) -> HeadConvolution:
    axes = 1 if offsets.grid is None else 2
    side = 2 * radius + 1
    taps = side**axes

    # First pass: the mean weight at each tap, over the rows that see the most taps. Rows that see fewer are at a
    # border or under a mask. The last entry collects the keys outside the kernel.
    p = torch.zeros(taps + 1, dtype=torch.float64)
    most_visible = -1
    rows = 0
    for A, visible, tap in _weight_rows(observation, head, radius, offsets):
        visible_taps = (visible & (tap < taps)).sum(-1)
        if int(visible_taps.max()) > most_visible:
            p = torch.zeros_like(p)
            most_visible = int(visible_taps.max())
            rows = 0
        inner = visible_taps == most_visible
        p.index_add_(0, tap[inner].flatten(), A[inner].flatten())
        rows += int(inner.sum())
    p /= max(rows, 1)
    p[-1] = 0

    # Second pass: how far the head, and uniform attention, are from their convolutions.
    errors = _Errors()
    uniform_errors = _Errors()
    for A, visible, tap in _weight_rows(observation, head, radius, offsets):
        errors.add(A, _normalize_rows(p[tap] * visible))
        inside = (tap < taps) * visible.double()
        uniform_errors.add(_normalize_rows(visible.double()), _normalize_rows(inside))

    output_bound = None
    if observation.value_norm is not None:
        output_bound = errors.row_error * float(observation.value_norm[:, observation.head_index(head)].max())
    kernel = p[:-1].view((side,) * axes)
    centre, width = _moments(kernel)
    return HeadConvolution(head, kernel, centre, width, errors.fit, uniform_errors.fit, errors.row_error, output_bound)


def _weight_rows(
    observation: Observation, head: int, radius: int, offsets: KeyOffsets
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield a few rows at a time: exact weights, which keys are visible, and the tap of each pair, ``[r, m]`` each."""
    assert observation.counted is not None
    side = 2 * radius + 1
    query, key = offsets.coordinates()
    on_grid = torch.ones(offsets.m, dtype=torch.bool)
    if offsets.grid is not None:
        on_grid = torch.arange(offsets.m) >= offsets.m - offsets.grid[0] * offsets.grid[1]

    step = max(1, WEIGHTS_AT_ONCE // offsets.m)
    for batch in range(len(observation.counted)):
        counted = observation.counted[batch, observation.head_index(head)].cpu() & ~offsets.outside_grid()
        for first in range(0, offsets.n, step):
            rows = torch.arange(first, min(first + step, offsets.n))
            rows = rows[counted[rows]]
            if not len(rows):
                continue
            A = observation.weights(head, rows, batch=batch).cpu().double()
            visible = observation.visible_keys(head, rows, batch=batch).cpu()
            delta = (key - query[rows].unsqueeze(1)).long() + radius  # [r, m, axes]
            inside = ((delta >= 0) & (delta < side)).all(-1) & on_grid
            tap = delta[..., 0]
            if offsets.grid is not None:
                tap = tap * side + delta[..., 1]
            yield A, visible, torch.where(inside, tap, side ** delta.shape[-1])


def _normalize_rows(x: Tensor) -> Tensor:
    """Divide each row by its sum; rows of zeros stay zero."""
    total = x.sum(-1, keepdim=True)
    return x / torch.where(total > 0, total, 1.0)


class _Errors:
    """Σ (A − P)², Σ A² and max_i Σ_j |A − P|, accumulated over rows."""

    def __init__(self) -> None:
        self.squared_error = 0.0
        self.squared_weights = 0.0
        self.row_error = 0.0

    def add(self, A: Tensor, P: Tensor) -> None:
        self.squared_error += float((A - P).square().sum())
        self.squared_weights += float(A.square().sum())
        self.row_error = max(self.row_error, float((A - P).abs().sum(-1).max()))

    @property
    def fit(self) -> float:
        if not self.squared_weights:
            return 0.0
        return max(0.0, 1 - self.squared_error / self.squared_weights)


def _moments(kernel: Tensor) -> tuple[tuple[float, ...], float]:
    """Return the centre and the width (see ``HeadConvolution``) of a kernel; NaN for a kernel of zeros."""
    radius = kernel.shape[0] // 2
    total = float(kernel.sum())
    if total == 0:
        return (float("nan"),) * kernel.ndim, float("nan")
    at = torch.arange(-radius, radius + 1, dtype=torch.float64)
    centre = []
    variance = 0.0
    for axis in range(kernel.ndim):
        marginal = kernel.movedim(axis, 0).flatten(1).sum(-1) if kernel.ndim > 1 else kernel
        mean = float(marginal @ at) / total
        variance += float(marginal @ (at - mean) ** 2)
        centre.append(mean)
    return tuple(centre), max(variance / total, 0.0) ** 0.5


def convolution_of_layer(layer: AttentionConvolution | MultiHeadAttention) -> nn.Conv1d | nn.Conv2d:
    """Return the convolution of a layer with a head per tap: ``W_Δ = W_v^h W_out^h``, ``b = b_out + Σ_h b_v^h W_out^h``

    The weights are copied. For an ``AttentionConvolution`` the result is the convolution it was made from, with its
    present kernel. For a layer whose heads use only a ``Quadratic`` (scale 0), it is the convolution of the limit
    α → ∞, with each head at the cell nearest to its centre. At the border such a head takes the nearest pixel, so the
    convolution has "replicate" padding.

    Raises:
        RegardError: the heads depend on more than positions, or there is not exactly one head at every tap of an evenly
            spaced kernel; the message says what is missing.
    """
    if isinstance(layer, AttentionConvolution):
        return _original_convolution(layer)
    position = layer.position
    if not isinstance(position, Quadratic) or layer.scale != 0 or layer.mask is not None or layer.sinks is not None:
        accepted = "a Quadratic, scale=0, no mask and no sinks"
        raise RegardError(f"the layer must depend on positions alone: {accepted}; for other layers give an Observation")
    rows, columns, heads = _kernel_of_heads(position)
    conv = nn.Conv2d(
        layer.d_in,
        layer.d_out,
        (len(rows), len(columns)),
        padding="same",
        dilation=(_spacing("rows", rows), _spacing("columns", columns)),
        padding_mode="replicate",
        bias=layer.out_proj.bias is not None or layer.v_proj.bias is not None,
    ).to(layer.out_proj.weight)

    # Query heads that share a value head use the same rows of W_v.
    value_heads = [h * layer.kv_heads // layer.heads for h in heads]
    with torch.no_grad():
        v = layer.v_proj.weight.unflatten(0, (-1, layer.d_value))[value_heads]  # [T, D_o, D_in]
        out = layer.out_proj.weight.unflatten(1, (-1, layer.d_value))[:, heads]  # [D_out, T, D_o]
        conv.weight.copy_(torch.einsum("ote,tec->oct", out, v).unflatten(-1, (len(rows), len(columns))))
        if conv.bias is not None:
            conv.bias.zero_()
            if layer.out_proj.bias is not None:
                conv.bias += layer.out_proj.bias
            if layer.v_proj.bias is not None:
                value_bias = layer.v_proj.bias.unflatten(0, (-1, layer.d_value))[value_heads]
                conv.bias += torch.einsum("ote,te->o", out, value_bias)
    return conv


def _original_convolution(layer: AttentionConvolution) -> nn.Conv1d | nn.Conv2d:
    geometry = layer.geometry
    bias = layer.attention.out_proj.bias
    # Only "same" padding of an even kernel is unequal on the two sides.
    padding = geometry.before if geometry.before == geometry.after else "same"
    conv_type: type[nn.Conv1d] | type[nn.Conv2d] = nn.Conv1d if geometry.axes == 1 else nn.Conv2d
    conv = conv_type(
        geometry.channels,
        geometry.out,
        geometry.kernel,  # type: ignore[arg-type]
        stride=geometry.stride,  # type: ignore[arg-type]
        padding=padding,  # type: ignore[arg-type]
        dilation=geometry.dilation,  # type: ignore[arg-type]
        groups=geometry.groups,
        bias=bias is not None,
        padding_mode=geometry.mode,  # type: ignore[arg-type]
    ).to(layer.kernel)
    with torch.no_grad():
        conv.weight.copy_(layer.kernel)
        if bias is not None:
            conv.bias.copy_(bias)  # type: ignore[union-attr]
    return conv


def _kernel_of_heads(position: Quadratic) -> tuple[list[int], list[int], list[int]]:
    """Return the rows and columns of the kernel, and the head of each tap, row by row."""
    if not bool((position.alpha > 0).all()):
        raise RegardError("alpha must be above 0 for every head; a head with alpha ≤ 0 attends to no single offset")
    offsets = [(int(y), int(x)) for y, x in position.centers.detach().round().tolist()]
    rows = sorted({y for y, _ in offsets})
    columns = sorted({x for _, x in offsets})
    taps = list(product(rows, columns))
    if len(offsets) != len(taps) or set(offsets) != set(taps):
        raise RegardError(
            f"a {len(rows)} × {len(columns)} kernel needs one head at each of its {len(taps)} taps, got {len(offsets)} "
            f"heads at {len(set(offsets))} offsets"
        )
    return rows, columns, [offsets.index(tap) for tap in taps]


def _spacing(axis: str, at: list[int]) -> int:
    """Return the distance between adjacent taps of an axis; taps must be evenly spaced and centred on the query."""
    spaces = {b - a for a, b in pairwise(at)} or {1}
    if len(spaces) > 1:
        raise RegardError(f"the offsets of heads must be evenly spaced, as a convolution's taps are, got {axis} {at}")
    if at[0] != -((at[-1] - at[0]) // 2):
        raise RegardError(f"the offsets of heads must be centred on the query, as for padding='same', got {axis} {at}")
    return spaces.pop()
