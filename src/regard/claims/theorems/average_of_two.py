"""Orthonormal keys and q = β(k_a + k_b): the average of two values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.claims.statistics import slope


def orthonormal(n: int, d: int, draw: torch.Generator) -> Tensor:
    """n rows of length 1, each at a right angle to the others."""
    return torch.linalg.qr(torch.randn(d, n, generator=draw, dtype=torch.float64))[0].mT.contiguous()


def unequal(n: int, d: int, draw: torch.Generator) -> Tensor:
    """n rows of length 1 at other angles."""
    rows = torch.randn(n, d, generator=draw, dtype=torch.float64)
    return rows / rows.norm(dim=-1, keepdim=True)


def share(beta: float, n: int) -> float:
    """``e^β/(2e^β + n − 2)``, written so that it does not overflow."""
    return 1 / (2 + (n - 2) * math.exp(-beta))


def weights(keys: Tensor, beta: float, attend: Callable[..., Any]) -> Tensor:
    """Weights for q = β(k_0 + k_1), unscaled as in the document."""
    n, d = keys.shape
    q = beta * (keys[0] + keys[1])
    out: Tensor = attend(q.view(1, 1, 1, d), keys.view(1, 1, n, d), torch.eye(n).to(keys).view(1, 1, n, n), scale=1.0)
    return out.flatten()


def off(keys: Tensor, beta: float, attend: Callable[..., Any], formula: Callable[[float, int], float]) -> float:
    """Largest distance of a weight to the formula: its share for the two, the rest spread over the others."""
    n = len(keys)
    each = formula(beta, n)
    wanted = torch.full((n,), (1 - 2 * each) / max(n - 2, 1), dtype=torch.float64)
    wanted[:2] = each
    return float((weights(keys, beta, attend) - wanted).abs().max())


def check(
    *,
    n: int = 10,
    d: int = 16,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    keys: Callable[[int, int, torch.Generator], Tensor] = orthonormal,
    formula: Callable[[float, int], float] = share,
) -> Evidence:
    """The two weights against the formula at many β and n, and the distance of the output to ½(v_a + v_b)."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    k = keys(n, d, draw)
    betas = [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
    worst = max(off(k[:size], beta, attend, formula) for beta in betas for size in (2, 3, n))
    found.written(
        "both weights are e^β/(2e^β + n − 2) at every β",
        worst < 1e-12,
        f"weights within {worst:.1e} of the formula, β = 0 … {betas[-1]:g}, n = 2, 3, {n}",
    )
    values = torch.randn(n, d, generator=draw, dtype=torch.float64)
    half = (values[0] + values[1]) / 2
    large = [float(beta) for beta in range(8, 17)]
    errors = [float((weights(k, beta, attend) @ values - half).norm()) for beta in large]
    rate = slope(large, [math.log(max(x, 1e-300)) for x in errors])
    found.written(
        "the output tends to ½(v_a + v_b)", errors[-1] < 1e-4 * float(half.norm()), f"error {errors[-1]:.1e} at β = 16"
    )
    found.written("the error falls as exp(−β)", abs(rate.value + 1) < 0.01, f"rate {rate}")
    broken = off(unequal(n, d, draw), 4.0, attend, formula)
    found.control("keys of length 1 that are not orthogonal follow the formula", broken < 1e-12, f"off by {broken:.3g}")
    shown = [0.25 * step for step in range(49)]
    lines: dict[str, tuple[list[float], list[float]]] = {
        "each of the two": (shown, [float(weights(k, beta, attend)[0]) for beta in shown]),
        "each of the others": (shown, [float(weights(k, beta, attend)[-1]) for beta in shown]),
    }
    found.draw(f"weights among {n} orthonormal keys", lines, x="β", y="weight")
    needed = math.log((n - 2) * 0.99 / 0.01 / 2) if n > 2 else 0.0
    found.numbers |= {"n": n, "largest error": worst, "rate": rate.value, "β for 99% on the two": needed}
    return found


CLAIM = Claim(
    id="average-of-two",
    sources=("004",),
    statement="With orthonormal keys and the query β(k_a + k_b), the keys a and b have equal weights, "
    "e^β/(2e^β + n − 2) each, which tend to ½ as β grows: the output is the average of two values.",
    formula=r"\alpha_a = \alpha_b = \frac{e^{\beta}}{2 e^{\beta} + n - 2} \to \frac{1}{2}, \qquad "
    r"c \to \frac{1}{2} (v_a + v_b)",
    refuted="A β or a number of keys at which a weight differs from the formula, or an output that stays away from "
    "the average.",
    control="Unit keys that are not orthogonal, asked whether their weights follow the formula.",
    verdict=HOLDS,
    check=check,
)
