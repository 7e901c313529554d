"""Heads that begin equal stay equal: what random initialisation does."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention
from regard.observables import Observe

Change = Callable[[MultiHeadAttention], None]


def as_drawn(layer: MultiHeadAttention) -> None:
    """The library's own initialisation."""


def share(layer: MultiHeadAttention, *, out: bool = True) -> None:
    """Every head gets the first one's matrices; its slice of the output projection too, unless told otherwise."""
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            first = projection.weight[: len(projection.weight) // layer.heads]
            projection.weight.copy_(first.repeat(layer.heads, 1))
        if out:
            first = layer.out_proj.weight[:, : layer.d_value]
            layer.out_proj.weight.copy_(first.repeat(1, layer.heads))


def share_but_output(layer: MultiHeadAttention) -> None:
    """Equal q, k and v; slices of the output projection as drawn."""
    share(layer, out=False)


class Run(NamedTuple):
    """Of one training: how far apart the heads' gradients began; how far apart their q, k and v, and all four matrices,
    were after each step; their maps at some steps; how far the first head moved; the loss at both ends."""

    gradients: float
    apart: list[float]
    whole: list[float]
    maps: dict[int, float]
    moved: float
    loss: tuple[float, float]


def by_head(layer: MultiHeadAttention, *, grad: bool = False, names: str = "qkvo") -> Tensor:
    """``[heads, numbers]``: each head's part of the matrices, or of their gradients."""
    found = []
    for name, projection in zip("qkvo", (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj), strict=True):
        matrix = projection.weight.grad if grad else projection.weight.detach()
        assert matrix is not None
        if name in names:
            found.append((matrix.mT if name == "o" else matrix).reshape(layer.heads, -1))
    return torch.cat(found, -1)


def spread(rows: Tensor) -> float:
    """The largest distance of a head to the first, over the length of the longest."""
    return float((rows - rows[0]).norm(dim=-1).max() / rows.norm(dim=-1).max().clamp(min=1e-300))


def map_distance(layer: MultiHeadAttention, x: Tensor) -> float:
    """Largest mean over queries of ½Σ_j |A¹_ij − A^h_ij|, on x ``[n, d]``."""
    with torch.no_grad():
        _, seen = layer(x[None], observe=Observe(keep=True))
    first, *others = (seen.weights(head) for head in range(layer.heads))
    return max(float((one - first).abs().sum(-1).mean() / 2) for one in others)


def descend(layer: MultiHeadAttention, rate: float) -> None:
    """One step against the gradient; by hand, as torch.optim takes seconds to import what it does not need here."""
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.grad is not None:
                parameter.sub_(rate * parameter.grad)


def train(layer: MultiHeadAttention, change: Change, x: Tensor, y: Tensor, *, steps: int, rate: float) -> Run:
    """Gradient descent on the mean square error to y, from the layer as changed."""
    change(layer)
    start = by_head(layer)[0]
    losses, apart, whole, gradients = [], [], [], 0.0
    maps: dict[int, float] = {}
    for step in range(steps):
        loss = (layer(x) - y).square().mean()
        layer.zero_grad()
        loss.backward()
        if step == 0:
            gradients = spread(by_head(layer, grad=True))
        descend(layer, rate)
        losses.append(float(loss.detach()))
        apart.append(spread(by_head(layer, names="qkv")))
        whole.append(spread(by_head(layer)))
        if step % 5 == 0 or step == steps - 1:
            maps[step + 1] = map_distance(layer, x[0])
    moved = float((by_head(layer)[0] - start).norm() / start.norm())
    return Run(gradients, apart, whole, maps, moved, (losses[0], losses[-1]))


def judge(found: Evidence, drawn: Run, same: Run, partly: Run) -> None:
    """What the three trainings say."""
    last = max(drawn.maps)
    found.written(
        "heads drawn at random get different gradients",
        drawn.gradients > 0.1,
        f"gradients of random heads differ by {drawn.gradients:.2f} of their length; equal heads stay within "
        f"{max(same.whole):.0e} while they learn",
    )
    found.written(
        "and different weights in the end",
        drawn.maps[last] > 0.01,
        f"{drawn.maps[last]:.3f} of the weight lies elsewhere",
    )
    found.written(
        "heads that begin equal, output slices too, stay equal while they learn",
        max(same.whole) < 1e-9 and same.moved > 0.05 and same.loss[1] < 0.95 * same.loss[0],
        f"apart by {max(same.whole):.0e}, moved by {same.moved:.2f}; loss {same.loss[0]:.2f} to {same.loss[1]:.2f}",
    )
    found.written(
        "random output slices alone are enough to part heads of equal q, k and v",
        partly.apart[-1] > 0.01 and partly.maps[last] > 1e-3,
        f"apart by {partly.apart[-1]:.3f} of their length, and {partly.maps[last]:.3f} of the weight lies elsewhere",
    )
    found.control(
        "heads that begin equal get different gradients", same.gradients > 0.1, f"they differ by {same.gradients:.0e}"
    )


def check(
    *,
    heads: int = 2,
    d: int = 8,
    n: int = 6,
    steps: int = 25,
    rate: float = 1.0,
    seed: int = 0,
    layer: Callable[[int, int], MultiHeadAttention] = MultiHeadAttention,
    drawn: Change = as_drawn,
    same: Change = share,
    partly: Change = share_but_output,
) -> Evidence:
    """Three trainings from one draw: as drawn, with all heads equal, and with equal q, k and v alone."""
    found = Evidence()
    torch.manual_seed(seed)
    x = torch.randn(16, n, d, dtype=torch.float64)
    teacher = MultiHeadAttention(d, heads).double()
    with torch.no_grad():
        y = teacher(2 * x)
    runs = []
    for change in (drawn, same, partly):
        torch.manual_seed(seed + 1)
        runs.append(train(layer(d, heads).double(), change, x, y, steps=steps, rate=rate))
    judge(found, *runs)
    names = ("all drawn at random", "all equal", "only output slices at random")
    lines = {
        name: (list(run.maps), [max(value, 1e-17) for value in run.maps.values()])
        for name, run in zip(names, runs, strict=True)
    }
    found.draw("how far apart two heads' weights are", lines, x="step", y="½ Σ |A¹ − A²|", log="y")
    found.numbers |= {"gradients, at random": runs[0].gradients, "largest distance, all equal": max(runs[1].whole)}
    found.numbers |= {"last distance, output slices at random": runs[2].apart[-1], "steps": steps}
    return found


CLAIM = Claim(
    id="same-initialisation-same-head",
    sources=("001",),
    statement="Heads differ because they begin different: random initialisation gives each its own gradients, and they "
    "go different ways.",
    formula=r"W^{(1)} \ne W^{(2)} \quad \Rightarrow \quad \nabla_{W^{(1)}} L \ne \nabla_{W^{(2)}} L, \qquad "
    r"W^{(1)} = W^{(2)} \quad \Rightarrow \quad \nabla_{W^{(1)}} L = \nabla_{W^{(2)}} L",
    refuted="Random heads with equal gradients, or equal heads (output slices included) that part during training.",
    control="Heads that begin equal in all four matrices, asked whether their gradients differ.",
    verdict=HOLDS,
    check=check,
)
