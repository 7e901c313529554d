"""Checks that the feed-forward network is one two-layer map, applied to every position separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.claims._check_helpers import largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.claims.theorems.causal_mask import influence
from regard.nn import Encoder, FeedForward, MultiHeadAttention


def influence_of_others(norms: Tensor) -> float:
    """The largest influence of one position on another."""
    return float((norms - norms.diagonal().diag()).max())


def mean_by_distance(norms: Tensor) -> list[float]:
    """The mean influence at each distance |i − j|."""
    return [float(torch.cat([norms.diagonal(k), norms.diagonal(-k)]).mean()) for k in range(len(norms))]


def check(
    *,
    n: int = 7,
    d: int = 6,
    hidden: int = 20,
    seed: int = 0,
    make: Callable[[int, int], Any] = FeedForward,
    stack: Callable[..., Any] = Encoder,
) -> Evidence:
    """Compute the Jacobian between positions, run one vector at every position, and compare two layers."""
    evidence = Evidence()
    x = random_normal(torch.Generator().manual_seed(seed), n, d)
    torch.manual_seed(seed)
    net = make(d, hidden).double()
    norms = influence(net, x)
    others = influence_of_others(norms)
    evidence.add_statement(
        "The network treats positions separately: y_i depends on x_i alone.",
        # A small network may have no active hidden unit at some position, but not at all of them.
        others == 0 and bool((norms.diagonal() > 0).any()),
        f"∂y_i/∂x_j is {others:g} for all i ≠ j",
    )
    repeated = net(x[:1].expand(n, d))  # one vector at all positions
    spread = largest_difference(repeated, repeated[0])
    reversed_error = largest_difference(net(x.flip(0)).flip(0), net(x))
    evidence.add_statement(
        "It treats them identically: a vector gives one result everywhere.", spread < 1e-12, f"within {spread:.1e}"
    )
    evidence.add_statement(
        "Reordered positions have reordered results.", reversed_error < 1e-12, f"within {reversed_error:.1e}"
    )

    w1, b1 = net.up.parameters()
    w2, b2 = net.down.parameters()
    # Convolutions expect channels first, hence the transposes.
    formula = F.relu(x @ w1.T + b1) @ w2.T + b2
    convolved = F.conv1d(F.relu(F.conv1d(x.T, w1[..., None], b1)), w2[..., None], b2).T
    error = largest_difference(net(x), formula)
    conv_error = largest_difference(net(x), convolved)
    evidence.add_statement("The network is W₂ relu(W₁ x + b₁) + b₂.", error < 1e-12, f"within {error:.1e}")
    evidence.add_statement("It is two convolutions of width 1.", conv_error < 1e-12, f"within {conv_error:.1e}")
    first, second = (block.feedforward.up.weight for block in stack(d, heads=2, layers=2, hidden=hidden).blocks)
    difference = largest_difference(first, second)
    is_different = first is not second and difference > 0.01
    evidence.add_statement(
        "Different layers have different parameters.", is_different, f"they differ by {difference:.2g}"
    )

    # A control: its statement must be false. Attention exists to mix positions, so the same test must see that it does.
    attention = MultiHeadAttention(d, heads=2).double()
    attention_norms = influence(attention, x)
    mixing = influence_of_others(attention_norms)
    evidence.add_control("Self-attention treats positions separately.", mixing == 0, f"∂y_i/∂x_j reaches {mixing:.2g}")
    curves = {"feed-forward": mean_by_distance(norms), "attention": mean_by_distance(attention_norms)}
    evidence.add_curves("mean ‖∂y_i/∂x_j‖ against the distance of positions", range(n), curves, x="|i − j|", y="norm")
    evidence.numbers |= {"largest ‖∂y_i/∂x_j‖, i ≠ j": others, "of attention": mixing}
    evidence.numbers["error of the formula"] = error
    return evidence


CLAIM = Claim(
    id="feed-forward-is-pointwise",
    title="The feed-forward network is the same map at every position",
    citations=(("homework-3", "1.4 (d)"),),
    papers=("vaswani-2017",),
    statement="The feed-forward network is the same map at every position and treats each position separately: two "
    "linear maps with a ReLU between them. Different layers have different parameters.",
    formula=r"y_i = W_2 \operatorname{relu}(W_1 x_i + b_1) + b_2, \qquad \frac{\partial y_i}{\partial x_j} = 0 "
    r"\quad (i \ne j)",
    refuted_by="A derivative of one position's result by another position, or a vector with different results at two "
    "positions.",
    control="Self-attention: it must not treat positions separately.",
    verdict=HOLDS,
    check=check,
)
