"""Attention does not see order: its outputs move with its inputs, they do not stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import FAILS, Claim, Evidence
from regard.masks import Causal
from regard.nn import MultiHeadAttention
from regard.positions import Sinusoidal

TIGHT = 1e-12


def orders(n: int, moved: int, many: int, draw: torch.Generator) -> Tensor:
    """Permutations ``[many, n]`` that turn a random choice of ``moved`` positions round in a ring, and no others."""
    found = torch.arange(n).repeat(many, 1)
    for row in found:
        chosen = torch.randperm(n, generator=draw)[:moved]
        row[chosen] = chosen.roll(1)
    return found


def gap(a: Tensor, b: Tensor) -> float:
    """How far a is from b, relative to b: the largest over permutations."""
    return float((a - b).flatten(1).norm(dim=-1).max() / b.flatten(1).norm(dim=-1).max())


def off(f: Callable[[Tensor], Tensor], x: Tensor, ways: Tensor) -> tuple[float, float, float]:
    """How far ``f(πX)`` is from f(X), from π f(X), and its mean over positions from that of f(X)."""
    y, turned = f(x), f(x[ways])
    return (
        gap(turned, y.expand_as(turned)),
        gap(turned, y[ways]),
        gap(turned.mean(-2), y.mean(-2).expand(len(ways), -1)),
    )


def check(
    *,
    n: int = 12,
    d: int = 16,
    heads: int = 2,
    permutations: int = 40,
    seed: int = 0,
    make: Callable[..., nn.Module] = MultiHeadAttention,
    sees: Callable[[int], nn.Module] = Sinusoidal,
) -> Evidence:
    """A layer's outputs for permuted inputs: against the outputs, the permuted outputs, and their mean."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    layer, causal, code = make(d, heads=heads).double(), make(d, heads=heads, mask=Causal()).double(), sees(d)
    sizes = list(range(2, n + 1, 2))
    plain, masked, placed = [], [], []
    with torch.no_grad():
        for moved in sizes:
            ways = orders(n, moved, permutations, draw)
            plain.append(off(layer, x, ways))
            masked.append(off(causal, x, ways))
            placed.append(off(lambda rows: layer(code(rows)), x, ways))
    stays, moves, pooled = (max(one) for one in zip(*plain, strict=True))
    least = min(one[0] for one in plain)
    found.written(
        "invariant: f(πX) = f(X)",
        stays < TIGHT,
        f"f(πX) is off f(X) by {100 * least:.0f} to {100 * stays:.0f}% of its size",
    )
    found.corrected("equivariant: f(πX) = πf(X)", moves < TIGHT, f"πf(X) is met within {moves:.1e}")
    found.corrected(
        "invariant after pooling: the mean of f(πX) is that of f(X)", pooled < TIGHT, f"within {pooled:.1e}"
    )
    late, code_off = min(one[1] for one in masked), min(one[1] for one in placed)
    found.control("equivariant under a causal mask alone", late < TIGHT, f"{late:.2g} off")
    found.control("equivariant with positions added", code_off < TIGHT, f"{code_off:.2g} off")
    found.control("the mean stays with positions added", min(one[2] for one in placed) < TIGHT)
    lines = {
        "f(πX) from f(X)": (sizes, [one[0] for one in plain]),
        "f(πX) from πf(X)": (sizes, [one[1] for one in plain]),
        "f(πX) from πf(X), causal mask": (sizes, [one[1] for one in masked]),
        "f(πX) from πf(X), positions added": (sizes, [one[1] for one in placed]),
    }
    found.draw(
        "how far off, by how many positions move", lines, x="positions that move", y="difference relative to f(X)"
    )
    found.numbers |= {"off invariance": stays, "off equivariance": moves, "off invariance of the mean": pooled}
    return found


CLAIM = Claim(
    id="order-blind",
    sources=("001",),
    statement="Self-attention is permutation invariant: swapping positions does not change the representations.",
    formula=r"f(\pi X) = f(X) \quad \forall \pi",
    refuted="A permutation of the inputs under which some output differs.",
    control="A layer under a causal mask, and one with positions added to its input, asked whether it is equivariant.",
    verdict=FAILS,
    correction="It is permutation equivariant, which is what the document's own formula says: f(πX) = πf(X), each "
    "token keeps its vector and the vectors move with the tokens. What is pooled over positions, such as their mean, "
    "is invariant. Positions break this, and so does a causal mask alone.",
    check=check,
)
