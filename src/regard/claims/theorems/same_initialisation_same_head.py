"""Checks that heads which start equal stay equal, and that random initialisation makes them differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard._observables import Observe
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

Change = Callable[[MultiHeadAttention], None]


def keep_random(layer: MultiHeadAttention) -> None:
    """Keep the library's own initialisation."""


def copy_first_head(layer: MultiHeadAttention, *, output: bool = True) -> None:
    """Give every head the matrices of the first one, with its slice of the output projection if ``output``."""
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj):
            first = projection.weight[: len(projection.weight) // layer.heads]
            projection.weight.copy_(first.repeat(layer.heads, 1))
        if output:
            first = layer.out_proj.weight[:, : layer.d_value]
            layer.out_proj.weight.copy_(first.repeat(1, layer.heads))


def copy_all_but_output(layer: MultiHeadAttention) -> None:
    """Give every head the same q, k and v, and keep the random slices of the output projection."""
    copy_first_head(layer, output=False)


@dataclass
class Run:
    """Differences between the heads in one training run. Matrices are compared after every step."""

    gradients: float = 0.0  # of the gradients at the first step
    qkv: list[float] = field(default_factory=list)  # of the q, k and v matrices
    all_matrices: list[float] = field(default_factory=list)
    maps: dict[int, float] = field(default_factory=dict)  # of the weights, by step
    change: float = 0.0  # how much the first head changed in training
    losses: list[float] = field(default_factory=list)


def rows_per_head(layer: MultiHeadAttention, *, grad: bool = False, output: bool = True) -> Tensor:
    """Each head's part of the matrices, or of their gradients, as ``[heads, numbers]``."""
    matrices = []
    for projection in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj):
        matrix = projection.weight.grad if grad else projection.weight.detach()
        assert matrix is not None
        matrices.append(matrix)
    matrices[3] = matrices[3].mT  # heads are columns of the output projection
    used = matrices if output else matrices[:3]
    return torch.cat([matrix.reshape(layer.heads, -1) for matrix in used], -1)


def relative_difference(rows: Tensor) -> float:
    """The largest distance of a head from the first one, relative to the largest norm."""
    return float((rows - rows[0]).norm(dim=-1).max() / rows.norm(dim=-1).max().clamp(min=1e-300))


def map_difference(layer: MultiHeadAttention, x: Tensor) -> float:
    """The largest mean over queries of ``½Σ_j |A¹_ij − A^h_ij|``, for x ``[n, d]``."""
    with torch.no_grad():
        _, observation = layer(x[None], observe=Observe(keep=True))
    first = observation.weights(0)
    return max(float((observation.weights(head) - first).abs().sum(-1).mean() / 2) for head in range(1, layer.heads))


def train(layer: MultiHeadAttention, change: Change, x: Tensor, y: Tensor, *, steps: int, rate: float) -> Run:
    """Train a changed layer by gradient descent on the mean square error to y."""
    change(layer)
    start = rows_per_head(layer)[0]
    run = Run()
    for step in range(steps):
        loss = (layer(x) - y).square().mean()
        layer.zero_grad()
        loss.backward()
        if step == 0:
            run.gradients = relative_difference(rows_per_head(layer, grad=True))

        # torch.optim takes seconds to import and is not needed for plain gradient descent.
        with torch.no_grad():
            for parameter in layer.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
        run.losses.append(float(loss.detach()))
        run.qkv.append(relative_difference(rows_per_head(layer, output=False)))
        run.all_matrices.append(relative_difference(rows_per_head(layer)))
        if step % 5 == 0 or step == steps - 1:
            run.maps[step + 1] = map_difference(layer, x[0])
    run.change = float((rows_per_head(layer)[0] - start).norm() / start.norm())
    return run


