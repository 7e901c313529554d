"""Multi-head attention some of whose heads are convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.convolution.some_heads import columns_of, layer_of, rows_of
from regard.convolution.to_convolution import HeadConvolution
from regard.masks import Mask
from regard.nn import MultiHeadAttention
from regard.observables import Observation, Observe

__all__ = ["ConvolvedAttention"]


class ConvolvedAttention(nn.Module):
    """``y_i = Σ_{h kept} (A^h V^h)_i W^h + Σ_{h convolved} (Σ_δ p_h(δ) v^h_{i+δ} / Σ_δ p_h(δ)) W^h + b``

    Sums over δ are over the places that row i sees: inside the sequence or the picture, and not masked. A row that sees
    none of a kernel gets 0 from that head. Cost of a convolved head: n·K·D_o for K taps, in place of n²·(D_hid + D_o).

    ``kept`` is a ``MultiHeadAttention`` of the heads that stay (None where none does); ``kernel [C, *K]`` are those of
    the C others, ``convolved`` their numbers. All of it can be trained. It stands where the layer stood, for
    self-attention without a cache: on a line with masks that let a query see one run of keys, on a ``grid`` with none.

    >>> layer, x = MultiHeadAttention(6, heads=3), torch.randn(1, 16, 6)
    >>> _, seen = layer(x, observe=Observe(keep=True))
    >>> found = regard.convolution.to_convolution(seen, radius=2)
    >>> convolved = ConvolvedAttention(layer, found[:1])  # head 0, however well it fits; heads 1 and 2 are kept
    >>> convolved(x).shape, convolved.kernel.shape, convolved.kept.heads
    (torch.Size([1, 16, 6]), torch.Size([1, 5]), 2)
    """

    def __init__(
        self, layer: MultiHeadAttention, found: Sequence[HeadConvolution], grid: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        self.convolved = [one.head for one in found]
        _check_found(layer, found, grid)
        rest = [h for h in range(layer.heads) if h not in self.convolved]
        self.d_in, self.heads, self.d_value, self.grid, self.mask = (
            *(layer.d_in, layer.heads, layer.d_value),
            *(grid, layer.mask),
        )
        self.kept = layer_of(layer, rest) if rest else None
        groups = [h * layer.kv_heads // layer.heads for h in self.convolved]
        self.v_proj = rows_of(layer.v_proj, groups, layer.d_value)
        self.out_proj = columns_of(layer.out_proj, self.convolved, layer.d_value, bias=self.kept is None)
        self.kernel = nn.Parameter(torch.stack([one.kernel for one in found]).to(layer.v_proj.weight))
        self.train(layer.training)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: object = None,
        scale: float | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observation]:
        """``x [*B, n, D_in] → [*B, n, D_out]``; with ``observe`` also an observation of the heads that were kept."""
        if context is not None or cache is not None:
            what = "context" if context is not None else "cache"
            raise ValueError(f"convolved heads take no {what}; use the model as it was before they were replaced")
        if scale is not None:
            raise ValueError("convolved heads have no scale; leave it out")
        if x.ndim < 2 or x.shape[-1] != self.d_in:
            raise ValueError(f"x has shape {list(x.shape)}; this layer takes [*batch, n, {self.d_in}]")
        if observe is not None and self.kept is None:
            raise ValueError("all heads of this layer are convolutions; there is no attention to observe")
        y: Tensor = self.out_proj(self._convolve(self.v_proj(x), mask))
        if self.kept is None:
            return y
        result = self.kept(x, mask=mask, at=at, observe=observe)
        return result + y if isinstance(result, Tensor) else (result[0] + y, result[1])

    def _convolve(self, v: Tensor, mask: Mask | Tensor | None) -> Tensor:
        """``v [*B, n, C·D_o]`` → what the convolved heads give, of the same shape."""
        flat = v.reshape(-1, *v.shape[-2:])
        return (self._on_line(flat, mask, v.shape[:-2]) if self.grid is None else self._on_grid(flat, mask)).view_as(v)

    def _on_grid(self, v: Tensor, mask: Mask | Tensor | None) -> Tensor:
        assert self.grid is not None
        if mask is not None or self.mask is not None:
            raise ValueError("heads that are convolved on a grid take no mask; leave it out")
        if v.shape[1] != self.grid[0] * self.grid[1]:
            raise ValueError(f"x has {v.shape[1]} rows; a grid of {self.grid[0]} × {self.grid[1]} has one a cell")
        many, radius = len(self.kernel), self.kernel.shape[-1] // 2
        kernel = self.kernel.to(v.dtype).unsqueeze(1)
        pixels = v.mT.unflatten(-1, self.grid)
        each = kernel.repeat_interleave(self.d_value, 0)
        summed = F.conv2d(pixels, each, padding=radius, groups=len(each)).unflatten(1, (many, -1))
        seen = F.conv2d(v.new_ones(1, 1, *self.grid), kernel, padding=radius)  # [1, C, height, width]
        return _divided(summed, seen.unsqueeze(2)).flatten(1, 2).flatten(2).mT

    def _on_line(self, v: Tensor, mask: Mask | Tensor | None, batch: torch.Size) -> Tensor:
        n, many, radius = v.shape[1], len(self.kernel), self.kernel.shape[-1] // 2
        at = torch.arange(n, device=v.device)
        lo, hi = self._runs(mask, n, batch, v.device)
        kernel = self.kernel.to(v.dtype)
        summed, seen = torch.zeros_like(v).unflatten(-1, (many, -1)), v.new_zeros(1, 1, many)
        for tap, delta in enumerate(range(-radius, radius + 1)):
            key = at + delta
            sees = ((key >= lo) & (key < hi)).unsqueeze(-1)  # [B or 1, n, 1]
            weight = kernel[:, tap] * sees  # [B or 1, n, C]
            taken = v[:, key.clamp(0, max(n - 1, 0))].unflatten(-1, (many, -1))
            # 0 · NaN is never formed: a hidden value is left out, not weighed with 0.
            summed = summed + torch.where(sees.unsqueeze(-1), weight.unsqueeze(-1) * taken, 0.0)
            seen = seen + weight
        return _divided(summed, seen.unsqueeze(-1))

    def _runs(
        self, mask: Mask | Tensor | None, n: int, batch: torch.Size, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The run of keys that each row sees, ``[B or 1, n]`` each."""
        ends = torch.zeros(1, 1, dtype=torch.long, device=device), torch.full((1, 1), n, device=device)
        for one in (mask, self.mask):
            if one is None:
                continue
            rows = one.lower(n, n, device) if isinstance(one, Mask) else None
            if rows is None or rows.dense is not None:
                raise ValueError("convolved heads take masks of one run of keys a query: Causal, Window, lengths")
            lo, hi = (None if x is None else x.expand(*batch, -1).reshape(-1, x.shape[-1]) for x in (rows.lo, rows.hi))
            ends = (
                ends[0] if lo is None else torch.maximum(ends[0], lo),
                ends[1] if hi is None else torch.minimum(ends[1], hi),
            )
        return ends

    def extra_repr(self) -> str:
        return f"heads={self.heads}, convolved={self.convolved}, taps={tuple(self.kernel.shape[1:])}, grid={self.grid}"


def _divided(summed: Tensor, seen: Tensor) -> Tensor:
    return torch.where(seen == 0, 0.0, summed / torch.where(seen == 0, 1.0, seen))


def _check_found(layer: MultiHeadAttention, found: Sequence[HeadConvolution], grid: tuple[int, int] | None) -> None:
    numbers = [one.head for one in found]
    if not found or len(set(numbers)) < len(numbers) or not set(numbers) <= set(range(layer.heads)):
        raise ValueError(f"heads {numbers} are to be replaced; give one or more, different, of 0 … {layer.heads - 1}")
    axes = 1 if grid is None else 2
    if any(one.kernel.ndim != axes or one.kernel.shape != found[0].kernel.shape for one in found):
        shapes = sorted({tuple(one.kernel.shape) for one in found})
        raise ValueError(
            f"kernels have shapes {shapes}; all must have the same, of as many axes as places have: {axes}"
        )
    if layer.d_context != layer.d_in:
        raise ValueError("this layer reads keys from a context; convolved heads look around in x alone")
