"""From a convolution to attention with the same outputs: one head a tap, each looking at one offset."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from regard.convolution.geometry import Geometry, places
from regard.nn import MultiHeadAttention
from regard.observables import Observe
from regard.shapes import number

__all__ = ["AttentionConvolution", "leak", "to_attention"]

EXACT = {torch.float32: 2**24, torch.float64: 2**53}  # whole numbers up to here are all there


def to_attention(conv: nn.Conv1d | nn.Conv2d, *, alpha: float = math.inf, direct: bool = True) -> AttentionConvolution:
    """The attention layer that computes what a convolution does, with copies of its weights.

    - ``alpha=inf``: each head takes the value at its offset alone; outputs are those of the convolution up to the order
      of summation. A finite α > 0 is the quadratic encoding, softmax(−α‖δ − Δ_h‖²), as far off as ``error_bound`` says.
    - ``direct``: only the queries that a stride keeps are asked; False asks at every place and subsamples after, which
      gives the same and costs more.

    Kernels of any size, strides, dilations, all padding modes, "same", groups and biases are taken; transposed, lazy
    and 3-D convolutions are refused.

    >>> conv = nn.Conv2d(3, 8, kernel_size=3, padding=1)
    >>> layer = to_attention(conv)
    >>> layer.attention.heads, layer.shifts[0], layer.shifts[4]
    (9, (-1, -1), (0, 0))
    >>> x = torch.randn(1, 3, 5, 5)
    >>> torch.allclose(layer(x), conv(x), atol=1e-5)
    True
    """
    return AttentionConvolution(conv, alpha=alpha, direct=direct)


def leak(alpha: float, axes: int) -> float:
    """``ε = 1 − θ(α)^{−p},  θ(α) = Σ_{k ∈ ℤ} e^{−αk²}``: the most weight that a head puts beside its offset

    Keys stand at different whole places, one of them at the offset, so that the softmax's sum is at most θ(α)^p. For
    large α, ε ≈ 2p·e^{−α}.

    >>> [round(leak(alpha, axes=2), 4) for alpha in (2.0, 4.0, 8.0)]
    [0.3813, 0.0694, 0.0013]
    """
    if alpha == math.inf:
        return 0.0
    rest = 2 * math.fsum(math.exp(-alpha * k * k) for k in range(1, 2 + math.isqrt(int(745 / alpha) + 1)))  # θ − 1
    return -math.expm1(-axes * math.log1p(rest))


class AttentionConvolution(nn.Module):
    """``y_i = Σ_h Σ_j A^h_ij z_j W_h + b``,  ``A^h_ij = softmax_j(−α‖x_j − (s·i + Δ_h)‖²)``: x ``[*B, C, *size]``

    One head h a tap, at the offset Δ_h (``shifts``), W_h = W_v^h W_out^h the kernel's entry there. Positions go into
    queries and keys, which is a product of width D_p = 1 + p (3 in the plane) and differs from the above by what is the
    same for all keys:

        q̃_h = (1, 2(x_q + Δ_h)) from the query (1, x_q)      k̃ = (−‖x_k‖², x_k) from the key (z_k, x_k, ‖x_k‖²)

    All heads share one key head and one value head, v = z. What is learned is the kernel, in the convolution's own
    shape (so that groups stay groups), and the bias. float32 or float64: positions must be exact.

    >>> layer = to_attention(nn.Conv1d(2, 3, kernel_size=3, padding=1), alpha=4.0)
    >>> layer.shifts, layer.kernel.shape, layer(torch.randn(1, 2, 7)).shape
    ([(-1,), (0,), (1,)], torch.Size([3, 2, 3]), torch.Size([1, 3, 7]))
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, *, alpha: float = math.inf, direct: bool = True) -> None:
        super().__init__()
        self.geometry = Geometry.of(conv)
        self.alpha, self.direct = number("alpha", alpha, least=0.0), direct
        if self.alpha == 0:
            raise ValueError("alpha is 0, with which every head averages; give a number above 0, or inf")
        _check_dtype(conv.weight.dtype)
        p, channels, shifts = self.geometry.axes, self.geometry.channels, self.shifts
        self.attention = MultiHeadAttention(
            1 + p,
            len(shifts),
            d_key=1 + p,
            d_value=channels,
            d_out=self.geometry.out,
            d_context=channels + p + 1,
            kv_heads=1,
            out_bias=conv.bias is not None,
            scale=self.alpha,
        ).to(conv.weight)
        self._fix_positions()
        parametrize.register_parametrization(self.attention.out_proj, "weight", _Taps(self.geometry), unsafe=True)
        with torch.no_grad():
            self.kernel.copy_(conv.weight)
            if conv.bias is not None:
                self.attention.out_proj.bias.copy_(conv.bias)

    def _fix_positions(self) -> None:
        """q̃, k̃ and v as linear maps of what queries and keys hold; they are not learned."""
        p, c = self.geometry.axes, self.geometry.channels
        layer, eye = self.attention, torch.eye(self.geometry.axes)
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
                projection.weight.zero_().requires_grad_(False)
            q = layer.q_proj.weight.view(layer.heads, 1 + p, 1 + p)
            q[:, 0, 0] = 1
            q[:, 1:, 0] = 2 * torch.tensor(self.shifts, dtype=q.dtype)
            q[:, 1:, 1:] = 2 * eye
            layer.k_proj.weight[0, c + p] = -1
            layer.k_proj.weight[1:, c : c + p] = eye
            layer.v_proj.weight[:, :c] = torch.eye(c)

    @property
    def shifts(self) -> list[tuple[int, ...]]:
        """Δ_h = key − query of each head, rows down and columns right."""
        return self.geometry.shifts

    @property
    def kernel(self) -> Tensor:
        """What is learned, as the convolution has it: ``[out, C/groups, *K]``."""
        kernel: Tensor = self.attention.out_proj.parametrizations.weight.original  # type: ignore[assignment, union-attr]
        return kernel

    def forward(self, x: Tensor) -> Tensor:
        """``x [B, C, *size]`` or ``[C, *size]`` → what the convolution gives."""
        asked, queries, keys = self._tokens(x)
        found = self.attention(queries, keys)
        y = found.mT.unflatten(-1, [len(axis) for axis in asked])
        if not self.direct:
            y = y[(..., *(slice(None, None, s) for s in self.geometry.stride))]
        return y if x.ndim == self.geometry.axes + 2 else y.squeeze(0)

    def error_bound(self, x: Tensor) -> Tensor:
        """``ε Σ_{h,c} |W_h,c| (max_k z_kc − min_k z_kc)``: the most that finite α can change an output, ``[*B, out]``

        What lies beside the offset weighs ε at most (``leak``), and swaps a padded pixel of a channel for another.

        >>> conv, x = nn.Conv1d(2, 3, kernel_size=3, padding=1), torch.randn(1, 2, 7)
        >>> layer = to_attention(conv, alpha=4.0)
        >>> bool(((layer(x) - conv(x)).abs().amax(-1) <= layer.error_bound(x)).all())
        True
        """
        self._check(x)
        pixels = self.geometry.padded(x).flatten(-self.geometry.axes)
        weight = self.kernel.detach().abs().flatten(2).sum(-1).unflatten(0, (self.geometry.groups, -1))  # [g, o, c]
        spread = (pixels.amax(-1) - pixels.amin(-1)).unflatten(-1, (self.geometry.groups, -1))  # [*B, g, c]
        return leak(self.alpha, self.geometry.axes) * (weight @ spread.unsqueeze(-1)).squeeze(-1).flatten(-2)

    @torch.no_grad()
    def looks(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Measured on x: how far from its query each head's largest weight lies ``[H, p]``, and that weight ``[H]``

        Means over all queries. Where the conversion is right the first are ``shifts``, and the second 1 for hard heads.

        >>> at, weight = to_attention(nn.Conv1d(2, 3, kernel_size=3, padding=1)).looks(torch.randn(1, 2, 7))
        >>> at.squeeze(-1).tolist(), weight.tolist()
        ([-1.0, 0.0, 1.0], [1.0, 1.0, 1.0])
        """
        _, queries, keys = self._tokens(x)
        _, seen = self.attention(queries, keys, observe=Observe())
        where = keys[0, :, self.geometry.channels : -1]  # [m, p]
        apart = where[seen.peak_at] - queries[0, :, 1:]  # [B, H, n, p]
        return apart.double().mean((0, 2)), seen.peak.double().mean((0, 2))

    def _tokens(self, x: Tensor) -> tuple[list[range], Tensor, Tensor]:
        """The places that are asked for, an axis each; what queries ``[1, n, 1 + p]`` and keys ``[B, m, …]`` hold."""
        self._check(x)
        size = tuple(x.shape[-self.geometry.axes :])
        asked = self.geometry.answered(size, dense=not self.direct)
        batched = x if x.ndim == self.geometry.axes + 2 else x.unsqueeze(0)
        return asked, self._queries(asked, size, x), self._keys(batched, size)

    def _middle(self, size: tuple[int, ...], x: Tensor) -> Tensor:
        """Places count from the middle: their squares stay small, and so exact."""
        return torch.tensor([n // 2 for n in size], dtype=x.dtype, device=x.device)

    def _queries(self, asked: list[range], size: tuple[int, ...], x: Tensor) -> Tensor:
        at = places(asked, like=x) - self._middle(size, x)
        return torch.cat([torch.ones_like(at[:, :1]), at], -1).unsqueeze(0)

    def _keys(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        each = zip(size, self.geometry.before, self.geometry.after, strict=True)
        at = places([range(-b, n + a) for n, b, a in each], like=x) - self._middle(size, x)
        squares = (at * at).sum(-1, keepdim=True)
        if float(squares.max()) * 4 > EXACT[x.dtype]:
            raise ValueError(
                f"an input of {' × '.join(map(str, size))} has places whose squares {x.dtype} cannot tell apart; use "
                "float64"
            )
        pixels = self.geometry.padded(x).flatten(2).mT
        where = torch.cat([at, squares], -1).expand(len(x), -1, -1)
        return torch.cat([pixels, where], -1)

    def _check(self, x: Tensor) -> None:
        p, c = self.geometry.axes, self.geometry.channels
        if x.ndim not in (p + 1, p + 2) or x.shape[-p - 1] != c:
            size = "L" if p == 1 else "H, W"
            raise ValueError(f"x has shape {list(x.shape)}; it must be [B, {c}, {size}] or [{c}, {size}]")
        _check_dtype(x.dtype)

    def extra_repr(self) -> str:
        return f"kernel={self.geometry.kernel}, stride={self.geometry.stride}, alpha={self.alpha}, direct={self.direct}"


class _Taps(nn.Module):
    """The kernel ``[out, C/groups, *K]`` as the matrix of the output projection ``[out, heads·C]``."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.groups, self.channels, self.kernel = geometry.groups, geometry.channels, geometry.kernel

    def forward(self, kernel: Tensor) -> Tensor:
        taps = kernel.flatten(2).mT.unflatten(0, (self.groups, -1))  # [g, out/g, T, C/g]
        own = torch.eye(self.groups, dtype=kernel.dtype, device=kernel.device)
        return torch.einsum("gotc,gk->gotkc", taps, own).flatten(0, 1).flatten(1)

    def right_inverse(self, dense: Tensor) -> Tensor:
        """What a dense matrix says of the entries that the kernel has."""
        each = dense.unflatten(0, (self.groups, -1)).unflatten(-1, (-1, self.groups, self.channels // self.groups))
        own = each.diagonal(dim1=0, dim2=3)  # [out/g, T, C/g, g]
        return own.permute(3, 0, 2, 1).flatten(0, 1).unflatten(-1, self.kernel)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in EXACT:
        raise TypeError(f"{dtype} cannot hold positions exactly; convert to float32 or float64")
