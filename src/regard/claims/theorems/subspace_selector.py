"""Checks that the projector M = AAᵀ extracts v_a from v_a + v_b if the two subspaces are orthogonal."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence

Bases = tuple[Tensor, Tensor]


def projector(a: Tensor) -> Tensor:
    """``A Aᵀ [d, d]``."""
    return a @ a.T


def transposed_projector(a: Tensor) -> Tensor:
    """``AᵀA [m, m]``, which is the identity."""
    return a.T @ a


def orthonormal(d: int, m: int, p: int, generator: torch.Generator) -> Bases:
    """A ``[d, m]`` and B ``[d, p]`` with AᵀA = I, BᵀB = I, AᵀB = 0."""
    q = torch.linalg.qr(random_normal(generator, d, m + p)).Q
    return q[:, :m], q[:, m:]


def selection_error(a: Tensor, s: Tensor, expected: Tensor, selector: Callable[[Tensor], Tensor]) -> float:
    """The largest ``‖M s − v_a‖``; −1 if the shapes of M and s do not fit."""
    try:
        return float((selector(a) @ s - expected).norm(dim=0).max())
    except RuntimeError:
        return -1.0


def tilt(a: Tensor, b: Tensor, sine: float) -> Tensor:
    """B tilted towards A: its columns stay unit vectors, and AᵀB has the entry ``sine`` for each pair of columns."""
    pairs = min(a.shape[1], b.shape[1])
    tilted = b.clone()
    tilted[:, :pairs] = math.sqrt(1 - sine**2) * b[:, :pairs] + sine * a[:, :pairs]
    return tilted


def check(
    *,
    d: int = 12,
    m: int = 4,
    p: int = 5,
    samples: int = 50,
    sharpness: float = 200.0,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    bases: Callable[[int, int, int, torch.Generator], Bases] = orthonormal,
    selector: Callable[[Tensor], Tensor] = projector,
) -> Evidence:
    """Apply M to random sums v_a + v_b, and to the output of a query that attends to both values."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    a, b = bases(d, m, p, generator)
    c = random_normal(generator, m, samples)
    e = random_normal(generator, p, samples)
    v_a = a @ c
    v_b = b @ e
    sum_error = selection_error(a, v_a + v_b, v_a, selector)
    evidence.add_statement("M (v_a + v_b) = v_a", 0 <= sum_error < 1e-12, f"{samples} sums: v_a within {sum_error:.1e}")

    # A query for the first two of three keys: the output is the mean of v_a and v_b.
    keys = torch.eye(3, dtype=torch.float64).expand(samples, 3, 3)
    values = torch.stack([v_a.T, v_b.T, random_normal(generator, samples, d)], 1)
    both = attention_fn((keys[:, :1] + keys[:, 1:2])[:, None], keys[:, None], values[:, None], scale=sharpness)
    output_error = selection_error(a, 2 * both[:, 0, 0].T, v_a, selector)
    evidence.add_statement(
        "2M extracts v_a from the output of attention to two keys.",
        0 <= output_error < 1e-12,
        f"from attention: within {output_error:.1e}",
    )

    # Controls: their statements must be false. Each control drops one assumption.
    transposed_error = selection_error(a, v_a + v_b, v_a, transposed_projector)
    description = f"the error is {transposed_error:.3g}"
    if transposed_error < 0:
        description = f"AᵀA is {m} × {m}, and the vectors have {d} entries"
    evidence.add_control(
        "M = AᵀA, as in one line of the derivation, gives v_a.", 0 <= transposed_error < 1e-12, description
    )
    # The columns are neither orthogonal nor of length 1; the length matters if there is only one.
    skewed = a @ (torch.triu(torch.ones(m, m, dtype=torch.float64)) + torch.eye(m, dtype=torch.float64))
    skewed_error = selection_error(skewed, skewed @ c + v_b, skewed @ c, selector)
    evidence.add_control(
        "A basis of the same space that is not orthonormal gives v_a.",
        0 <= skewed_error < 1e-12,
        f"the error is {skewed_error:.3g}",
    )
    sines = [step / 20 for step in range(21)]
    errors = [selection_error(a, v_a + tilt(a, b, sine) @ e, v_a, selector) for sine in sines]
    evidence.add_control(
        "Subspaces with AᵀB ≠ 0 give v_a.", 0 <= errors[4] < 1e-12, f"sine {sines[4]:g}: the error is {errors[4]:.3g}"
    )
    title = "what of v_b comes through when the subspaces lean towards each other"
    evidence.add_curves(title, sines, {"‖M s − v_a‖": errors}, x="sine", y="error")
    evidence.numbers |= {"largest error": max(sum_error, output_error), "not orthonormal": skewed_error}
    evidence.numbers["leaning by 0.2"] = errors[4]
    return evidence


CLAIM = Claim(
    id="subspace-selector",
    title="M = AAᵀ extracts v_a from v_a + v_b if the subspaces are orthogonal",
    citations=(("worked-answers", "(b)"),),
    statement="If the columns of A and B are orthonormal bases of two subspaces with AᵀB = 0, then M = AAᵀ extracts "
    "v_a from v_a + v_b.",
    formula=r"v_a = A c, \ v_b = B e, \ A^\top A = I, \ A^\top B = 0 \quad \Rightarrow \quad "
    r"A A^\top (v_a + v_b) = v_a",
    refuted_by="Two vectors of such subspaces for which M (v_a + v_b) is not v_a.",
    control="M = AᵀA, which one line of the derivation writes although its shape does not fit; a basis that is not "
    "orthonormal; subspaces that are not orthogonal.",
    verdict=HOLDS,
    check=check,
)
