"""Checks the number of parameters of multi-head attention, for any five dimensions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from regard import budget
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

Sizes = tuple[int, int, int, int, int]  # N_h, D_in, D_hid, D_o, D_out
NAMES = ("N_h", "D_in", "D_hid", "D_o", "D_out")


def as_written(heads: int, d_in: int, d_hid: int, d_o: int, d_out: int) -> int:
    """``N_h·D_in(2·D_hid + D_o) + N_h·D_o·D_out + D_out``."""
    return heads * d_in * (2 * d_hid + d_o) + heads * d_o * d_out + d_out


def count_parameters(layer: nn.Module) -> int:
    """The number of entries in all parameters of a module."""
    return sum(parameter.numel() for parameter in layer.parameters())


def check(
    *,
    samples: int = 100,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    formula: Callable[..., int] = as_written,
) -> Evidence:
    """Count the parameters of layers of random sizes, then vary each dimension alone; compare with the formula."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)

    def layer_parameters(size: Sizes, **options: bool) -> int:
        heads, d_in, d_hid, d_o, d_out = size
        return count_parameters(layer(d_in, heads, d_key=d_hid, d_value=d_o, d_out=d_out, **options))

    wrong = 0
    planned = True
    for heads, d_in, d_hid, d_o, d_out in torch.randint(1, 14, (samples, 5), generator=generator).tolist():
        expected = formula(heads, d_in, d_hid, d_o, d_out)
        wrong += layer_parameters((heads, d_in, d_hid, d_o, d_out)) != expected
        plan = budget.attention(d_in, heads, d_key=d_hid, d_value=d_o, d_out=d_out)
        planned = planned and plan.parameters == expected
    evidence.add_statement(
        f"The layer has as many parameters as the formula says, at {samples} random sizes.",
        wrong == 0,
        f"{samples - wrong} of {samples} random sizes agree, with all five dimensions free",
    )
    base: Sizes = (4, 12, 5, 7, 9)
    for index, name in enumerate(NAMES):
        agree = True
        for step in range(1, 5):
            size = list(base)
            size[index] += step
            count = layer_parameters((size[0], size[1], size[2], size[3], size[4]))
            agree = agree and count == formula(*size)
        evidence.add_statement(f"If only {name} varies, the formula follows.", agree, f"{name}: {count:,}")
    evidence.add_statement("The planner, which does not use the layer, counts the same.", planned, "at all sizes")

    # Controls: their statements must be false. The formula has a bias in the output projection and nowhere else.
    extra = layer_parameters(base, qkv_bias=True) - formula(*base)
    evidence.add_control("With biases for q, k and v, the count is the same.", extra == 0, f"{extra} more at {base}")
    fewer = formula(*base) - layer_parameters(base, out_bias=False)
    evidence.add_control("Without the output bias, the count is the same.", fewer == 0, f"{fewer} fewer: D_out")
    head_counts = range(1, 17)
    counted = [layer_parameters((heads, *base[1:])) for heads in head_counts]
    curves = {"counted": counted, "formula": [formula(heads, *base[1:]) for heads in head_counts]}
    evidence.add_curves("D_in = 12, D_hid = 5, D_o = 7, D_out = 9", head_counts, curves, x="heads", y="parameters")
    evidence.numbers |= {"sizes": samples, "wrong": wrong, "biases of q, k, v": extra}
    return evidence


CLAIM = Claim(
    id="parameter-count",
    title="Attention has N_h·D_in·(2·D_hid + D_o) + N_h·D_o·D_out + D_out parameters",
    citations=(("assignment-6", "1.2"),),
    statement="Multi-head attention with N_h heads has N_h·D_in·(2·D_hid + D_o) parameters in its heads and "
    "N_h·D_o·D_out + D_out in its output projection, for any five dimensions. Queries, keys and values have no bias.",
    formula=r"N_h D_{in} \left(2 D_{hid} + D_o\right) + N_h D_o D_{out} + D_{out}",
    refuted_by="A layer of some size with another number of parameters.",
    control="A layer with biases for queries, keys and values, and one without the bias of the output projection: "
    "both must have another number of parameters.",
    verdict=HOLDS,
    check=check,
)
