"""Checks that h heads of width d/h cost as much as one head of width d in matrix products, but not in other costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.claims._check_helpers import AttentionFn, count_flops
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims.theorems.sequential_heads_save_memory import plain, saved_tensors
from regard.nn import MultiHeadAttention


class ExponentialCounter(TorchDispatchMode):
    """Counts the exponentials of all softmax calls."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._softmax:
            self.count += out.numel()
        return out


def costs(layer: nn.Module, heads: int, n: int, d: int, attention_fn: AttentionFn) -> dict[str, int]:
    """FLOPs of the layer, in total and without its output projection; exponentials; and stored weights."""
    flops = count_flops(lambda: layer(torch.zeros(1, n, d)))
    q, k, v = torch.zeros(3, 1, heads, n, d // heads, requires_grad=True).unbind()
    with torch.no_grad(), ExponentialCounter() as exponentials:
        attention_fn(q, k, v)
    saved = saved_tensors(lambda: attention_fn(q, k, v))
    return {
        "products": flops["all"],
        "without output": flops["all"] - flops["out_proj"],
        "exponentials": exponentials.count,
        "weights": sum(tensor.numel() for tensor in saved if tensor.shape[-2:] == (n, n)),
    }


def check(
    *,
    n: int = 48,
    d: int = 64,
    heads: int = 8,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    attention_fn: AttentionFn = plain,
) -> Evidence:
    """Count operations and memory of one head of width d, and of several heads of width d/h."""
    evidence = Evidence()
    torch.manual_seed(seed)
    counts = [h for h in (1, 2, 4, 8, 16, 32) if d % h == 0 and h <= heads]  # numbers of heads that divide d
    by_heads = [costs(layer(d, h), h, n, d, attention_fn) for h in counts]
    one = by_heads[0]
    most = by_heads[-1]
    for name in ("weights", "exponentials"):
        evidence.add_statement(
            f"There are as many {name} as with one head.",
            most[name] == one[name],
            f"{most[name] // n**2}n² {name} with {counts[-1]} heads, {one[name] // n**2}n² with one",
        )
    evidence.add_statement(
        "One head without an output projection, as the document lists it, takes as many FLOPs.",
        most["products"] == one["without output"],
        f"{most['products']:,} FLOPs with {counts[-1]} heads, {one['without output']:,} with one and no output matrix",
    )
    products = {cost["products"] for cost in by_heads}
    evidence.add_condition(
        "With an output projection in both, the matrix products take the same FLOPs.",
        len(products) == 1,
        f"with an output projection in both, products take {one['products']:,} FLOPs with 1 head and "
        f"{most['products']:,} with {counts[-1]}",
    )
    evidence.add_condition("They take 8nd² + 4n²d FLOPs for every h.", products == {8 * n * d * d + 4 * n * n * d})

    # A control: its statement must be false. Heads of full width make every projection h times as large.
    wide = count_flops(lambda: layer(d, heads, d_key=d, d_value=d)(torch.zeros(1, n, d)))["all"]
    evidence.add_control("h heads of width d take the same FLOPs.", wide == one["products"], f"{wide:,} FLOPs")
    lines = {}
    for name, label in (("products", "products"), ("exponentials", "exponentials"), ("weights", "stored weights")):
        lines[label] = (counts, [cost[name] / one[name] for cost in by_heads])
    evidence.add_series(f"cost relative to one head (n = {n}, d = {d})", lines, x="heads", y="relative cost", log="xy")
    evidence.numbers |= {"FLOPs": one["products"], "exponentials": most["exponentials"], "weights": most["weights"]}
    return evidence


CLAIM = Claim(
    id="heads-cost-nothing-extra",
    title="h heads of width d/h cost as much as one head of width d",
    citations=(("exam-answers", "2 (a)"),),
    papers=("vaswani-2017",),
    statement="Multi-head attention with h heads of width d/h costs as much as one head of width d.",
    formula=r"h \cdot n d \cdot \frac{d}{h} = n d^2, \qquad h \cdot n^2 \cdot \frac{d}{h} = n^2 d",
    refuted_by="A cost that grows with the number of heads at fixed d.",
    control="Heads that are each as wide as the model: they must take more operations.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="The matrix products cost the same if both have an output projection. Softmax and stored weights cost h "
    "times as much.",
    correction="Cost means matrix products, with an output projection in both cases: they take 8nd² + 4n²d FLOPs for "
    "every h. But the softmax takes h·n² exponentials instead of n², the stored weights are h·n² numbers instead of "
    "n², and one head needs no output projection, which costs 2nd² with several heads.",
    check=check,
)
