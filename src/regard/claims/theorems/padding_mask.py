"""Checks that under the padding mask, the content of the padding changes no bit of an output at a real position."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.masks import Mask, Padding
from regard.nn import Encoder
from regard.positions import Sinusoidal


def real_positions(n: int, length: int) -> Tensor:
    """``[3, n]``, True = real: with padding on the right, on the left, and in between."""
    index = torch.arange(n)
    between = (index * length) // n != ((index + 1) * length) // n
    return torch.stack([index < length, index >= n - length, between])


def replace_padding(x: Tensor, real: Tensor, generator: torch.Generator, size: float = 1e3) -> Tensor:
    """x with random numbers of a given size at padded positions."""
    noise = size * random_normal(generator, *x.shape).to(x)
    return torch.where(real.unsqueeze(-1), x, noise)


def changes(function: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, real: Tensor) -> tuple[float, float]:
    """The largest change from f(x) to f(y), at real and at padded positions. NaN and ∞ count as 1e308."""
    change = (function(x) - function(y)).abs().nan_to_num(nan=1e308, posinf=1e308)
    return float(change[real].max()), float(change[~real].max())


def largest_gradient(
    function: Callable[[Tensor], Tensor], x: Tensor, real: Tensor, generator: torch.Generator
) -> float:
    """The largest gradient of a random sum of real outputs with respect to padded inputs."""
    x = x.clone().requires_grad_()
    y = function(x)
    factors = random_normal(generator, *y.shape).to(y) * real.unsqueeze(-1)
    (grad,) = torch.autograd.grad((y * factors).sum(), x)
    return float(grad[~real].abs().max())


def changes_with_finite_mask(x: Tensor, y: Tensor, real: Tensor) -> tuple[list[float], list[float]]:
    """How much real outputs of one head change if padded scores are lowered by a finite B instead of ∞."""
    sizes = [float(size) for size in range(2, 32, 3)]
    differences = []
    for size in sizes:
        bias = torch.where(real, 0.0, -size).to(x)[:, None, None]
        q = x[:, None]
        change = attention(q, q, q, bias=bias) - attention(q, y[:, None], y[:, None], bias=bias)
        differences.append(float(change.squeeze(1).abs()[real].max()))
    return sizes, differences


def check(
    *,
    n: int = 12,
    length: int = 7,
    d: int = 16,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    hide: Callable[[Tensor], Mask | None] = Padding,
    attention_fn: AttentionFn = attention,
) -> Evidence:
    """Change the content of the padding, also to NaN, and compare outputs and gradients with and without the mask."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    encoder = Encoder(d, heads=heads, layers=layers, position=Sinusoidal(d)).double().eval()
    real = real_positions(n, length)
    x = random_normal(generator, 3, n, d)
    y = replace_padding(x, real, generator)
    mask = hide(real)

    def masked_encoder(z: Tensor) -> Tensor:
        out: Tensor = encoder(z, mask=mask)
        return out

    with torch.no_grad():
        real_change, padded = changes(masked_encoder, x, y, real)
        nan_change, _ = changes(masked_encoder, x, y.masked_fill(~real.unsqueeze(-1), math.nan), real)
        unmasked, _ = changes(encoder, x, y, real)
        short_error = largest_difference(encoder(x[:1, :length]), masked_encoder(x)[:1, :length])
        # In the operator alone, queries can stay while keys and values change.
        q, k, v = torch.randn(3, 3, 1, n, d, generator=generator).unbind()
        other_k = replace_padding(k[:, 0], real, generator)[:, None]
        other_v = replace_padding(v[:, 0], real, generator)[:, None]
        key_change = largest_difference(attention_fn(q, k, v, mask=mask), attention_fn(q, other_k, other_v, mask=mask))
    gradient = largest_gradient(masked_encoder, x, real, generator)
    evidence.add_statement(
        "Real outputs do not change in any bit.",
        real_change == 0,
        f"padding on the right, left and between changes real outputs by {real_change:g}, without the mask by "
        f"{unmasked:.2g}",
    )
    evidence.add_statement("Neither do they if the padding is NaN.", nan_change == 0, f"change {nan_change:g}")
    evidence.add_statement("No real output has a gradient by padding.", gradient == 0, f"gradient {gradient:g}")
    evidence.add_statement(
        "Real outputs are those of the sequence without padding.", short_error < 1e-12, f"within {short_error:.1e}"
    )
    evidence.add_statement(
        "If only padded keys and values change, no output changes, not even at padded queries.",
        key_change == 0,
        f"change {key_change:g}",
    )

    # Controls: their statements must be false.
    # Without the mask padding has weight, and a padded position is itself a query whose output follows its input.
    evidence.add_control("Without the mask, real outputs do not change.", unmasked == 0, f"change {unmasked:.2g}")
    evidence.add_control("Outputs at padded positions stay the same.", padded == 0, f"change {padded:.2g}")
    lines = {"largest change": changes_with_finite_mask(x, replace_padding(x, real, generator, 1.0), real)}
    evidence.add_series(
        "real outputs of one head when padded scores are lowered by B", lines, x="B", y="change", log="y"
    )
    evidence.numbers |= {"change with mask": real_change, "change without": unmasked}
    evidence.numbers["change at padded queries"] = padded
    return evidence


CLAIM = Claim(
    id="padding-mask",
    title="Under the padding mask, padding influences no output at a real position",
    citations=(("exam-answers", "2 (b)"), ("solution-sheet", "2 (b)")),
    statement="Under the padding mask, which sets the score of every padded key to −∞, padding influences no output "
    "at a real position, through any number of layers. Outputs at padded positions may change.",
    formula=r"s_{ij} = -\infty \quad \forall j \in P \quad \Rightarrow \quad "
    r"\frac{\partial y_i}{\partial x_j} = 0 \quad \forall i \notin P,\ j \in P",
    refuted_by="An output at a real position that changes in any bit when the content of the padding changes.",
    control="The same without the mask, and the outputs at padded positions, which are queries too: both must change.",
    verdict=HOLDS,
    check=check,
)
