"""Under the padding mask what stands at padded keys reaches no real position, not by a bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.masks import Mask, Padding
from regard.nn import Encoder
from regard.positions import Sinusoidal


def padded(n: int, length: int) -> Tensor:
    """``[3, n]``, True = real: padding on the right, on the left, and in between."""
    at = torch.arange(n)
    holes = (at * length) // n != ((at + 1) * length) // n
    return torch.stack([at < length, at >= n - length, holes])


def other(x: Tensor, real: Tensor, draw: torch.Generator, size: float = 1e3) -> Tensor:
    """x with something else where padding is."""
    noise = size * torch.randn(x.shape, generator=draw, dtype=torch.float64).to(x)
    return torch.where(real.unsqueeze(-1), x, noise)


def leak(f: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, real: Tensor) -> tuple[float, float]:
    """The largest change from f(x) to f(y), at real positions and at padded ones; what is no number counts as 1e308."""
    change = (f(x) - f(y)).abs().nan_to_num(nan=1e308, posinf=1e308)
    return float(change[real].max()), float(change[~real].max())


def by_gradient(f: Callable[[Tensor], Tensor], x: Tensor, real: Tensor, draw: torch.Generator) -> float:
    """The largest entry of the gradient, by padded inputs, of a random sum of real outputs."""
    x = x.clone().requires_grad_()
    y = f(x)
    weights = torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y) * real.unsqueeze(-1)
    (grad,) = torch.autograd.grad((y * weights).sum(), x)
    return float(grad[~real].abs().max())


def softly(x: Tensor, y: Tensor, real: Tensor) -> tuple[list[float], list[float]]:
    """How much real outputs of a head change when padded scores are lowered by B, and not by ∞."""
    sizes = [float(b) for b in range(2, 32, 3)]
    changes = []
    for b in sizes:
        bias = torch.where(real, 0.0, -b).to(x)[:, None, None]
        one, two = (attention(x[:, None], z[:, None], z[:, None], bias=bias).squeeze(1) for z in (x, y))
        changes.append(float((one - two).abs()[real].max()))
    return sizes, changes


def check(
    *,
    n: int = 12,
    length: int = 7,
    d: int = 16,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    hide: Callable[[Tensor], Mask | None] = Padding,
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """Other content, NaN among it, in the padding: outputs with the mask and without; and gradients."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    encoder = Encoder(d, heads=heads, layers=layers, position=Sinusoidal(d)).double().eval()
    real = padded(n, length)
    x = torch.randn(3, n, d, generator=draw, dtype=torch.float64)
    y, mask = other(x, real, draw), hide(real)
    with torch.no_grad():
        at_real, at_padded = leak(lambda z: encoder(z, mask=mask), x, y, real)
        broken = leak(lambda z: encoder(z, mask=mask), x, y.masked_fill(~real.unsqueeze(-1), math.nan), real)[0]
        unmasked = leak(encoder, x, y, real)[0]
        short = float((encoder(x[:1, :length]) - encoder(x, mask=mask)[:1, :length]).abs().max())
        q, k, v = torch.randn(3, 3, 1, n, d, generator=draw).unbind()
        k_new, v_new = (other(z[:, 0], real, draw)[:, None] for z in (k, v))
        keys = float((attend(q, k, v, mask=mask) - attend(q, k_new, v_new, mask=mask)).abs().max())
    slope = by_gradient(lambda z: encoder(z, mask=mask), x, real, draw)
    where = "right, left and between"
    found.written(
        "real outputs stay, bit for bit",
        at_real == 0,
        f"padding {where}: change {at_real:g}, without the mask {unmasked:.2g}",
    )
    found.written("even where padding holds NaN", broken == 0, f"change {broken:g}")
    found.written("no gradient of a real output by padding", slope == 0, f"gradient {slope:g}")
    found.written("real outputs are those of the sequence without its padding", short < 1e-12, f"within {short:.1e}")
    found.written("keys alone changed: no query notices, not a padded one either", keys == 0, f"change {keys:g}")
    found.control("without the mask real outputs stay", unmasked == 0, f"change {unmasked:.2g}")
    found.control("outputs at padded positions stay: they are queries too", at_padded == 0, f"change {at_padded:.2g}")
    found.draw(
        "real outputs of one head when padded scores are lowered by B",
        {"largest change": softly(x, other(x, real, draw, 1.0), real)},
        x="B",
        y="change",
        log="y",
    )
    found.numbers |= {"change with mask": at_real, "change without": unmasked, "change at padded queries": at_padded}
    return found


CLAIM = Claim(
    id="padding-mask",
    sources=("001", "003"),
    statement="Under the padding mask, −∞ for every padded key, padding influences no output at a real position, "
    "through any number of layers; what stands at padded positions themselves need not stay.",
    formula=r"s_{ij} = -\infty \quad \forall j \in P \quad \Rightarrow \quad "
    r"\frac{\partial y_i}{\partial x_j} = 0 \quad \forall i \notin P,\ j \in P",
    refuted="An output at a real position that changes by a bit when the content of the padding changes.",
    control="The same without the mask; and the outputs at padded positions, which are queries too.",
    verdict=HOLDS,
    check=check,
)
