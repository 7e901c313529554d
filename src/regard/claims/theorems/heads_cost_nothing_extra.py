"""h heads of d/h cost what one head of d costs: in matrix products, not in softmax and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.theorems.cost_multi_head import flops
from regard.claims.theorems.sequential_heads_save_memory import kept, plain
from regard.nn import MultiHeadAttention


class Exponentials(TorchDispatchMode):
    """Counts the numbers that softmax turns into weights."""

    def __init__(self) -> None:
        super().__init__()
        self.many = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten._softmax:
            self.many += out.numel()
        return out


def costs(layer: nn.Module, heads: int, n: int, d: int, attend: Callable[..., Tensor]) -> dict[str, int]:
    """FLOPs of the layer, all and without its output projection; exponentials, and weights that are stored."""
    counted = flops(lambda: layer(torch.zeros(1, n, d)))
    q, k, v = (torch.zeros(1, heads, n, d // heads, requires_grad=True) for _ in range(3))
    with torch.no_grad(), Exponentials() as seen:
        attend(q, k, v)
    matrices = [x for x in kept(lambda: attend(q, k, v)) if x.shape[-2:] == (n, n)]
    return {
        "products": counted["all"],
        "without output": counted["all"] - counted["out_proj"],
        "exponentials": seen.many,
        "weights": sum(x.numel() for x in matrices),
    }


def check(
    *,
    n: int = 48,
    d: int = 64,
    heads: int = 8,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    attend: Callable[..., Tensor] = plain,
) -> Evidence:
    """Operations and memory of one head of width d and of several of width d/h."""
    found = Evidence()
    torch.manual_seed(seed)
    many = [h for h in (1, 2, 4, 8, 16, 32) if d % h == 0 and h <= heads]
    seen = {h: costs(layer(d, h), h, n, d, attend) for h in many}
    one, most = seen[1], seen[many[-1]]
    for name in ("weights", "exponentials"):
        found.written(
            f"{name}: as many as with one head",
            most[name] == one[name],
            f"{most[name] // n**2}n² {name} with {many[-1]} heads, {one[name] // n**2}n² with one",
        )
    found.written(
        "one head without an output projection, as the document lists it, takes as many FLOPs",
        most["products"] == one["without output"],
        f"{most['products']:,} FLOPs with {many[-1]} heads, {one['without output']:,} with one and no output matrix",
    )
    same = len({x["products"] for x in seen.values()}) == 1
    found.condition(
        "matrix products, with the output projection in both, take the same FLOPs",
        same,
        f"products, output projected in both: {one['products']:,} FLOPs with 1 head and {most['products']:,} with "
        f"{many[-1]}",
    )
    formula = 8 * n * d * d + 4 * n * n * d
    found.condition("they are 8nd² + 4n²d for every h", {x["products"] for x in seen.values()} == {formula})
    wide = flops(lambda: layer(d, heads, d_key=d, d_value=d)(torch.zeros(1, n, d)))["all"]
    found.control("h heads of d, not of d/h, take the same FLOPs", wide == one["products"], f"{wide:,} FLOPs")
    lines = {name: (many, [x[name] / one[name] for x in seen.values()]) for name in ("products", "exponentials")}
    lines["stored weights"] = (many, [x["weights"] / one["weights"] for x in seen.values()])
    found.draw(f"cost relative to one head (n = {n}, d = {d})", lines, x="heads", y="relative cost", log="xy")
    found.numbers |= {"FLOPs": one["products"], "exponentials": most["exponentials"], "weights": most["weights"]}
    return found


CLAIM = Claim(
    id="heads-cost-nothing-extra",
    sources=("001",),
    statement="Multi-head attention with h heads of width d/h costs what one head of width d costs.",
    formula=r"h \cdot n d \cdot \frac{d}{h} = n d^2, \qquad h \cdot n^2 \cdot \frac{d}{h} = n^2 d",
    refuted="A cost that grows with the number of heads at fixed d.",
    control="Heads that are each as wide as the model, asked for the same number of operations.",
    verdict=HOLDS_IF,
    correction="Cost must mean matrix products, with an output projection in both: those are 8nd² + 4n²d FLOPs "
    "for every h. The softmax takes h·n² exponentials instead of n², stored weights are h·n² instead of n², and "
    "one head needs no output projection, which is 2nd² more where heads are many.",
    check=check,
)
