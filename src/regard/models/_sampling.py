"""Chooses one token from logits: the most likely one, or a random one with temperature, top-k and top-p."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import check_integer, check_number
from regard._errors import RegardError


@dataclass(frozen=True)
class Sampling:
    """``p ∝ exp(logits / T)`` over the tokens that ``top_k`` and then ``top_p`` leave.

    - ``temperature``: T. 0 (default) takes the most likely token, and the lowest id among equal ones.
    - ``top_k``: keep the k largest logits, and any logits equal to the k-th (default None: all).
    - ``top_p``: keep the fewest tokens, most likely first, whose probabilities reach p (default None: all).

    >>> logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    >>> Sampling()(logits)
    tensor([0])
    >>> Sampling(temperature=0.5, top_k=2).filter(logits)
    tensor([[4., 2., -inf, -inf]])
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        # NaN is tested first: check_number would refuse it without saying what is accepted.
        is_nan = isinstance(self.temperature, float) and math.isnan(self.temperature)
        if is_nan or not 0 <= check_number("temperature", self.temperature) < math.inf:
            raise RegardError(
                f"temperature must be a finite number ≥ 0 (0 takes the most likely token), got {self.temperature}"
            )
        if self.top_k is not None:
            check_integer("top_k", self.top_k, least=1)
        if self.top_p is not None and not 0 < check_number("top_p", self.top_p) <= 1:
            raise RegardError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            name = "top_k" if self.top_k is not None else "top_p"
            raise RegardError(f"{name} restricts random draws, but temperature=0 draws nothing; give a temperature")

    def __call__(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """``logits [B, V] → ids [B]``"""
        if bool(logits.isnan().any()):
            raise RegardError("logits are NaN: weights or activations of this model are not finite")
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.filter(logits).softmax(-1)
        return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)

    def filter(self, logits: Tensor) -> Tensor:
        """Logits divided by T, in at least float32; −inf for tokens that are left out."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = wide / self.temperature
        if not bool(scaled.isfinite().all()):
            # T is so small that the division overflows; differences from the largest logit are enough.
            scaled = (wide - wide.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        if self.top_k is not None and self.top_k < scaled.shape[-1]:
            smallest = scaled.topk(self.top_k).values[..., -1:]
            scaled = scaled.masked_fill(scaled < smallest, -math.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = scaled.sort(dim=-1, descending=True, stable=True)  # stable: the lowest id first
            p = ordered.softmax(-1)  # [B, V]
            unneeded = p.cumsum(-1) - p >= self.top_p  # the tokens before it already reach top_p
            scaled = scaled.masked_fill(unneeded.scatter(-1, order, unneeded), -math.inf)
        return scaled
