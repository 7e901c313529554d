"""Without 1/√d softmax saturates as d grows: in probability, and slowly in the mean."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import mean, slope
from regard.nn import MultiHeadAttention
from regard.observables import Observe

QUERIES = 16  # each set of keys is asked by so many queries


class Seen(NamedTuple):
    """Of many draws at one d: ``1 − max``, and the squared norm of ``diag(a) − aaᵀ``, one value a set of keys."""

    rest: Tensor
    open: Tensor
    jacobian: Tensor
    middle: float


def look(n: int, d: int, sets: int, eps: float, scale: float | None, draw: torch.Generator, attend: Any) -> Seen:
    """Weights of unit queries and keys by the operator."""
    q, k = (torch.randn(sets, 1, many, d, generator=draw) for many in (QUERIES, n))
    a = attend(q, k, torch.eye(n).expand(sets, 1, n, n), scale=scale)[:, 0].double()
    rest = a.sum(-1) - a.amax(-1)
    square = a.square()
    jacobian = (square * (1 - a).square()).sum(-1) + square.sum(-1).square() - square.square().sum(-1)
    return Seen(rest.mean(-1), (rest >= eps).double().mean(-1), jacobian.mean(-1), float(jacobian.median()))


def gradients(n: int, d: int, batch: int, scale: float | None, seed: int, layer: Any) -> Tensor:
    """Mean squared entry of ∂loss/∂q for each query of a layer of width d; q and k have unit entries at the start."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = layer(d, heads=1, scale=scale)
        x = torch.randn(batch, n, d)
        towards = torch.randn(batch, n, d)
    kept: list[Tensor] = []
    made.q_proj.register_full_backward_hook(lambda module, into, out: kept.append(out[0]))
    (made(x.requires_grad_()) * towards).sum().backward()
    return kept[0].double().square().mean(-1).flatten()


def ask_layers(found: Evidence, n: int, batch: int, seed: int, layer: Any) -> None:
    """Gradients that reach the queries of a real layer, with and without the scale."""
    few, many = 32, 256
    raw = [gradients(n, d, batch, 1.0, seed, layer) for d in (few, many)]
    scaled = gradients(n, many, batch, None, seed, layer)
    fall, middle = float(raw[1].median() / raw[0].median()), float(raw[1].median() / scaled.median())
    found.condition(
        f"in a layer the typical gradient of a query vanishes: from d = {few} to {many}, and beside the scaled layer's",
        fall < 0.01 and middle < 0.5,
        f"median squared gradient falls to {fall:.1e} of itself, {middle:.1e} of the scaled layer's",
    )
    whole = float(raw[1].mean() / scaled.mean())
    found.condition(
        "in the mean it does not: a few open draws keep it above the scaled layer's",
        whole > 1,
        f"mean squared gradient {whole:.3g} times the scaled layer's",
    )
    found.numbers |= {"median squared gradient, unscaled over scaled": middle, "mean squared gradient, same": whole}


def many_keys(sizes: tuple[int, ...], seed: int, attend: Any) -> list[float]:
    """Mean largest weight where the keys number e^d: the other side of "n stays fixed"."""
    draw = torch.Generator().manual_seed(seed)
    means = []
    for d in sizes:
        q, k = (torch.randn(1, 1, many, d, generator=draw) for many in (64, round(math.exp(d))))
        _, seen = attend(q, k, k, scale=1.0, observe=Observe())
        means.append(float(seen.peak.mean()))
    return means


def check(
    *,
    n: int = 8,
    largest: int = 1024,
    sets: int = 250,
    eps: float = 0.1,
    batch: int = 40,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    layer: Callable[..., Any] = MultiHeadAttention,
) -> Evidence:
    """1 − max, the Jacobian and gradients as d grows at fixed n, unscaled and scaled; and with n = e^d."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    sizes = [d for d in (64, 128, 256, 512, 1024, 2048) if d <= largest]
    raw = [look(n, d, sets, eps, 1.0, draw, attend) for d in sizes]
    scaled = [look(n, d, sets, eps, None, draw, attend) for d in (sizes[0], sizes[-1])]
    logs = [math.log(d) for d in sizes]
    rest, still, norm = ([mean(one) for one in column] for column in zip(*(s[:3] for s in raw), strict=True))
    said = f"{still[-1].value:.1%} of draws at d = {sizes[-1]} have a largest weight ≤ {1 - eps:g}"
    found.written("from some d on the largest weight is > 1 − ε in every draw", still[-1].value == 0, said)
    for name, of in {"1 − max in the mean": rest, "the share of such draws": still, "mean ‖J‖²": norm}.items():
        rate = slope(logs, [math.log(max(one.value, 1e-300)) for one in of])
        found.condition(
            f"{name} → 0, about as d^−½", abs(rate.value + 0.5) < 0.15, f"{name} falls as d^{rate.value:.2f}"
        )
    middle = [one.middle for one in raw]
    rate = slope([math.sqrt(d) for d in sizes], [math.log(max(one, 1e-300)) for one in middle])
    found.condition("the median of ‖J‖² falls as exp(−c√d)", rate.high < -0.2 and middle[-1] < 1e-6,
                    f"median {middle[-1]:.1e} at d = {sizes[-1]}, c = {-rate.value:.2f}")  # fmt: skip
    ask_layers(found, n, batch, seed, layer)
    grown = many_keys((2, 4, 6, 8), seed, attend)
    found.condition("n must stay far below e^(d/2): with e^d keys the largest weight falls", grown[-1] < grown[0],
                    f"with e^d keys the mean largest weight goes from {grown[0]:.2f} to {grown[-1]:.2f}")  # fmt: skip
    ends = [mean(one.rest) for one in scaled]
    found.control("scaled by 1/√d, 1 − max falls too", ends[1].high < 0.8 * ends[0].value, f"{ends[0]} to {ends[1]}")
    lines = {"1 − max": (sizes, *zip(*rest, strict=True)), "‖J‖²": (sizes, *zip(*norm, strict=True))}
    half = [rest[0].value * math.sqrt(sizes[0] / d) for d in sizes]
    found.draw("unscaled, means with 99% intervals", {**lines, "d^−½": (sizes, half)}, x="d", y="mean", log="xy")
    found.numbers |= {"draws at each d": sets * QUERIES, "1 − max, scaled": ends[1].value}
    return found


CLAIM = Claim(
    id="unscaled-softmax-saturates",
    sources=("001", "003"),
    statement="Without 1/√d, for any ε and large enough d the largest weight is above 1 − ε; the Jacobian of softmax "
    "goes to 0 and gradients vanish.",
    formula=r"d \to \infty: \quad \max_i a_i \to 1, \qquad \lVert \operatorname{diag}(a) - a a^\top \rVert_F^2 \to 0, "
    r"\qquad a = \operatorname{softmax}(K q)",
    refuted="Draws whose largest weight stays below 1 − ε however large d is, or gradients that do not vanish.",
    control="Scores scaled by 1/√d, asked whether their 1 − max falls with d.",
    verdict=HOLDS_IF,
    correction="It holds in probability, at fixed n (ln n far below d/2). At every d some draws have two nearly equal "
    "best keys: their share, the mean of 1 − max and the mean squared Jacobian fall only about as d^−½, while the "
    "median falls as exp(−c√d). So it is the typical gradient that vanishes; the mean squared gradient of a query, "
    "carried by the few open draws, is even larger than with the scale, which itself multiplies gradients by 1/√d.",
    check=check,
)
