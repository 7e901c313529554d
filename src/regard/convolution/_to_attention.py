"""Convert a convolution to an attention layer with the same outputs: one head per tap, each attends to one offset."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from regard._checks import check_number
from regard._devices import widest
from regard._errors import RegardError, RegardTypeError
from regard._observables import Observe
from regard.convolution._geometry import Geometry, grid_positions
from regard.nn import MultiHeadAttention

# The dtype represents every integer up to this one exactly. Positions and their squares must be exact.
LARGEST_EXACT = {torch.float32: 2**24, torch.float64: 2**53}


def to_attention(conv: nn.Conv1d | nn.Conv2d, *, alpha: float = math.inf, direct: bool = True) -> AttentionConvolution:
    """Return an attention layer with the same outputs as a convolution; it has copies of the weights.

    - ``conv``: any kernel size, stride, dilation, padding mode, "same" padding, groups and bias. Transposed, lazy and
      3-D convolutions are refused.
    - ``alpha``: with inf (the default) each head attends only to the key at its offset, and the outputs equal those of
      the convolution up to rounding. A finite α > 0 gives softmax(−α‖δ − Δ_h‖²), with an error ≤ ``error_bound``.
    - ``direct``: True computes only the queries that a stride keeps. False computes every query and subsamples the
      outputs; the result is the same and costs more.

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
    """Return the largest total weight of a head outside its offset: ``ε = 1 − θ(α)^{−p},  θ(α) = Σ_{k ∈ ℤ} e^{−αk²}``.

    Keys have distinct integer positions and one of them is at the offset, so the sum of the softmax is at most
    θ(α)^p. For large α, ε ≈ 2p·e^{−α}.

    - ``alpha``: the sharpness of the quadratic encoding; inf gives 0.
    - ``axes``: p, 1 for a sequence and 2 for an image.

    >>> [round(leak(alpha, axes=2), 4) for alpha in (2.0, 4.0, 8.0)]
    [0.3813, 0.0694, 0.0013]
    """
    if alpha == math.inf:
        return 0.0
    # Poisson's summation formula, θ(α) = √(π/α) θ(π²/α), turns the long sum of a small alpha into a short one.
    log_factor = 0.0
    rate = alpha
    if alpha < math.pi:
        log_factor = (math.log(math.pi) - math.log(alpha)) / 2
        rate = math.pi**2 / alpha
    # e^{-745} is the smallest positive double, so later terms of the sum are 0. The rate is at least π.
    last = 1 + math.isqrt(int(745 / rate) + 1)
    theta_minus_one = 2 * math.fsum(math.exp(-rate * k * k) for k in range(1, last + 1))
    return -math.expm1(-axes * (log_factor + math.log1p(theta_minus_one)))


