"""Multi-head attention in which some heads are convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._errors import RegardError
from regard._observables import Observation, Observe
from regard.convolution._head_subset import input_rows, layer_of_heads, output_columns
from regard.convolution._to_convolution import HeadConvolution
from regard.masks import Mask
from regard.nn import MultiHeadAttention


class ConvolvedAttention(nn.Module):
    """Self-attention layer in which some heads are convolutions; it replaces a ``MultiHeadAttention``.

    ``y_i = Σ_{h attention} (A^h V^h)_i W^h + Σ_{h convolved} (Σ_δ p_h(δ) v^h_{i+δ} / Σ_δ p_h(δ)) W^h + b``

    The sums over δ cover the positions that row i sees: inside the sequence or image, and not masked. If a row sees no
    position of a kernel, that head adds 0 to it. A convolved head with K taps costs n·K·D_o, not n²·(D_hid + D_o).

    - ``layer``: the attention layer whose weights are copied.
    - ``convolutions``: the kernels of the heads to convolve, from ``to_convolution``.
    - ``grid``: (height, width) if the rows of x are the cells of an image. Then no mask is accepted. On a sequence the
      mask must let each query see one contiguous run of keys. A cache is not supported.

    Attributes: ``attention`` is a ``MultiHeadAttention`` of the other heads, or None; ``kernel [C, *K]`` holds the
    kernels; ``convolved`` lists the numbers of the convolved heads. All parameters can be trained.

    >>> layer, x = MultiHeadAttention(6, heads=3), torch.randn(1, 16, 6)
    >>> _, observation = layer(x, observe=Observe(keep=True))
    >>> nearest = regard.convolution.to_convolution(observation, radius=2)
    >>> mixed = ConvolvedAttention(layer, nearest[:1])  # head 0, whatever its fit; heads 1 and 2 stay attention
    >>> mixed(x).shape, mixed.kernel.shape, mixed.attention.heads
    (torch.Size([1, 16, 6]), torch.Size([1, 5]), 2)
    """

    def __init__(
        self, layer: MultiHeadAttention, convolutions: Sequence[HeadConvolution], grid: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.convolved = [one.head for one in convolutions]
        _check_convolutions(layer, convolutions, grid)
        self.d_in = layer.d_in
        self.heads = layer.heads
        self.d_value = layer.d_value
        self.grid = grid
        self.mask = layer.mask

        other_heads = [h for h in range(layer.heads) if h not in self.convolved]
        self.attention = layer_of_heads(layer, other_heads) if other_heads else None

        value_heads = [h * layer.kv_heads // layer.heads for h in self.convolved]
        self.v_proj = input_rows(layer.v_proj, value_heads, layer.d_value)
        # The output bias is added once: by the attention heads if there are any.
        self.out_proj = output_columns(layer.out_proj, self.convolved, layer.d_value, bias=self.attention is None)
        self.kernel = nn.Parameter(torch.stack([one.kernel for one in convolutions]).to(layer.v_proj.weight))
        self.train(layer.training)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: object = None,
        scale: float | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observation]:
        """``x [*B, n, D_in] → [*B, n, D_out]``; with ``observe`` also return an observation of the attention heads."""
        for name, value in (("context", context), ("cache", cache), ("scale", scale)):
            if value is not None:
                raise RegardError(f"{name} must be None: convolved heads do not support it; use the original model")
        if x.ndim < 2 or x.shape[-1] != self.d_in:
            raise RegardError(f"x must be [*batch, n, {self.d_in}], got shape {list(x.shape)}")
        if observe is not None and self.attention is None:
            raise RegardError("observe must be None: all heads of this layer are convolutions")

        y: Tensor = self.out_proj(self._convolve(self.v_proj(x), mask))
        if self.attention is None:
            return y
        result = self.attention(x, mask=mask, position_ids=position_ids, observe=observe)
        if isinstance(result, Tensor):
            return result + y
        return result[0] + y, result[1]

    def _convolve(self, v: Tensor, mask: Mask | Tensor | None) -> Tensor:
        """Return the outputs of the convolved heads from their values ``v [*B, n, C·D_o]``, in the same shape."""
        flat = v.reshape(-1, *v.shape[-2:])
        if self.grid is None:
            return self._convolve_sequence(flat, mask, v.shape[:-2]).view_as(v)
        return self._convolve_grid(flat, mask, self.grid).view_as(v)

    def _convolve_grid(self, v: Tensor, mask: Mask | Tensor | None, grid: tuple[int, int]) -> Tensor:
        if mask is not None or self.mask is not None:
            raise RegardError("mask must be None for heads that are convolved on a grid")
        if v.shape[1] != grid[0] * grid[1]:
            raise RegardError(f"x must have one row per cell of the grid, {grid[0]} × {grid[1]}, got {v.shape[1]} rows")
        count = len(self.kernel)
        radius = self.kernel.shape[-1] // 2
        kernel = self.kernel.to(v.dtype).unsqueeze(1)

        # All D_o features of a head use the same kernel: a depthwise convolution.
        pixels = v.mT.unflatten(-1, grid)
        per_feature = kernel.repeat_interleave(self.d_value, 0)
        weighted_sum = F.conv2d(pixels, per_feature, padding=radius, groups=len(per_feature)).unflatten(1, (count, -1))
        # At the border only a part of the kernel lies inside the image; the sum is divided by that part.
        visible_weight = F.conv2d(v.new_ones(1, 1, *grid), kernel, padding=radius)  # [1, C, height, width]
        return _divide_or_zero(weighted_sum, visible_weight.unsqueeze(2)).flatten(1, 2).flatten(2).mT

    def _convolve_sequence(self, v: Tensor, mask: Mask | Tensor | None, batch: torch.Size) -> Tensor:
        n = v.shape[1]
        count = len(self.kernel)
        radius = self.kernel.shape[-1] // 2
        at = torch.arange(n, device=v.device)
        lo, hi = self._visible_runs(mask, n, batch, v.device)
        kernel = self.kernel.to(v.dtype)
        weighted_sum = torch.zeros_like(v).unflatten(-1, (count, -1))
        visible_weight = v.new_zeros(1, 1, count)
        for tap, delta in enumerate(range(-radius, radius + 1)):
            key = at + delta
            visible = ((key >= lo) & (key < hi)).unsqueeze(-1)  # [B or 1, n, 1]
            weight = kernel[:, tap] * visible  # [B or 1, n, C]
            values = v[:, key.clamp(0, max(n - 1, 0))].unflatten(-1, (count, -1))
            # Hidden values are replaced by 0, not multiplied by 0: 0 · NaN would be NaN.
            weighted_sum = weighted_sum + torch.where(visible.unsqueeze(-1), weight.unsqueeze(-1) * values, 0.0)
            visible_weight = visible_weight + weight
        return _divide_or_zero(weighted_sum, visible_weight.unsqueeze(-1))

    def _visible_runs(
        self, mask: Mask | Tensor | None, n: int, batch: torch.Size, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the range of keys that each row sees, lo ≤ j < hi, ``[B or 1, n]`` each."""
        lo = torch.zeros(1, 1, dtype=torch.long, device=device)
        hi = torch.full((1, 1), n, device=device)
        for one in (mask, self.mask):
            if one is None:
                continue
            rows = one.lower(n, n, device) if isinstance(one, Mask) else None
            if rows is None or rows.dense is not None:
                raise RegardError("mask must let each query see one run of keys, as Causal, Window and lengths do")
            if rows.lo is not None:
                lo = torch.maximum(lo, rows.lo.expand(*batch, -1).reshape(-1, rows.lo.shape[-1]))
            if rows.hi is not None:
                hi = torch.minimum(hi, rows.hi.expand(*batch, -1).reshape(-1, rows.hi.shape[-1]))
        return lo, hi

    def extra_repr(self) -> str:
        return f"heads={self.heads}, convolved={self.convolved}, taps={tuple(self.kernel.shape[1:])}, grid={self.grid}"


def _divide_or_zero(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Return the quotient; where the denominator is 0, the result and its gradients are 0."""
    zero = denominator == 0
    return torch.where(zero, 0.0, numerator / torch.where(zero, 1.0, denominator))


def _check_convolutions(
    layer: MultiHeadAttention, convolutions: Sequence[HeadConvolution], grid: tuple[int, int] | None
) -> None:
    heads = [one.head for one in convolutions]
    if not heads or len(set(heads)) < len(heads) or not set(heads) <= set(range(layer.heads)):
        last = layer.heads - 1
        raise RegardError(f"convolutions must be of one or more different heads, 0 … {last}, got heads {heads}")
    axes = 1 if grid is None else 2
    shapes = sorted({tuple(one.kernel.shape) for one in convolutions})
    if len(shapes) > 1 or len(shapes[0]) != axes:
        raise RegardError(f"convolutions must have kernels of one shape with {axes} axes, got {shapes}")
    if layer.d_context != layer.d_in:
        raise RegardError("layer must be self-attention, got cross-attention, which reads its keys from a context")
