"""Checks that a causal decoder needs no padding mask if the padding is on the right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import Decoder, Encoder

TIGHT = 1e-12


def pad_right(n: int, lengths: Tensor) -> Tensor:
    """``[B, n]``, True = real, with padding on the right."""
    return torch.arange(n) < lengths.unsqueeze(-1)


def pad_left(n: int, lengths: Tensor) -> Tensor:
    """``[B, n]``, True = real, with padding on the left."""
    return torch.arange(n) >= n - lengths.unsqueeze(-1)


def output_differences(model: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    """How much each output differs with and without the padding mask, ``[B, n]``."""
    with torch.no_grad():
        difference: Tensor = (model(x, padding=real) - model(x)).abs().amax(-1)
    return difference


def gradients(model: nn.Module, x: Tensor, counted: Tensor, padding: Tensor | None) -> Tensor:
    """The gradient of a loss over the counted positions with respect to all parameters."""
    out = model(x, padding=padding)
    # The loss is not symmetric in the features, so that no gradients cancel.
    loss = (out[..., :-1].sin() * out[..., 1:])[counted].sum()
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return torch.cat([grad.flatten() for grad in grads if grad is not None])


def gradient_difference(model: nn.Module, x: Tensor, real: Tensor, counted: Tensor) -> float:
    """The relative difference of the gradients with and without the padding mask."""
    masked = gradients(model, x, counted, real)
    unmasked = gradients(model, x, counted, None)
    return float((masked - unmasked).norm() / masked.norm())


def check(
    *,
    n: int = 12,
    shortest: int = 4,
    d: int = 16,
    heads: int = 2,
    layers: int = 2,
    seed: int = 0,
    make: Callable[..., nn.Module] = Decoder,
    place: Callable[[int, Tensor], Tensor] = pad_right,
) -> Evidence:
    """Run a batch of unequal lengths with and without the padding mask; compare outputs and gradients."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    decoder = make(d, heads=heads, layers=layers).double().eval()
    encoder = Encoder(d, heads=heads, layers=layers).double().eval()
    lengths = torch.linspace(shortest, n, 4).long()  # from the shortest to a full sequence
    x = random_normal(generator, 4, n, d)
    real = place(n, lengths)
    real_left = pad_left(n, lengths)
    right = output_differences(decoder, x, real)
    left = output_differences(decoder, x, real_left)
    right_error = float(right[real].max())
    left_error = float(left[real_left].max())
    evidence.add_statement(
        "Outputs at real positions are the same without the padding mask.",
        right_error < TIGHT,
        f"without the mask, outputs at real positions differ by {right_error:g} (padded on the left: {left_error:.2g})",
    )
    other_padding = torch.where(real.unsqueeze(-1), x, 100 * random_normal(generator, *x.shape))
    with torch.no_grad():
        change = float((decoder(other_padding) - decoder(x))[real].abs().max())
    evidence.add_statement("Without the mask, other padding changes no bit.", change == 0, f"they change by {change:g}")
    real_loss = gradient_difference(decoder, x, real, real)
    evidence.add_statement(
        "Gradients of a loss over real positions are too.", real_loss < TIGHT, f"they differ by {real_loss:g}"
    )

    # Controls: their statements must be false.
    # In each control a real output, or the loss, can see padding: the mask must then make a difference.
    evidence.add_control(
        "Padded on the left, outputs are the same.", left_error < TIGHT, f"they differ by {left_error:.2g}"
    )
    encoder_error = float(output_differences(encoder, x, real)[real].max())
    evidence.add_control(
        "Without the causal mask, outputs are the same.", encoder_error < TIGHT, f"they differ by {encoder_error:.2g}"
    )
    full_loss = gradient_difference(decoder, x, real, torch.ones_like(real))
    evidence.add_control(
        "Gradients of a loss over all positions are the same.", full_loss < TIGHT, f"they differ by {full_loss:.2g}"
    )
    curves = {"padded on the right": right[0].tolist(), "padded on the left": left[0].tolist()}
    title = f"with and without the mask, {shortest} of {n} real"
    evidence.add_curves(title, range(1, n + 1), curves, x="position", y="difference")
    evidence.numbers |= {"right": right_error, "left": left_error, "loss over all positions": full_loss}
    return evidence


CLAIM = Claim(
    id="causal-makes-right-padding-free",
    title="A causal decoder with padding on the right needs no padding mask",
    citations=(("solution-sheet", "2 (b)"),),
    statement="A decoder with the causal mask needs no padding mask if the padding is on the right: outputs at real "
    "positions, and gradients of a loss over them, are the same without it.",
    formula=r"j \le i < \ell \quad \Rightarrow \quad j < \ell",
    refuted_by="An output at a real position that differs with and without the padding mask, or that changes with the "
    "content of the padding.",
    control="Padding on the left; no causal mask; and a loss that counts padded positions.",
    verdict=HOLDS,
    check=check,
)
