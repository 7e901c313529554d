"""Orthonormal keys that are also the queries: near an identity layer, at large β."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims.claim import FAILS, Claim, Evidence
from regard.claims.statistics import slope
from regard.claims.theorems.average_of_two import orthonormal, unequal
from regard.nn import MultiHeadAttention

Make = Callable[[int, float, Tensor], MultiHeadAttention]


def layer(d: int, beta: float | None, value: Tensor) -> MultiHeadAttention:
    """One head of self-attention with W_Q = W_K = W_out = I and a given W_V, so that Q = K = the items."""
    made = MultiHeadAttention(d, heads=1, out_bias=False, scale=beta).double()
    with torch.no_grad():
        for projection in (made.q_proj, made.k_proj, made.out_proj):
            projection.weight.copy_(torch.eye(d))
        made.v_proj.weight.copy_(value.mT)
    return made


def far(made: MultiHeadAttention, x: Tensor) -> float:
    """‖layer(X) − X‖ over ‖X‖."""
    with torch.no_grad():
        return float((made(x) - x).norm() / x.norm())


def mixed(x: Tensor, beta: float) -> Tensor:
    """softmax(βI) X: each item e^β − 1 times, and once all, over e^β + n − 1."""
    n = len(x)
    return (math.expm1(beta) * x + x.sum(0)) / (math.exp(beta) + n - 1)


def as_written(found: Evidence, x: Tensor, make: Make, one: Tensor) -> None:
    """The distance to the identity at the usual β and at 1."""
    d = x.shape[-1]
    for name, beta in (("1/√d", 1 / math.sqrt(d)), ("1", 1.0), ("5", 5.0)):
        distance = far(make(d, beta, one), x)
        found.written(
            f"at β = {name} the layer is the identity",
            distance < 1e-9,
            f"at β = {name} the output is {distance:.1%} of ‖X‖ away from X (n = {len(x)})",
        )
        found.numbers[f"distance at β = {name}"] = distance


def check(
    *,
    n: int = 10,
    d: int = 16,
    seed: int = 0,
    make: Make = layer,
    items: Callable[[int, int, torch.Generator], Tensor] = orthonormal,
) -> Evidence:
    """A layer of the library with Q = K orthonormal: its distance to the identity against β, W_V = I and not."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = items(n, d, draw)
    one = torch.eye(d, dtype=torch.float64)
    as_written(found, x, make, one)
    with torch.no_grad():
        worst = max(float((make(d, b, one)(x) - mixed(x, b)).abs().max()) for b in (0.25, 1.0, 3.0, 10.0))
    betas = [float(beta) for beta in range(8, 17)]
    rate = slope(betas, [math.log(max(far(make(d, beta, one), x), 1e-300)) for beta in betas])
    said = f"the distance to the identity falls as exp({rate.value:.4f} β), and is 0 at β = ∞ alone"
    found.corrected("the distance to the identity falls as exp(−β)", abs(rate.value + 1) < 0.01, said)
    found.corrected(
        "the weights are softmax(βI): e^β/(e^β + n − 1) on the diagonal, 1/(e^β + n − 1) elsewhere",
        worst < 1e-12,
        f"the weights are softmax(βI), error {worst:.1e}",
    )
    limit = far(make(d, math.inf, one), x)
    found.corrected("at β = ∞ it is the identity", limit < 1e-12, f"error {limit:.1e}")
    turned = torch.randn(d, d, generator=draw, dtype=torch.float64)
    other = make(d, math.inf, turned)
    with torch.no_grad():
        off = float((other(x) - x @ turned).abs().max())
    found.corrected("with another W_V it is X W_V even then", off < 1e-12, f"error {off:.1e}")
    many = unequal(d + 4, d, draw)
    least, hard = float(torch.linalg.eigvalsh(many @ many.mT)[0]), far(make(d, math.inf, one), many)
    found.corrected(
        "more than d keys cannot be orthonormal, but at β = ∞ unit keys need not be",
        abs(least) < 1e-9 and hard < 1e-12,
        f"{d + 4} keys in {d} dimensions: KᵀK has an eigenvalue {least:.0e}, not 1; at β = ∞ the error is {hard:.1e}",
    )
    found.control("with another W_V it is the identity at β = ∞", far(other, x) < 1e-9, f"distance {far(other, x):.2g}")
    shown = [0.5 * step for step in range(41)]
    lines = {}
    for size in dict.fromkeys((2, n, d)):
        rows = items(size, d, draw)
        lines[f"n = {size}"] = (shown, [max(far(make(d, beta, one), rows), 1e-16) for beta in shown])
    found.draw("distance to the identity, ‖layer(X) − X‖ / ‖X‖", lines, x="β", y="distance", log="y")
    found.numbers["rate"] = rate.value
    return found


CLAIM = Claim(
    id="orthogonal-keys-are-identity",
    sources=("002",),
    statement="If the keys are orthonormal and the queries equal them, the scores are the identity matrix, and "
    "self-attention is an identity layer.",
    formula=r"Q = K, \quad K^\top K = I \quad \Rightarrow \quad K^\top Q = I, \quad H = V",
    refuted="An output that differs from the input.",
    control="A layer with another W_V at β = ∞, asked whether it is the identity.",
    verdict=FAILS,
    correction="The scores are I, the weights softmax(βI): e^β/(e^β + n − 1) on the diagonal and 1/(e^β + n − 1) "
    "elsewhere, which pulls each output towards the mean. The distance to the identity falls as exp(−β): the layer is "
    "one in the limit β → ∞ only, and only with W_V = I. Orthonormal keys need n ≤ d; in the limit any different keys "
    "of one length do as well.",
    check=check,
)