class AttentionConvolution(nn.Module):
    """A convolution as attention: ``y_i = Σ_h Σ_j A^h_ij z_j W_h + b``, ``A^h_ij = softmax_j(−α‖x_j − (s·i + Δ_h)‖²)``

    There is one head h per tap. It attends to the offset Δ_h (see ``shifts``), and W_h = W_v^h W_out^h is the kernel's
    entry there. Positions are put into the queries and keys:

        q̃_h = (1, 2(x_q + Δ_h)) from the query (1, x_q)      k̃ = (−‖x_k‖², x_k) from the key (z_k, x_k, ‖x_k‖²)

    q̃_h·k̃ differs from −‖x_k − (x_q + Δ_h)‖² by a constant per query, which softmax ignores. Both vectors have the width
    1 + p, which is 3 for images. All heads share one key head and one value head, v = z.

    The parameters are the kernel, in the convolution's own shape (so groups stay groups), and the bias. The dtype must
    be float32 or float64, because positions must be exact.

    >>> layer = to_attention(nn.Conv1d(2, 3, kernel_size=3, padding=1), alpha=4.0)
    >>> layer.shifts, layer.kernel.shape, layer(torch.randn(1, 2, 7)).shape
    ([(-1,), (0,), (1,)], torch.Size([3, 2, 3]), torch.Size([1, 3, 7]))
    """

    def __init__(self, conv: nn.Conv1d | nn.Conv2d, *, alpha: float = math.inf, direct: bool = True) -> None:
        super().__init__()
        self.geometry = Geometry.of(conv)
        self.alpha = check_number("alpha", alpha, least=0.0)
        self.direct = direct
        if self.alpha == 0:
            raise RegardError("alpha must be above 0 or inf, got 0: every head would average over all keys")
        _check_dtype(conv.weight.dtype)

        p = self.geometry.axes
        channels = self.geometry.channels
        self.attention = MultiHeadAttention(
            1 + p,
            len(self.shifts),
            d_key=1 + p,
            d_value=channels,
            d_out=self.geometry.out,
            d_context=channels + p + 1,
            kv_heads=1,
            out_bias=conv.bias is not None,
            scale=self.alpha,
        ).to(conv.weight)
        self._fix_projections()

        # The output projection is a function of the kernel, so that the optimizer sees the convolution's parameters.
        parametrize.register_parametrization(
            self.attention.out_proj, "weight", _KernelAsMatrix(self.geometry), unsafe=True
        )
        with torch.no_grad():
            self.kernel.copy_(conv.weight)
            if conv.bias is not None:
                self.attention.out_proj.bias.copy_(conv.bias)

    def _fix_projections(self) -> None:
        """Set the projections that compute q̃, k̃ and v. They encode positions and are not learned."""
        p = self.geometry.axes
        channels = self.geometry.channels
        layer = self.attention
        identity = torch.eye(p)
        with torch.no_grad():
            for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
                projection.weight.zero_().requires_grad_(False)
            q = layer.q_proj.weight.view(layer.heads, 1 + p, 1 + p)
            q[:, 0, 0] = 1
            q[:, 1:, 0] = 2 * torch.tensor(self.shifts, dtype=q.dtype)
            q[:, 1:, 1:] = 2 * identity
            layer.k_proj.weight[0, channels + p] = -1
            layer.k_proj.weight[1:, channels : channels + p] = identity
            layer.v_proj.weight[:, :channels] = torch.eye(channels)

    @property
    def shifts(self) -> list[tuple[int, ...]]:
        """The offset Δ_h = key − query of each head: rows down, columns right."""
        return self.geometry.shifts

    @property
    def kernel(self) -> Tensor:
        """The learned kernel in the convolution's shape, ``[out, C/groups, *K]``."""
        kernel: Tensor = self.attention.out_proj.parametrizations.weight.original  # type: ignore[assignment, union-attr]
        return kernel

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the convolution for ``x [B, C, *size]`` or ``[C, *size]``."""
        positions, queries, keys = self._tokens(x)
        y = self.attention(queries, keys).mT.unflatten(-1, [len(axis) for axis in positions])
        if not self.direct:
            y = y[(..., *(slice(None, None, stride) for stride in self.geometry.stride))]
        if x.ndim == self.geometry.axes + 1:
            y = y.squeeze(0)
        return y

    def error_bound(self, x: Tensor) -> Tensor:
        """``ε Σ_{h,c} |W_h,c| (max_k z_kc − min_k z_kc)``: the error bound of a finite α, ``[*B, out]``.

        An output differs from the convolution by at most this much. Keys outside the offset have at most the total
        weight ε (``leak``), and each replaces a pixel of a channel by another pixel of the same channel.

        >>> conv, x = nn.Conv1d(2, 3, kernel_size=3, padding=1), torch.randn(1, 2, 7)
        >>> layer = to_attention(conv, alpha=4.0)
        >>> bool(((layer(x) - conv(x)).abs().amax(-1) <= layer.error_bound(x)).all())
        True
        """
        self._check_input(x)
        pixels = self.geometry.pad(x).flatten(-self.geometry.axes)
        weight = self.kernel.detach().abs().flatten(2).sum(-1).unflatten(0, (self.geometry.groups, -1))  # [g, o, c]
        spread = (pixels.amax(-1) - pixels.amin(-1)).unflatten(-1, (self.geometry.groups, -1))  # [*B, g, c]
        return leak(self.alpha, self.geometry.axes) * (weight @ spread.unsqueeze(-1)).squeeze(-1).flatten(-2)

    @torch.no_grad()
    def measured_offsets(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the offset of each head's largest weight on ``x``, ``[H, p]``, and that weight, ``[H]``.

        Both are means over all queries. The offsets should equal ``shifts``. With α = inf the weights should be 1.

        >>> layer = to_attention(nn.Conv1d(2, 3, kernel_size=3, padding=1))
        >>> offsets, weights = layer.measured_offsets(torch.randn(1, 2, 7))
        >>> offsets.squeeze(-1).tolist(), weights.tolist()
        ([-1.0, 0.0, 1.0], [1.0, 1.0, 1.0])
        """
        _, queries, keys = self._tokens(x)
        _, observation = self.attention(queries, keys, observe=Observe())
        key_positions = keys[0, :, self.geometry.channels : -1]  # [m, p]
        offsets = key_positions[observation.peak_at] - queries[0, :, 1:]  # [B, H, n, p]
        return widest(offsets).mean((0, 2)), widest(observation.peak).mean((0, 2))

    def _tokens(self, x: Tensor) -> tuple[list[range], Tensor, Tensor]:
        """Return output positions per axis, query inputs ``[1, n, 1 + p]`` and key inputs ``[B, m, C + p + 1]``."""
        self._check_input(x)
        size = tuple(x.shape[-self.geometry.axes :])
        positions = self.geometry.output_positions(size, dense=not self.direct)
        batched = x
        if x.ndim == self.geometry.axes + 1:
            batched = x.unsqueeze(0)
        at = grid_positions(positions, like=x) - self._origin(size, x)
        queries = torch.cat([torch.ones_like(at[:, :1]), at], -1).unsqueeze(0)
        return positions, queries, self._key_inputs(batched, size)

    def _origin(self, size: tuple[int, ...], x: Tensor) -> Tensor:
        """Return the middle of the input. Positions count from there, so that their squares stay small and exact."""
        return torch.tensor([n // 2 for n in size], dtype=x.dtype, device=x.device)

    def _key_inputs(self, x: Tensor, size: tuple[int, ...]) -> Tensor:
        padded = []
        for n, before, after in zip(size, self.geometry.before, self.geometry.after, strict=True):
            padded.append(range(-before, n + after))
        at = grid_positions(padded, like=x) - self._origin(size, x)
        squares = (at * at).sum(-1, keepdim=True)

        # The products are of the order of 4 · squares; beyond the exact range two positions could become equal.
        if float(squares.max()) * 4 > LARGEST_EXACT[x.dtype]:
            shown = " × ".join(map(str, size))
            raise RegardError(f"x must be small enough for exact positions in {x.dtype}, got {shown}; use float64")
        pixels = self.geometry.pad(x).flatten(2).mT
        position_features = torch.cat([at, squares], -1).expand(len(x), -1, -1)
        return torch.cat([pixels, position_features], -1)

    def _check_input(self, x: Tensor) -> None:
        p = self.geometry.axes
        channels = self.geometry.channels
        if x.ndim not in (p + 1, p + 2) or x.shape[-p - 1] != channels:
            size = "L" if p == 1 else "H, W"
            raise RegardError(f"x must be [B, {channels}, {size}] or [{channels}, {size}], got shape {list(x.shape)}")
        _check_dtype(x.dtype)

    def extra_repr(self) -> str:
        return f"kernel={self.geometry.kernel}, stride={self.geometry.stride}, alpha={self.alpha}, direct={self.direct}"


class _KernelAsMatrix(nn.Module):
    """Convert the kernel ``[out, C/groups, *K]`` to the matrix of the output projection, ``[out, heads·C]``."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.groups = geometry.groups
        self.channels = geometry.channels
        self.kernel = geometry.kernel

    def forward(self, kernel: Tensor) -> Tensor:
        taps = kernel.flatten(2).mT.unflatten(0, (self.groups, -1))  # [g, out/g, T, C/g]
        same_group = torch.eye(self.groups, dtype=kernel.dtype, device=kernel.device)
        return torch.einsum("gotc,gk->gotkc", taps, same_group).flatten(0, 1).flatten(1)

    def right_inverse(self, dense: Tensor) -> Tensor:
        """Return the entries of a dense matrix that belong to the kernel."""
        blocks = dense.unflatten(0, (self.groups, -1)).unflatten(-1, (-1, self.groups, self.channels // self.groups))
        same_group = blocks.diagonal(dim1=0, dim2=3)  # [out/g, T, C/g, g]
        return same_group.permute(3, 0, 2, 1).flatten(0, 1).unflatten(-1, self.kernel)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in LARGEST_EXACT:
        raise RegardTypeError(f"dtype must be float32 or float64, which hold positions exactly, got {dtype}")
