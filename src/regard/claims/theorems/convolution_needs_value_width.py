"""K² heads are any K × K convolution, if values are wide enough."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.convolution import to_convolution
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

Factors = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def best(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """``W_v [D_in, D_o]`` and ``W_out [D_o, D_out]`` whose product is nearest to a matrix: by SVD (Eckart, Young)."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    return u[..., :width] * s[..., None, :width], v[..., :width, :]


def layer_of(taps: Tensor, width: int, side: int, factors: Factors) -> MultiHeadAttention:
    """Hard heads at all offsets of a kernel, ``taps [K², D_in, D_out]``, with values of one width."""
    many, d_in, d_out = taps.shape
    r = round(many**0.5) // 2
    centers = [[float(y), float(x)] for y in range(-r, r + 1) for x in range(-r, r + 1)]
    near = Quadratic(side, side, many, centers=centers, alpha=1e4)
    layer = MultiHeadAttention(
        d_in, many, d_key=1, d_value=width, d_out=d_out, out_bias=False, scale=0.0, position=near
    ).double()
    value, out = factors(taps, width)
    with torch.no_grad():
        layer.v_proj.weight.copy_(value.mT.flatten(0, 1))
        layer.out_proj.weight.copy_(out.flatten(0, 1).mT)
    return layer


def random_factors(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best W_out for a W_v that keeps the first entries of the input."""
    keep = torch.eye(matrix.shape[-2], dtype=matrix.dtype)[:, :width].expand(len(matrix), -1, -1)
    return keep, matrix[:, :width]


def check(
    *, side: int = 6, d: int = 18, kernel: int = 3, low: int = 4, seed: int = 0, factors: Factors = best
) -> Evidence:
    """Layers of K² heads with the best factors, beside a convolution of full rank and one of rank ``low``."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    many, narrow = kernel**2, d // kernel**2
    x = torch.randn(1, side * side, d, generator=draw, dtype=torch.float64)
    a, b = (torch.randn(many, *s, generator=draw, dtype=torch.float64) for s in ((d, low), (low, d)))
    kernels = {"full rank": torch.randn(many, d, d, generator=draw, dtype=torch.float64), f"rank {low}": a @ b}
    widths = sorted({1, narrow, low - 1, low, d // 2, d - 1, d})
    errors = {name: [missed(taps, w, side, x, factors) for w in widths] for name, taps in kernels.items()}
    at = {name: dict(zip(widths, each, strict=True)) for name, each in errors.items()}
    bound = tail(kernels["full rank"], narrow)
    reached = at["full rank"][narrow][1]
    found.written(
        f"{many} heads of D_o = D/K² = {narrow} are any {kernel} × {kernel} convolution",
        at["full rank"][narrow][0] < 1e-9,
        f"at D_o = {narrow} the best layer misses {at['full rank'][narrow][0]:.0%} of a random convolution",
    )
    for name, rank in (("full rank", d), (f"rank {low}", low)):
        ok = all((error[0] < 1e-12) == (w >= rank) for w, error in at[name].items())
        found.condition(
            f"{name}: exact where D_o ≥ rank W_Δ, and only there",
            ok,
            f"of rank {rank}: error {at[name][rank][0]:.1e} at D_o = {rank}, {at[name][rank - 1][0]:.2g} at {rank - 1}",
        )
    found.condition(
        "below, kernels are as near as singular values allow, and no nearer",
        abs(reached - bound) < 1e-9,
        f"kernel missed {reached:.4f}, singular values left out {bound:.4f}",
    )
    other = missed(kernels["full rank"], narrow, side, x, random_factors)[1]
    found.control("other factors come as near", other <= bound + 1e-9, f"{other:.4f} against {bound:.4f}")
    lines = {name: (widths, [max(e[0], 1e-16) for e in each]) for name, each in errors.items()}
    found.draw("share of the convolution that the best layer misses", lines, x="D_o", y="error", log="y")
    found.numbers |= {
        "D_o": [float(w) for w in widths],
        **{f"missed, {name}": [e[0] for e in each] for name, each in errors.items()},
    }
    return found


def missed(taps: Tensor, width: int, side: int, x: Tensor, factors: Factors) -> tuple[float, float]:
    """What a layer of that width misses: of outputs, and of the kernel that ``to_convolution`` reads from it."""
    many, d_in, d_out = taps.shape
    size = round(many**0.5)
    layer = layer_of(taps, width, side, factors)
    conv = nn.Conv2d(d_in, d_out, size, padding="same", padding_mode="replicate", bias=False).double()
    with torch.no_grad():
        conv.weight.copy_(taps.permute(2, 1, 0).unflatten(-1, (size, size)))
        wanted = conv(x.mT.unflatten(-1, (side, side))).flatten(2).mT
        off = float((layer(x) - wanted).norm() / wanted.norm())
        kernel = float((to_convolution(layer).weight - conv.weight).norm() / conv.weight.norm())
    return off, kernel


def tail(taps: Tensor, width: int) -> float:
    """``√(Σ_{Δ, r > D_o} σ_r(W_Δ)² / Σ σ²)``: the least that any factors of that width miss."""
    s = torch.linalg.svdvals(taps).square()
    return float((s[:, width:].sum() / s.sum()).sqrt())


CLAIM = Claim(
    id="convolution-needs-value-width",
    sources=("000",),
    statement="Multi-head attention with K² heads can express any K × K convolution.",
    formula=r"W_\Delta = W_v^{(h)} W_{out}^{(h)}, \qquad \operatorname{rank} W_\Delta \le D_o",
    refuted="A convolution that the best layer of K² heads, with values of some width D_o, misses.",
    control="Factors other than the best ones of the same width, asked whether they come as near.",
    verdict=HOLDS_IF,
    correction="Values must be as wide as the rank of the kernel's matrices: D_o ≥ rank W_Δ at every offset, which for "
    "any convolution is min(D_in, D_out). With D_o = D/K², as heads usually are, most of a random convolution "
    "is missed: the least error is the root of the squared singular values that are left out.",
    check=check,
)
