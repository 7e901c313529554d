"""One token from logits: the likeliest, or drawn with a temperature from the likeliest few."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.shapes import integer, number

__all__ = ["Sampling"]


@dataclass(frozen=True)
class Sampling:
    """``p ∝ exp(logits / T)`` over the tokens that ``top_k`` and then ``top_p`` leave.

    - ``temperature`` T: 0 takes the likeliest token, the lowest id among equals.
    - ``top_k``: the k largest logits, and those equal to the smallest of them.
    - ``top_p``: the fewest tokens, likeliest first, whose probabilities reach p.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> Sampling()(logits)
    tensor([0])
    >>> Sampling(temperature=0.5, top_k=2).filtered(logits)
    tensor([[4., 2., -inf, -inf]])
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        nan = isinstance(self.temperature, float) and math.isnan(self.temperature)
        if nan or not 0 <= number("temperature", self.temperature) < math.inf:
            raise ValueError(f"temperature must be a finite number ≥ 0 (0 takes the likeliest), got {self.temperature}")
        if self.top_k is not None:
            integer("top_k", self.top_k, least=1)
        if self.top_p is not None and not 0 < number("top_p", self.top_p) <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            name = "top_k" if self.top_k is not None else "top_p"
            raise ValueError(f"{name} chooses whom to draw from, but temperature=0 draws nothing; give a temperature")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``logits [B, V] → ids [B]``"""
        if bool(logits.isnan().any()):
            raise ValueError("logits are NaN: weights or activations of this model are not finite")
        if self.temperature == 0:
            return logits.argmax(-1)
        weights = self.filtered(logits).softmax(-1)
        return torch.multinomial(weights, 1, generator=generator).squeeze(-1)

    def filtered(self, logits: Tensor) -> Tensor:
        """Logits over T in float32 at least, −inf where a token is left out."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = wide / self.temperature
        if not bool(scaled.isfinite().all()):  # a T so small that only differences count
            scaled = (wide - wide.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            least = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, at = scaled.sort(dim=-1, descending=True, stable=True)
            p = ordered.softmax(-1)
            unneeded = p.cumsum(-1) - p >= self.top_p  # what stands before it already reaches p
            scaled = scaled.masked_fill(unneeded.scatter(-1, at, unneeded), -math.inf)
        return scaled
