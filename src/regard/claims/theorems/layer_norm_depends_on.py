"""What a normalised element depends on: its row in layer norm, its column in batch norm while training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.nn import LayerNorm

Make = Callable[[int], nn.Module]


def influence(norm: nn.Module, x: Tensor) -> Tensor:
    """``|∂y_ij / ∂x_kl|`` as ``[B, D, B, D]``."""
    jacobian: Tensor = torch.autograd.functional.jacobian(norm, x)
    return jacobian.abs()


def pattern(norm: nn.Module, x: Tensor) -> str:
    """Which of the four kinds of elements outputs look at; one look is enough to be named."""
    seen = influence(norm, x)
    rows, columns = (torch.eye(n, dtype=torch.bool) for n in seen.shape[:2])
    row, column = rows[:, None, :, None], columns[None, :, None, :]
    kinds = {"(i)": row & column, "(ii)": ~row & column, "(iii)": row & ~column, "(iv)": ~row & ~column}
    named = []
    for name, where in kinds.items():
        share = float((seen[where.expand_as(seen)] > 1e-9).double().mean())
        if share > 0:
            named.append(name if share > 0.5 else f"some of {name}")  # half of them do not vanish by chance
    return ", ".join(named)


def made(make: Make, d: int, draw: torch.Generator) -> nn.Module:
    """A norm with a scale and shift of its own in every feature."""
    norm = make(d).double()
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=draw, dtype=torch.float64) + 0.5
    return norm


def check(
    *, rows: int = 5, d: int = 6, seed: int = 0, layer: Make = LayerNorm, batch: Make = nn.BatchNorm1d
) -> Evidence:
    """Jacobians of layer norm, and of batch norm in training and in evaluation, by the four kinds of elements."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, d, generator=draw, dtype=torch.float64)
    ours, theirs = made(layer, d, draw), made(batch, d, draw)
    theirs.train()(torch.randn(64, d, generator=draw, dtype=torch.float64))  # running statistics, not the batch's
    own, training = pattern(ours, x), pattern(theirs.train(), x)
    modes = {pattern(ours.eval(), x), pattern(ours.train(), x)}
    evaluation = pattern(theirs.eval(), x)
    found.written(
        "batch norm: on x_ij and the rest of column j, (i) and (ii), in training and in use",
        training == evaluation == "(i), (ii)",
        f"in evaluation batch norm depends on {evaluation} alone",
    )
    found.written("layer norm: on x_ij and the rest of row i, (i) and (iii)", own == "(i), (iii)", f"layer: {own}")
    found.condition(
        "in training batch norm depends on (i), (ii)", training == "(i), (ii)", f"in training on {training}"
    )
    found.condition(
        "layer norm depends on (i), (iii) in both modes", modes == {"(i), (iii)"}, f"layer norm on {own} always"
    )
    found.condition(
        "in evaluation, with fixed statistics, batch norm is elementwise", evaluation == "(i)", f"on {evaluation}"
    )
    found.control("layer norm is elementwise: (i) alone", own == "(i)", f"its Jacobian has {own}")
    sizes = [4, 8, 16, 32, 64]
    lines: dict[str, tuple[list[int], list[float]]] = {}
    lines["layer norm, D features"] = (sizes, [reach(layer, (4, size), draw) for size in sizes])
    lines["batch norm, B rows"] = (sizes, [reach(batch, (size, 4), draw) for size in sizes])
    found.draw("mean |∂y/∂x| of another element of the same row or column", lines, x="D or B", y="mean", log="xy")
    found.numbers |= {"layer norm": own, "batch norm in training": training, "batch norm in evaluation": evaluation}
    return found


def reach(make: Make, shape: tuple[int, int], draw: torch.Generator) -> float:
    """The mean derivative of y_00 by another element that it depends on."""
    x = torch.randn(shape, generator=draw, dtype=torch.float64).requires_grad_()
    seen = torch.autograd.grad(make(shape[1]).double().train()(x)[0, 0], x)[0].abs().flatten()[1:]
    return float(seen[seen > 1e-12].mean())


CLAIM = Claim(
    id="layer-norm-depends-on",
    sources=("003",),
    statement="In layer norm y_ij depends on x_ij and on the rest of row i, and on nothing else; in batch norm on "
    "x_ij and on the rest of column j.",
    formula=r"\frac{\partial y^{LN}_{ij}}{\partial x_{kl}} \ne 0 \Leftrightarrow k = i, \qquad "
    r"\frac{\partial y^{BN}_{ij}}{\partial x_{kl}} \ne 0 \Leftrightarrow l = j",
    refuted="A derivative outside the row or the column, or none within it.",
    control="Layer norm taken as elementwise, as the document calls it in the same breath: x_ij alone.",
    verdict=HOLDS_IF,
    correction="Batch norm must be in training, where its statistics are the batch's. In evaluation they are fixed, "
    "and y_ij depends on x_ij alone. Layer norm is the same in both modes; it works on each vector by itself, but "
    "is not elementwise.",
    check=check,
)
