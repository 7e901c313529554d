"""What a norm does to a vector, as a kind, γ and β, read off a recorded call."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from regard.interp._circuits_probe import NormCall

NormKind = Literal["rms", "layer"] | None  # None: the layer reads the residual stream as it is

# How far a recorded number may be from the one that the found matrix gives, relative to the size of the tensor.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
HALF_TOLERANCE = 0.03


def normalise(x: Tensor, kind: NormKind) -> Tensor:
    """u: x scaled to the size √D, for "layer" after its mean is subtracted; None changes nothing.

    >>> normalise(torch.tensor([3.0, 1.0]), "layer").round()
    tensor([ 1., -1.])
    """
    if kind is None:
        return x
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * x.square().mean(-1, keepdim=True).clamp(min=1e-30).rsqrt()


def fold_norm(norm: NormCall) -> tuple[NormKind, Tensor, Tensor] | None:
    """What a norm does, from its recorded call: kind, γ and β; None if it is neither RMSNorm nor LayerNorm.

    γ is the module's weight, 1 + weight (Gemma) or 1: whichever gives the recorded output, up to a scale per row.
    """
    x = norm.x.reshape(-1, norm.x.shape[-1]).double()
    y = norm.y.reshape(-1, norm.y.shape[-1]).double()
    tolerance = 10 * TOLERANCE.get(norm.x.dtype, HALF_TOLERANCE)
    layer: Any = norm.layer
    ones = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
    weight = getattr(layer, "weight", None)
    gammas = [ones]
    if isinstance(weight, Tensor) and weight.shape == ones.shape:
        gammas = [weight.detach().cpu().double(), 1 + weight.detach().cpu().double()]
    bias = getattr(layer, "bias", None)
    beta = torch.zeros_like(ones)
    if isinstance(bias, Tensor) and bias.shape == ones.shape:
        beta = bias.detach().cpu().double()
    best = None
    for kind in ("rms", "layer"):
        u = normalise(x, kind)
        for gamma in gammas:
            expected = u * gamma
            scale = ((y - beta) * expected).sum(1, keepdim=True) / expected.square().sum(1, keepdim=True).clamp(
                min=1e-300
            )
            error = float((scale * expected + beta - y).norm() / y.norm().clamp(min=1e-300))
            if error <= tolerance and (best is None or error < best[0]):
                best = (error, kind, gamma, beta)
    if best is None:
        return None
    return best[1], best[2], best[3]  # type: ignore[return-value]
