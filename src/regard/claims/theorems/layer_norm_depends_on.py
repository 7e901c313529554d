"""Checks which inputs a normalised element depends on: its row in layer norm, its column in batch norm in training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.nn import LayerNorm

Make = Callable[[int], nn.Module]


def dependence(norm: nn.Module, x: Tensor) -> str:
    """Which inputs y_ij depends on: (i) x_ij, (ii) the rest of column j, (iii) the rest of row i, (iv) all others."""
    jacobian: Tensor = torch.autograd.functional.jacobian(norm, x)  # ∂y_ij/∂x_kl as [B, D, B, D]
    rows, features = x.shape
    same_row = torch.eye(rows, dtype=torch.bool)[:, None, :, None]
    same_column = torch.eye(features, dtype=torch.bool)[None, :, None, :]
    groups = {
        "(i)": same_row & same_column,
        "(ii)": ~same_row & same_column,
        "(iii)": same_row & ~same_column,
        "(iv)": ~same_row & ~same_column,
    }
    names = []
    for name, group in groups.items():
        share = float((jacobian[group.expand_as(jacobian)].abs() > 1e-9).double().mean())
        if share > 0.5:  # a few derivatives may be 0 by chance, but not half of them
            names.append(name)
        elif share > 0:
            names.append(f"some of {name}")
    return ", ".join(names)


def random_norm(make: Make, d: int, generator: torch.Generator) -> nn.Module:
    """A norm in float64 with a random scale and shift for every feature."""
    norm = make(d).double()
    for parameter in norm.parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) + 0.5
    return norm


def mean_derivative(make: Make, shape: tuple[int, int], generator: torch.Generator) -> float:
    """The mean |∂y_00/∂x_kl| over the other elements that y_00 depends on."""
    x = random_normal(generator, *shape).requires_grad_()
    derivatives = torch.autograd.grad(make(shape[1]).double().train()(x)[0, 0], x)[0].abs().flatten()[1:]
    return float(derivatives[derivatives > 1e-12].mean())


def check(
    *, rows: int = 5, d: int = 6, seed: int = 0, layer: Make = LayerNorm, batch: Make = nn.BatchNorm1d
) -> Evidence:
    """Compute the Jacobians of layer norm and of batch norm, in training and in evaluation."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, rows, d)
    layer_norm = random_norm(layer, d, generator)
    batch_norm = random_norm(batch, d, generator)
    batch_norm.train()(random_normal(generator, 64, d))  # the running statistics come from another batch
    layer_inputs = dependence(layer_norm, x)
    training = dependence(batch_norm.train(), x)
    both = {dependence(layer_norm.eval(), x), dependence(layer_norm.train(), x)}
    evaluation = dependence(batch_norm.eval(), x)
    evidence.add_statement(
        "Batch norm depends on x_ij (i) and on the rest of column j (ii), in training and in evaluation.",
        training == evaluation == "(i), (ii)",
        f"in evaluation, batch norm depends only on {evaluation}",
    )
    evidence.add_statement(
        "Layer norm depends on x_ij (i) and on the rest of row i (iii).", layer_inputs == "(i), (iii)", layer_inputs
    )
    evidence.add_condition(
        "In training, batch norm depends on (i) and (ii).", training == "(i), (ii)", f"in training, on {training}"
    )
    evidence.add_condition("Layer norm depends on (i), (iii) in both modes.", both == {"(i), (iii)"}, layer_inputs)
    evidence.add_condition(
        "In evaluation, with fixed statistics, batch norm is elementwise.", evaluation == "(i)", f"on {evaluation}"
    )

    # A control: its statement must be false.
    # The mean and the deviation of a row contain all of its elements, so layer norm cannot be elementwise.
    evidence.add_control("Layer norm is elementwise.", layer_inputs == "(i)", f"it depends on {layer_inputs}")
    sizes = [4, 8, 16, 32, 64]
    curves = {
        "layer norm, D features": [mean_derivative(layer, (4, size), generator) for size in sizes],
        "batch norm, B rows": [mean_derivative(batch, (size, 4), generator) for size in sizes],
    }
    title = "mean |∂y/∂x| of another element of the same row or column"
    evidence.add_curves(title, sizes, curves, x="D or B", y="mean", log="xy")
    evidence.numbers |= {"layer norm": layer_inputs, "batch norm in training": training}
    evidence.numbers["batch norm in evaluation"] = evaluation
    return evidence


CLAIM = Claim(
    id="layer-norm-depends-on",
    title="Layer norm depends on row i alone, batch norm on column j alone",
    citations=(("solution-sheet", "3 (a)"),),
    papers=("ba-2016", "ioffe-2015"),
    statement="In layer norm, y_ij depends on x_ij and the rest of row i, and on nothing else. In batch norm, it "
    "depends on x_ij and the rest of column j.",
    formula=r"\frac{\partial y^{LN}_{ij}}{\partial x_{kl}} \ne 0 \Leftrightarrow k = i, \qquad "
    r"\frac{\partial y^{BN}_{ij}}{\partial x_{kl}} \ne 0 \Leftrightarrow l = j",
    refuted_by="A derivative that is not 0 outside the row or the column, or derivatives of 0 inside it.",
    control="The document also calls layer norm elementwise: a dependence on x_ij alone must not be found.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Layer norm depends on row i. Batch norm depends on column j in training, and on x_ij alone in "
    "evaluation.",
    correction="Batch norm is in training, where its statistics are those of the batch. In evaluation they are fixed, "
    "and y_ij depends on x_ij alone. Layer norm is the same in both modes. It treats each vector separately, but it "
    "is not elementwise.",
    check=check,
)
