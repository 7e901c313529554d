"""How large the Jacobian of softmax can be when one weight has nearly everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence


def as_written(n: int, eps: float) -> float:
    """``n² ε²``."""
    return n**2 * eps**2


def sharp(rest: Tensor) -> Tensor:
    """``4 δ² (1 − δ)²``: the largest squared norm with a largest weight of 1 − δ ≥ ½."""
    return 4 * (rest * (1 - rest)).square()


def norms(a: Tensor, attend: Callable[..., Any]) -> Tensor:
    """``‖∂a/∂s‖²`` of weights ``a [S, n]``, by differentiating the operator; scores come as a bias, values are e_j."""
    many, n = a.shape
    s = a.log().view(many, 1, 1, n).requires_grad_()
    nothing, eye = a.new_zeros(many, 1, n, 1), torch.eye(n, dtype=a.dtype).expand(many, 1, n, n)
    out = attend(nothing[:, :, :1], nothing, eye, bias=s)
    rows = [torch.autograd.grad(out[..., j].sum(), s, retain_graph=True)[0] for j in range(n)]
    return torch.stack(rows).square().sum((0, -1)).flatten()


def drawn(n: int, samples: int, draw: torch.Generator) -> Tensor:
    """Weights whose largest is 1 − δ for δ from 1e-4 to ½, the rest shared in all ways; and any others."""
    rest = torch.logspace(-4, -0.302, samples, dtype=torch.float64).unsqueeze(-1)
    power = 10 ** (torch.rand(samples, 1, generator=draw, dtype=torch.float64) * 4 - 2)
    share = (torch.rand(samples, n - 1, generator=draw, dtype=torch.float64).log() * power).softmax(-1)
    share[::4] = torch.eye(n - 1, dtype=torch.float64)[0]  # one other key has all the rest
    loose = (
        torch.randn(samples // 4, n, generator=draw, dtype=torch.float64) * power[: samples // 4].clamp_max(3)
    ).softmax(-1)
    return torch.cat([torch.cat([1 - rest, rest * share], -1), loose]).clamp_min(1e-200)


def check(
    *,
    n: int = 8,
    samples: int = 400,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    bound: Callable[[int, float], float] = as_written,
) -> Evidence:
    """The operator's Jacobian for weights of every shape, against the bound at the smallest ε that is allowed."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    worst, best = {}, 0.0
    for size in sorted({2, 3, n}):
        a = drawn(size, samples, draw)
        rest = a.sum(-1) - a.amax(-1)
        seen = norms(a, attend)
        eps = rest * (1 + 1e-6)  # the largest weight is just above 1 − ε
        limit = torch.tensor([bound(size, float(one)) for one in eps], dtype=torch.float64)
        worst[size] = float((seen / limit).max())
        others = bool((a.sort(-1).values[:, :-1] < eps.unsqueeze(-1)).all())
        found.written(
            f"n = {size}: a largest weight > 1 − ε, others < ε, give ‖J‖² < n²ε²",
            worst[size] < 1 and others,
            f"n = {size}: ‖J‖² reaches {worst[size]:.4g} of the bound",
        )
        strong = (rest > 1e-6) & (rest <= 0.5)  # below, 1 − max has too few digits to compare with
        best = max(best, float((seen / sharp(rest))[strong].max()))
    found.written(
        "none with δ = 1 − max ≤ ½ has more than 4δ²(1 − δ)², itself below the bound",
        best < 1 + 1e-9,
        f"‖J‖² reaches {best:.6f} of 4δ²(1 − δ)²",
    )
    small = 1e-3
    many = max(n, 3)
    equal = torch.full((1, many), small * (1 - 1e-6), dtype=torch.float64)  # others < ε, but together more than ε
    equal[0, 0] = 1 - equal[0, 1:].sum()
    ratio = float(norms(equal, attend)) / bound(many, small)
    found.control("others < ε alone, all equal, give ‖J‖² < n²ε²", ratio < 1, f"‖J‖² is {ratio:.4g} of the bound")
    a = drawn(n, 4 * 25, draw)[: 4 * 25 : 4]
    rest = 1 - a.amax(-1)
    x = rest.tolist()
    lines = {"the worst case": (x, norms(a, attend).tolist()), "4δ²(1 − δ)²": (x, sharp(rest).tolist())}
    lines |= {f"n²δ², n = {n}": (x, [bound(n, one) for one in x])}
    found.draw("the largest ‖J‖² when the largest weight is 1 − δ", lines, x="δ", y="‖J‖²", log="xy")
    found.numbers |= {f"n = {size}: largest share of the bound": x for size, x in worst.items()}
    found.numbers |= {"largest share of 4δ²(1 − δ)²": best, "without the first hypothesis": ratio}
    return found


CLAIM = Claim(
    id="jacobian-norm-bound",
    sources=("003",),
    statement="If the largest of n weights is above 1 − ε and all others are below ε, the squared Frobenius norm of "
    "the Jacobian of softmax is below n²ε².",
    formula=r"a_{\max} > 1 - \epsilon, \ a_i < \epsilon \quad \Rightarrow \quad "
    r"\lVert \operatorname{diag}(a) - a a^\top \rVert_F^2 < n^2 \epsilon^2",
    refuted="Weights within the hypotheses whose Jacobian has a larger norm.",
    control="The first hypothesis dropped: many equal weights just below ε, which together are more than ε.",
    verdict=HOLDS,
    check=check,
)