def check(
    *,
    heads: int = 2,
    d: int = 8,
    n: int = 6,
    steps: int = 25,
    rate: float = 1.0,
    seed: int = 0,
    layer: Callable[[int, int], MultiHeadAttention] = MultiHeadAttention,
    random: Change = keep_random,
    equal: Change = copy_first_head,
    equal_qkv: Change = copy_all_but_output,
) -> Evidence:
    """Train a layer three times from one seed: with random heads, with equal heads, and with equal q, k and v only."""
    evidence = Evidence()
    torch.manual_seed(seed)
    x = torch.randn(16, n, d, dtype=torch.float64)
    # A layer of the same form can learn this target, so that the loss falls.
    teacher = MultiHeadAttention(d, heads).double()
    with torch.no_grad():
        y = teacher(2 * x)
    runs = []
    for change in (random, equal, equal_qkv):
        torch.manual_seed(seed + 1)  # all three runs start from the same random numbers
        runs.append(train(layer(d, heads).double(), change, x, y, steps=steps, rate=rate))
    drawn, alike, partly = runs  # drawn at random, all equal, equal q, k and v
    last = max(drawn.maps)
    largest = max(alike.all_matrices)
    evidence.add_statement(
        "Randomly initialised heads get different gradients.",
        drawn.gradients > 0.1,
        f"gradients of random heads differ by {drawn.gradients:.2f} of their norm; equal heads stay within "
        f"{largest:.0e} in training",
    )
    evidence.add_statement(
        "They end with different weights.", drawn.maps[last] > 0.01, f"{drawn.maps[last]:.3f} of the weight differs"
    )
    evidence.add_statement(
        "Heads that start equal, with equal output slices, stay equal in training.",
        largest < 1e-9 and alike.change > 0.05 and alike.losses[-1] < 0.95 * alike.losses[0],
        f"they differ by {largest:.0e} and change by {alike.change:.2f}; the loss falls from {alike.losses[0]:.2f} to "
        f"{alike.losses[-1]:.2f}",
    )
    evidence.add_statement(
        "Random output slices alone are enough to make heads with equal q, k and v differ.",
        partly.qkv[-1] > 0.01 and partly.maps[last] > 1e-3,
        f"they differ by {partly.qkv[-1]:.3f} of their norm, and in {partly.maps[last]:.3f} of the weight",
    )

    # A control: its statement must be false.
    # Exchanging two equal heads changes nothing, so their gradients must be equal.
    evidence.add_control(
        "Heads that start equal get different gradients.", alike.gradients > 0.1, f"difference {alike.gradients:.0e}"
    )
    lines = {}
    for name, run in zip(("all drawn at random", "all equal", "only output slices at random"), runs, strict=True):
        lines[name] = (list(run.maps), [max(value, 1e-17) for value in run.maps.values()])
    evidence.add_series("how far apart two heads' weights are", lines, x="step", y="½ Σ |A¹ − A²|", log="y")
    evidence.numbers["gradients, at random"] = drawn.gradients
    evidence.numbers["largest distance, all equal"] = largest
    evidence.numbers |= {"last distance, output slices at random": partly.qkv[-1], "steps": steps}
    return evidence


CLAIM = Claim(
    id="same-initialisation-same-head",
    title="Heads develop differently because they start different",
    citations=(("exam-answers", "2 (c)"),),
    statement="Heads differ because they start different: random initialisation gives each head its own gradients, "
    "and they develop differently.",
    formula=r"W^{(1)} \ne W^{(2)} \quad \Rightarrow \quad \nabla_{W^{(1)}} L \ne \nabla_{W^{(2)}} L, \qquad "
    r"W^{(1)} = W^{(2)} \quad \Rightarrow \quad \nabla_{W^{(1)}} L = \nabla_{W^{(2)}} L",
    refuted_by="Random heads with equal gradients, or equal heads (with equal output slices) that become different in "
    "training.",
    control="Heads that start with all four matrices equal: their gradients must not differ.",
    verdict=HOLDS,
    check=check,
)
