"""Checks how large the Jacobian of softmax can be if one weight is close to 1."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence


def as_written(n: int, eps: float) -> float:
    """``n² ε²``."""
    return n**2 * eps**2


def sharp_bound(rest: Tensor) -> Tensor:
    """``4 δ² (1 − δ)²``: the largest squared norm for a largest weight of 1 − δ ≥ ½."""
    return 4 * (rest * (1 - rest)).square()


def squared_norms(a: Tensor, attention_fn: AttentionFn) -> Tensor:
    """``‖∂a/∂s‖²`` for weights ``a [S, n]``, by differentiating the operator. Scores are a bias, values are e_j."""
    samples, n = a.shape
    # The operator gets the scores as a bias, so that its weights are exactly a.
    scores = a.log().view(samples, 1, 1, n).requires_grad_()
    zeros = a.new_zeros(samples, 1, n, 1)
    out = attention_weights(attention_fn, zeros[:, :, :1], zeros, bias=scores)
    rows = [torch.autograd.grad(out[..., j].sum(), scores, retain_graph=True)[0] for j in range(n)]
    return torch.stack(rows).square().sum((0, -1)).flatten()


def random_weights(n: int, samples: int, generator: torch.Generator) -> Tensor:
    """Rows whose largest weight is 1 − δ, for δ from 1e-4 to ½, with the rest spread in many ways; then any rows.

    In every fourth row of the first part, one other key has all of the rest, which is the worst case.
    """
    rest = torch.logspace(-4, -0.302, samples, dtype=torch.float64).unsqueeze(-1)
    power = 10 ** (torch.rand(samples, 1, generator=generator, dtype=torch.float64) * 4 - 2)
    share = (torch.rand(samples, n - 1, generator=generator, dtype=torch.float64).log() * power).softmax(-1)
    share[::4] = torch.eye(n - 1, dtype=torch.float64)[0]
    scores = random_normal(generator, samples // 4, n) * power[: samples // 4].clamp_max(3)
    return torch.cat([torch.cat([1 - rest, rest * share], -1), scores.softmax(-1)]).clamp_min(1e-200)


def check(
    *,
    n: int = 8,
    samples: int = 400,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    bound: Callable[[int, float], float] = as_written,
) -> Evidence:
    """Compare the operator's Jacobian, for many kinds of weights, with the bound at the smallest possible ε."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    largest_ratio = 0.0
    for size in sorted({2, 3, n}):
        a = random_weights(size, samples, generator)
        rest = a.sum(-1) - a.amax(-1)
        norms = squared_norms(a, attention_fn)
        eps = rest * (1 + 1e-6)  # the largest weight is just above 1 − ε
        limits = torch.tensor([bound(size, value) for value in eps.tolist()], dtype=torch.float64)
        worst = float((norms / limits).max())
        others_below = bool((a.sort(-1).values[:, :-1] < eps.unsqueeze(-1)).all())
        evidence.add_statement(
            f"For n = {size}, a largest weight above 1 − ε with all others below ε gives ‖J‖² < n²ε².",
            worst < 1 and others_below,
            f"n = {size}: ‖J‖² reaches {worst:.4g} of the bound",
        )
        evidence.numbers[f"n = {size}: largest share of the bound"] = worst
        comparable = (rest > 1e-6) & (rest <= 0.5)  # below 1e-6, 1 − max has too few exact digits
        largest_ratio = max(largest_ratio, float((norms / sharp_bound(rest))[comparable].max()))
    evidence.add_statement(
        "For δ = 1 − max ≤ ½, ‖J‖² is at most 4δ²(1 − δ)², which is itself below the bound.",
        largest_ratio < 1 + 1e-9,
        f"‖J‖² reaches {largest_ratio:.6f} of 4δ²(1 − δ)²",
    )

    # A control: its statement must be false.
    # Each of the others is below ε, but their sum is not, so the largest weight is not above 1 − ε.
    count = max(n, 3)
    small = 1e-3 / count  # the largest weight stays near 1 for every n
    equal = torch.full((1, count), small * (1 - 1e-6), dtype=torch.float64)
    equal[0, 0] = 1 - equal[0, 1:].sum()
    ratio = float(squared_norms(equal, attention_fn)) / bound(count, small)
    evidence.add_control(
        "If only the others are below ε, and all equal, ‖J‖² < n²ε².", ratio < 1, f"‖J‖² is {ratio:.4g} of the bound"
    )
    a = random_weights(n, 4 * 25, generator)[: 4 * 25 : 4]  # only the worst cases
    rest = 1 - a.amax(-1)
    deltas = rest.tolist()
    curves = {
        "the worst case": squared_norms(a, attention_fn).tolist(),
        "4δ²(1 − δ)²": sharp_bound(rest).tolist(),
        f"n²δ², n = {n}": [bound(n, delta) for delta in deltas],
    }
    evidence.add_curves("the largest ‖J‖² when the largest weight is 1 − δ", deltas, curves, x="δ", y="‖J‖²", log="xy")
    evidence.numbers |= {"largest share of 4δ²(1 − δ)²": largest_ratio, "without the first hypothesis": ratio}
    return evidence


CLAIM = Claim(
    id="jacobian-norm-bound",
    title="With one weight above 1 − ε and the others below ε, ‖J‖² of softmax is below n²ε²",
    citations=(("solution-sheet", "1 (a)"),),
    statement="If the largest of n weights is above 1 − ε and all others are below ε, the squared Frobenius norm of "
    "the Jacobian of softmax is below n²ε².",
    formula=r"a_{\max} > 1 - \epsilon, \ a_i < \epsilon \quad \Rightarrow \quad "
    r"\lVert \operatorname{diag}(a) - a a^\top \rVert_F^2 < n^2 \epsilon^2",
    refuted_by="Weights that satisfy both conditions and whose Jacobian has a larger norm.",
    control="Equal weights just below ε, whose sum is above ε, so that the first condition does not hold: their norm "
    "must be above the bound.",
    verdict=HOLDS,
    check=check,
)
