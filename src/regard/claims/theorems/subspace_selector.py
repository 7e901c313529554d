"""M = AAᵀ picks v_a out of v_a + v_b."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence

Bases = tuple[Tensor, Tensor]


def projector(a: Tensor) -> Tensor:
    """``A Aᵀ [d, d]``."""
    return a @ a.T


def as_one_line_says(a: Tensor) -> Tensor:
    """``AᵀA [m, m]``, which is I."""
    return a.T @ a


def orthonormal(d: int, m: int, p: int, draw: torch.Generator) -> Bases:
    """A ``[d, m]`` and B ``[d, p]`` with AᵀA = I, BᵀB = I, AᵀB = 0."""
    q = torch.linalg.qr(torch.randn(d, m + p, generator=draw, dtype=torch.float64)).Q
    return q[:, :m], q[:, m:]


def error(a: Tensor, s: Tensor, wanted: Tensor, selector: Callable[[Tensor], Tensor]) -> float:
    """``‖M s − v_a‖`` at most; −1 where M cannot multiply s."""
    try:
        return float((selector(a) @ s - wanted).norm(dim=0).max())
    except RuntimeError:
        return -1.0


def tilted(a: Tensor, b: Tensor, sine: float) -> Tensor:
    """B turned towards A: its columns stay unit vectors, and AᵀB has the entry ``sine`` for each pair."""
    pairs = min(a.shape[1], b.shape[1])
    turned = b.clone()
    turned[:, :pairs] = math.sqrt(1 - sine**2) * b[:, :pairs] + sine * a[:, :pairs]
    return turned


def check(
    *,
    d: int = 12,
    m: int = 4,
    p: int = 5,
    samples: int = 50,
    sharpness: float = 200.0,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    bases: Callable[[int, int, int, torch.Generator], Bases] = orthonormal,
    selector: Callable[[Tensor], Tensor] = projector,
) -> Evidence:
    """M s for random v_a and v_b of the two subspaces, on their sum and on the output of attention to both."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    a, b = bases(d, m, p, draw)
    c, e = (torch.randn(size, samples, generator=draw, dtype=torch.float64) for size in (m, p))
    v_a, v_b = a @ c, b @ e
    off = error(a, v_a + v_b, v_a, selector)
    found.written("M (v_a + v_b) = v_a", 0 <= off < 1e-12, f"{samples} sums: v_a within {off:.1e}")
    keys = torch.eye(3, dtype=torch.float64).expand(samples, 3, 3)
    values = torch.stack([v_a.T, v_b.T, torch.randn(samples, d, generator=draw, dtype=torch.float64)], 1)
    both = attend((keys[:, :1] + keys[:, 1:2])[:, None], keys[:, None], values[:, None], scale=sharpness)
    mixed = error(a, 2 * both[:, 0, 0].T, v_a, selector)
    found.written("2M picks v_a out of attention to two keys", 0 <= mixed < 1e-12, f"attended: within {mixed:.1e}")
    line = error(a, v_a + v_b, v_a, as_one_line_says)
    words = f"AᵀA is {m} × {m}, the vectors have {d} entries" if line < 0 else f"off by {line:.3g}"
    found.control("M = AᵀA, as one line of the derivation has it, gives v_a", 0 <= line < 1e-12, words)
    skew = a @ torch.triu(torch.ones(m, m, dtype=torch.float64))
    loose = error(skew, skew @ c + v_b, skew @ c, selector)
    found.control("a basis of the same space that is not orthonormal gives v_a", 0 <= loose < 1e-12, f"off {loose:.3g}")
    sines = [step / 20 for step in range(21)]
    curve = [error(a, v_a + tilted(a, b, x) @ e, v_a, selector) for x in sines]
    found.control("with AᵀB ≠ 0 it gives v_a", 0 <= curve[4] < 1e-12, f"sine {sines[4]:g}: off by {curve[4]:.3g}")
    lines = {"‖M s − v_a‖": (sines, curve)}
    found.draw("what of v_b comes through when the subspaces lean towards each other", lines, x="sine", y="error")
    found.numbers |= {"largest error": max(off, mixed), "not orthonormal": loose, "leaning by 0.2": curve[4]}
    return found


CLAIM = Claim(
    id="subspace-selector",
    sources=("004",),
    statement="If the columns of A and B are orthonormal bases of two subspaces with AᵀB = 0, M = AAᵀ extracts v_a "
    "from v_a + v_b.",
    formula=r"v_a = A c, \ v_b = B e, \ A^\top A = I, \ A^\top B = 0 \quad \Rightarrow \quad "
    r"A A^\top (v_a + v_b) = v_a",
    refuted="Two vectors of such subspaces for which M (v_a + v_b) is not v_a.",
    control="M = AᵀA, which one line of the derivation writes and shapes forbid; a basis that is not orthonormal; "
    "subspaces that are not orthogonal.",
    verdict=HOLDS,
    check=check,
)
