"""With padding on the right a causal decoder needs no padding mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import Decoder, Encoder

TIGHT = 1e-12


def right(n: int, lengths: Tensor) -> Tensor:
    """``[B, n]``, True = real."""
    return torch.arange(n) < lengths.unsqueeze(-1)


def left(n: int, lengths: Tensor) -> Tensor:
    """The same, with padding first."""
    return torch.arange(n) >= n - lengths.unsqueeze(-1)


def differences(model: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    """``[B, n]``: how far outputs are from each other with the padding mask and without."""
    with torch.no_grad():
        far: Tensor = (model(x, padding=real) - model(x)).abs().amax(-1)
    return far


def gradients(model: nn.Module, x: Tensor, counted: Tensor, padding: Tensor | None) -> Tensor:
    """What training would see: the gradient of a loss over the counted positions by all parameters."""
    out = model(x, padding=padding)
    loss = (out[..., :-1].sin() * out[..., 1:])[counted].sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in grads if g is not None])


def off(model: nn.Module, x: Tensor, real: Tensor, counted: Tensor) -> float:
    """How far gradients are from each other with the padding mask and without, relatively."""
    a, b = gradients(model, x, counted, real), gradients(model, x, counted, None)
    return float((a - b).norm() / a.norm())


def check(
    *,
    n: int = 12,
    shortest: int = 4,
    d: int = 16,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    make: Callable[..., nn.Module] = Decoder,
    place: Callable[[int, Tensor], Tensor] = right,
) -> Evidence:
    """A batch of unequal lengths with and without the padding mask: outputs, gradients, other padding."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    decoder, encoder = (kind(d, heads=heads, layers=layers).double().eval() for kind in (make, Encoder))
    lengths = torch.linspace(shortest, n, 4).long()
    x = torch.randn(4, n, d, generator=draw, dtype=torch.float64)
    real, first = place(n, lengths), left(n, lengths)
    far, wrong, free = (differences(*one) for one in ((decoder, x, real), (decoder, x, first), (encoder, x, real)))
    apart = float(far[real].max())
    bad = float(wrong[first].max())
    found.written(
        "real outputs are the same without the mask",
        apart < TIGHT,
        f"without the mask real outputs differ by {apart:g} (padded on the left: {bad:.2g})",
    )
    other = torch.where(real.unsqueeze(-1), x, 100 * torch.randn(x.shape, generator=draw, dtype=torch.float64))
    with torch.no_grad():
        change = float((decoder(other) - decoder(x))[real].abs().max())
    found.written("without it other padding changes no bit of them", change == 0, f"change {change:g}")
    grads = off(decoder, x, real, real)
    found.written("gradients of a loss over real positions are the same", grads < TIGHT, f"difference {grads:g}")
    found.control("padding on the left: the same", bad < TIGHT, f"{bad:.2g} off")
    found.control("no causal mask: the same", float(free[real].max()) < TIGHT, f"{float(free[real].max()):.2g} off")
    everywhere = off(decoder, x, real, torch.ones_like(real))
    found.control("a loss over padded positions too: the same gradients", everywhere < TIGHT, f"{everywhere:.2g} off")
    lines = {
        name: (range(1, n + 1), row.tolist())
        for name, row in {"padded on the right": far[0], "padded on the left": wrong[0]}.items()
    }
    found.draw(f"with and without the mask, {shortest} of {n} real", lines, x="position", y="largest difference")
    found.numbers |= {"right": apart, "left": bad, "loss over padding": everywhere}
    return found


CLAIM = Claim(
    id="causal-makes-right-padding-free",
    sources=("003",),
    statement="A decoder under the causal mask needs no padding mask where padding stands on the right: outputs at "
    "real positions, and gradients of a loss over them, are the same without it.",
    formula=r"j \le i < \ell \quad \Rightarrow \quad j < \ell",
    refuted="An output at a real position that differs with the padding mask and without, or changes with the padding.",
    control="Padding on the left; no causal mask; and a loss that counts padded positions.",
    verdict=HOLDS,
    check=check,
)
