"""What attention scores are made of: queries, keys, a scale, and what is added to them or hides keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.masks import Dense, Mask

# Scores below this number are those of hidden keys: −10⁹, the lowest number of a dtype, or −∞. Numbers above it, like
# −10⁴, are added or left to the model, because nothing says that scores are much smaller.
HIDDEN_BELOW = -1e8


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor with batch axes that broadcast to ``lead``, the batch axes that the scores had when it came to them."""

    tensor: Tensor
    lead: tuple[int, ...]

    def with_heads(self, B: int, H: int) -> Tensor:
        """``[B, H, rows, columns]``; B or H is 1 if the part is the same for all batch entries or heads."""
        x = self.tensor
        x = x.reshape(*[1] * (len(self.lead) + 2 - x.ndim), *x.shape)
        *own, rows, columns = x.shape
        if math.prod(own) == 1:
            return x.reshape(1, 1, rows, columns)
        if len(own) > 1 and self.lead[-1] == H:
            # An axis of heads of its own stays apart, so that what is equal for all heads is not repeated.
            batch = own[:-1]
            if math.prod(batch) > 1:
                batch = list(self.lead[:-1])
            return x.expand(*batch, own[-1], rows, columns).reshape(math.prod(batch), own[-1], rows, columns)
        return x.expand(*self.lead, rows, columns).reshape(B, H, rows, columns)


@dataclass(frozen=True, eq=False)
class Scores:
    """``scale · q kᵀ + Σ added``, hidden where a mask says so.

    - ``q [*lead, n, d]``, ``k [*lead, m, d]``.
    - ``added``: floating-point tensors; ``hidden``: bool tensors, True = hidden. They broadcast to ``[*lead, n, m]``.
    - ``hidden_score``: the largest score of a hidden key.
    - ``masks``: mask values.
    - ``factors``: queries and keys as the model multiplied them.
    """

    q: Part
    k: Part
    factors: tuple[Tensor, Tensor]
    scale: float = 1.0
    added: tuple[Part, ...] = ()
    hidden: tuple[Part, ...] = ()
    hidden_score: float = -math.inf
    masks: tuple[Mask, ...] = ()

    def operands(self) -> list[Tensor]:
        """The tensors that the scores are made of."""
        return [part.tensor for part in (self.q, self.k, *self.added, *self.hidden)]

    def needs_gradients(self) -> bool:
        """Whether autograd would follow what is made of these scores now."""
        return torch.is_grad_enabled() and any(operand.requires_grad for operand in self.operands())

    def attention_options(self, B: int, H: int) -> dict[str, Any] | None:
        """The options ``scale``, ``mask`` and ``bias`` of ``regard.attention``; None if some query sees no key.

        Such a query gives 0 in ``regard.attention``, and with a large negative number in place of −∞ the mean.
        """
        bias = None
        hidden = [part.with_heads(B, H) for part in self.hidden]
        for part in self.added:
            numbers = part.with_heads(B, H)
            is_hidden = numbers < HIDDEN_BELOW
            if bool(is_hidden.any()):
                hidden.append(is_hidden)
                numbers = numbers.masked_fill(is_hidden, 0)
                if not bool(numbers.any()):
                    continue
            bias = numbers if bias is None else bias + numbers
        mask: Mask | None = None
        if hidden:
            visible = ~hidden[0]
            for other in hidden[1:]:
                visible = visible & ~other
            if not bool(visible.any(-1).all()):
                return None
            mask = Dense(visible)
        for value in self.masks:
            mask = value if mask is None else mask & value
        return {"scale": self.scale, "mask": mask, "bias": bias}
