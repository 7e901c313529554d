"""The number of parameters of multi-head attention, all five dimensions free."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from regard import budget
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

Sizes = tuple[int, int, int, int, int]  # N_h, D_in, D_hid, D_o, D_out
NAMES = ("N_h", "D_in", "D_hid", "D_o", "D_out")


def as_written(heads: int, d_in: int, d_hid: int, d_o: int, d_out: int) -> int:
    """``N_h·D_in(2·D_hid + D_o) + N_h·D_o·D_out + D_out``"""
    return heads * d_in * (2 * d_hid + d_o) + heads * d_o * d_out + d_out


def held(layer: nn.Module) -> int:
    """Numbers in all parameters of a live module."""
    return sum(p.numel() for p in layer.parameters())


def check(
    *,
    samples: int = 100,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    formula: Callable[..., int] = as_written,
) -> Evidence:
    """Parameters of real layers of random sizes beside the formula, then each dimension moved alone."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)

    def made(size: Sizes, **options: bool) -> int:
        heads, d_in, d_hid, d_o, d_out = size
        return held(layer(d_in, heads, d_key=d_hid, d_value=d_o, d_out=d_out, **options))

    rows = torch.randint(1, 14, (samples, 5), generator=draw).tolist()
    sizes: list[Sizes] = [(row[0], row[1], row[2], row[3], row[4]) for row in rows]
    wrong = [size for size in sizes if made(size) != formula(*size)]
    found.written(
        f"the layer holds what the formula says at {samples} random sizes",
        not wrong,
        f"{samples - len(wrong)} of {samples} random sizes agree, all five dimensions free",
    )
    base = (4, 12, 5, 7, 9)
    for at, name in enumerate(NAMES):
        moved = [tuple(x + step * (k == at) for k, x in enumerate(base)) for step in range(1, 5)]
        counts = [(made(size), formula(*size)) for size in moved]  # type: ignore[arg-type]
        found.written(f"{name} alone: the count follows", all(a == b for a, b in counts), f"{name}: {counts[-1][0]:,}")
    planned = all(
        budget.attention(i, h, d_key=k, d_value=v, d_out=o).parameters == formula(h, i, k, v, o)
        for h, i, k, v, o in sizes
    )
    found.written("the planner, which does not know the layer, counts the same", planned, "all sizes")
    extra = made(base, qkv_bias=True) - formula(*base)
    found.control("with biases on queries, keys and values it is the same", extra == 0, f"{extra} more at {base}")
    less = made(base, out_bias=False) - formula(*base)
    found.control("without the bias of the output it is the same", less == 0, f"{-less} fewer: D_out")
    heads = list(range(1, 17))
    counted = [made((h, 12, 5, 7, 9)) for h in heads]
    said = [formula(h, 12, 5, 7, 9) for h in heads]
    lines = {"counted": (heads, counted), "formula": (heads, said)}
    found.draw("D_in = 12, D_hid = 5, D_o = 7, D_out = 9", lines, x="heads", y="parameters")
    found.numbers |= {"sizes": samples, "wrong": len(wrong), "biases of q, k, v": extra}
    return found


CLAIM = Claim(
    id="parameter-count",
    sources=("000",),
    statement="Multi-head attention with N_h heads has N_h·D_in·(2·D_hid + D_o) parameters in its heads and "
    "N_h·D_o·D_out + D_out in its output projection, for any five dimensions; queries, keys and values have no bias.",
    formula=r"N_h D_{in} \left(2 D_{hid} + D_o\right) + N_h D_o D_{out} + D_{out}",
    refuted="A layer of some size that holds another number of parameters.",
    control="A layer with biases on queries, keys and values, and one without a bias of the output, asked for the same "
    "number.",
    verdict=HOLDS,
    check=check,
)
