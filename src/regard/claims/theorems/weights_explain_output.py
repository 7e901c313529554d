"""Do weights say what an output was made of? Only while no other weights give the same output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence

Values = Callable[[int, int, torch.Generator], Tensor]


def gaussian(m: int, d: int, draw: torch.Generator) -> Tensor:
    """Values in general position."""
    return torch.randn(m, d, generator=draw, dtype=torch.float64)


def with_one(v: Tensor) -> Tensor:
    """``[V 1]``: a distribution's output, and its sum."""
    return torch.cat([v, torch.ones_like(v[:, :1])], -1)


def attended(m: int, v: Tensor, queries: int, draw: torch.Generator, attend: Any) -> tuple[Tensor, Tensor]:
    """Weights and outputs of random queries over m random keys."""
    q, k = (torch.randn(1, many, 16, generator=draw, dtype=torch.float64) for many in (queries, m))
    eye = torch.eye(m, dtype=torch.float64)[None]
    return attend(q, k, eye)[0], attend(q, k, v[None])[0]


def from_weights(a: Tensor, v: Tensor, attend: Any) -> Tensor:
    """The output for given weights by the operator: their logarithms as a bias, q·k left out."""
    nothing = v.new_zeros(1, max(a.shape), 1)
    out: Tensor = attend(nothing[:, : len(a)], nothing[:, : len(v)], v[None], bias=a.log()[None], scale=0.0)[0]
    return out


def reversed_weights(a: Tensor, v: Tensor, wanted: Tensor) -> Tensor:
    """``b ∝ exp(θ·v) / a``: the order turned round, as far as the output allows; θ by Newton's method."""
    theta = torch.zeros_like(wanted)
    base = -a.log()

    def of(theta: Tensor) -> Tensor:
        return base + v @ theta

    for _ in range(60):
        b = of(theta).softmax(-1)
        miss = b @ v - wanted
        if float(miss.abs().max()) < 1e-13:
            break
        spread = (v * b[:, None]).T @ v - torch.outer(b @ v, b @ v)
        step = torch.linalg.solve(spread + 1e-14 * torch.eye(len(miss), dtype=v.dtype), miss)
        size, level = 1.0, of(theta).logsumexp(-1) - theta @ wanted
        while size > 1e-6 and of(theta - size * step).logsumexp(-1) - (theta - size * step) @ wanted > level:
            size /= 2
        theta = theta - size * step
    return of(theta).softmax(-1)


def other_weights(m: int, d: int, queries: int, draw: torch.Generator, attend: Any, values: Values) -> Any:
    """For each query other weights with its output: total variation, error of the output, share with another first key.

    Where [V 1] has rank m there are none.
    """
    v = values(m, d, draw)
    a, out = attended(m, v, queries, draw, attend)
    if int(torch.linalg.matrix_rank(with_one(v))) == m:
        return 0.0, 0.0, 0.0
    b = torch.stack([reversed_weights(one, v, y) for one, y in zip(a, out, strict=True)])
    miss = float((from_weights(b, v, attend) - out).abs().max())
    return float((a - b).abs().sum(-1).mean() / 2), miss, float((a.argmax(-1) != b.argmax(-1)).double().mean())


def recovered(v: Tensor, queries: int, draw: torch.Generator, attend: Any) -> float:
    """How far weights solved for from outputs alone, ``[V 1]ᵀ a = [y 1]``, are from the true ones."""
    a, out = attended(len(v), v, queries, draw, attend)
    solved = torch.linalg.pinv(with_one(v).T) @ with_one(out).T
    return float((solved.T - a).abs().max())


def radon(v: Tensor, attend: Any) -> tuple[float, float]:
    """Two distributions without a common key: their total variation, and how far apart their outputs are."""
    null = torch.linalg.svd(with_one(v).T).Vh[-1]
    both = torch.stack([null.clamp_min(0), (-null).clamp_min(0)])
    both = both / both.sum(-1, keepdim=True)
    y = from_weights(both, v, attend)
    return float((both[0] - both[1]).abs().sum() / 2), float((y[0] - y[1]).abs().max())


def check(
    *,
    keys: int = 64,
    d_value: int = 8,
    queries: int = 8,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    values: Values = gaussian,
) -> Evidence:
    """Other weights with the same output: whether there are any, and how far they can be from the true ones."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    apart, miss, first = other_weights(keys, d_value, queries, draw, attend, values)
    found.written(
        f"{keys} keys: an output of {d_value} numbers has no other weights",
        apart < 1e-6,
        f"{keys} keys, d_v = {d_value}: other weights, {apart:.0%} of their mass elsewhere, give the same output "
        f"within {miss:.0e}, {first:.0%} with another first key",
    )
    few = values(d_value + 1, d_value, draw)
    exact = recovered(few, queries, draw, attend)
    found.condition(
        f"m = d_v + 1 = {d_value + 1}: weights can be computed from the output",
        exact < 1e-9,
        f"{d_value + 1} keys: weights from outputs alone within {exact:.0e}",
    )
    found.condition(
        f"{keys} keys: the other weights that were found do give the same output", miss < 1e-9, f"within {miss:.0e}"
    )
    far, off = radon(values(d_value + 2, d_value, draw), attend)
    found.condition(
        f"m = d_v + 2 = {d_value + 2}: two distributions without a common key give one output",
        far > 1 - 1e-9 and off < 1e-9,
        f"{d_value + 2} keys: total variation {far:.3g}, outputs within {off:.0e}",
    )
    few[1] = few[0]
    twins = recovered(few, queries, draw, attend)
    found.control("with two equal values weights can be computed too", twins < 1e-9, f"off by {twins:.2g}")
    sizes = [d_value + 1, d_value + 2, *(d_value * k for k in (2, 4, 8))]
    curve = [other_weights(m, d_value, queries, draw, attend, values)[0] for m in sizes]
    lines = {
        "the order reversed": (sizes, curve),
        "the most there is": (sizes, [float(m > d_value + 1) for m in sizes]),
    }
    found.draw("total variation to other weights with the same output", lines, x="keys", y="distance")
    found.numbers |= {"mean total variation": apart, "error of the output": miss, "another first key": first}
    return found


CLAIM = Claim(
    id="weights-explain-output",
    sources=("001",),
    statement="Weights are a distribution over positions and make attention interpretable: they say which values an "
    "output was made of.",
    formula=r"\sum_{j} \alpha_j v_j = \sum_{j} \alpha'_j v_j \quad \Rightarrow \quad \alpha = \alpha'",
    refuted="Other weights, far from the true ones, that give the same output.",
    control="As few keys as needed, but two of them with the same value.",
    verdict=HOLDS_IF,
    correction="The values must be affinely independent, so that at most d_v + 1 keys are seen: then an output has one "
    "set of weights, which can be computed from it. From d_v + 2 keys on there are others, even two without a common "
    "key that give one output (Radon); with many keys any query has some with most of their mass on other keys.",
    check=check,
)
