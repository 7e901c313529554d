"""Checks whether attention is invariant or equivariant when its inputs are permuted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.masks import Causal
from regard.nn import MultiHeadAttention
from regard.positions import Sinusoidal

TIGHT = 1e-12  # smaller differences are rounding errors


def random_permutations(n: int, moved: int, count: int, generator: torch.Generator) -> Tensor:
    """Permutations ``[count, n]`` that shift ``moved`` random positions in a cycle and leave the others."""
    permutations = torch.arange(n).repeat(count, 1)
    for row in permutations:
        chosen = torch.randperm(n, generator=generator)[:moved]
        row[chosen] = chosen.roll(1)
    return permutations


def relative_difference(a: Tensor, b: Tensor) -> float:
    """The largest ``‖a − b‖`` over the permutations, relative to the largest ``‖b‖``."""
    return float((a - b).flatten(1).norm(dim=-1).max() / b.flatten(1).norm(dim=-1).max())


def differences(function: Callable[[Tensor], Tensor], x: Tensor, permutations: Tensor) -> tuple[float, float, float]:
    """The differences of ``f(πX)`` from f(X), from π f(X), and between the means of f(πX) and f(X) over positions."""
    y = function(x)
    permuted = function(x[permutations])
    return (
        relative_difference(permuted, y.expand_as(permuted)),
        relative_difference(permuted, y[permutations]),
        relative_difference(permuted.mean(-2), y.mean(-2).expand(len(permutations), -1)),
    )


def check(
    *,
    n: int = 12,
    d: int = 16,
    heads: int = 2,
    permutations: int = 40,
    seed: int = 0,
    make: Callable[..., nn.Module] = MultiHeadAttention,
    position: Callable[[int], nn.Module] = Sinusoidal,
) -> Evidence:
    """Compare a layer's outputs for permuted inputs with its outputs, the permuted outputs, and their mean."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = random_normal(generator, n, d)
    layer = make(d, heads=heads).double()
    causal = make(d, heads=heads, mask=Causal()).double()
    code = position(d)
    sizes = list(range(2, n + 1, 2))
    plain = []
    masked = []
    positioned = []
    with torch.no_grad():
        for moved in sizes:
            orders = random_permutations(n, moved, permutations, generator)
            plain.append(differences(layer, x, orders))
            masked.append(differences(causal, x, orders))
            positioned.append(differences(lambda rows: layer(code(rows)), x, orders))
    from_same, from_permuted, from_mean = zip(*plain, strict=True)
    masked_from_permuted = [row[1] for row in masked]
    _, positioned_from_permuted, positioned_from_mean = zip(*positioned, strict=True)
    evidence.add_statement(
        "Attention is invariant: f(πX) = f(X).",
        max(from_same) < TIGHT,
        f"f(πX) differs from f(X) by {100 * min(from_same):.0f} to {100 * max(from_same):.0f}% of its norm",
    )
    evidence.add_correction(
        "It is equivariant: f(πX) = πf(X).",
        max(from_permuted) < TIGHT,
        f"f(πX) = πf(X) within {max(from_permuted):.1e}",
    )
    evidence.add_correction("The mean over positions is invariant.", max(from_mean) < TIGHT, f"{max(from_mean):.1e}")

    # Controls: their statements must be false.
    # A causal mask and added positions both treat positions differently, so neither may be equivariant.
    late = min(masked_from_permuted)
    evidence.add_control("With only a causal mask, it is equivariant.", late < TIGHT, f"difference {late:.2g}")
    added = min(positioned_from_permuted)
    evidence.add_control("With added positions, it is equivariant.", added < TIGHT, f"difference {added:.2g}")
    evidence.add_control("With added positions, the mean is invariant.", min(positioned_from_mean) < TIGHT)
    curves = {
        "f(πX) from f(X)": from_same,
        "f(πX) from πf(X)": from_permuted,
        "f(πX) from πf(X), causal mask": masked_from_permuted,
        "f(πX) from πf(X), positions added": positioned_from_permuted,
    }
    title = "how far off, by how many positions move"
    evidence.add_curves(title, sizes, curves, x="positions that move", y="difference relative to f(X)")
    evidence.numbers |= {"off invariance": max(from_same), "off equivariance": max(from_permuted)}
    evidence.numbers["off invariance of the mean"] = max(from_mean)
    return evidence


CLAIM = Claim(
    id="order-blind",
    title="Self-attention is permutation invariant",
    citations=(("exam-answers", "1 (d)"),),
    statement="Self-attention is permutation invariant: swapping positions does not change the representations.",
    formula=r"f(\pi X) = f(X) \quad \forall \pi",
    refuted_by="A permutation of the inputs that changes an output.",
    control="A layer with a causal mask, and one with positions added to its input: neither may be equivariant.",
    verdict=FALSE_AS_STATED,
    what_holds="Self-attention without positions and masks is permutation equivariant, f(πX) = πf(X). A pooled result "
    "is invariant.",
    correction="It is permutation equivariant, as the document's own formula says: f(πX) = πf(X). Each token keeps "
    "its vector, and the vectors move with the tokens. A pooled result, such as the mean over positions, is "
    "invariant. Positions break this symmetry, and so does a causal mask alone.",
    check=check,
)
