"""The position-wise feed-forward network: two linear maps with a non-linearity between, gated or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from regard.nn.linear import Linear, several
from regard.positions.common import check_dtype, described, probability
from regard.shapes import check_tensor, integer

__all__ = ["ACTIVATIONS", "FeedForward"]

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
GATED = {"swiglu": "silu", "geglu": "gelu"}


class FeedForward(nn.Module):
    """``FF(x) = h W_down + b_down``,  ``h = φ(x W_up + b_up)``, or gated ``h = φ(x W_gate + b_gate) ⊙ (x W_up + b_up)``

        x [*, D]      W_up, W_gate [D, D_ff]      W_down [D_ff, D_out]      D_ff = hidden, D_out = d_out (default D)

    Each position is treated alone and alike. ``activation`` φ: ``"relu"``, ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, or
    any function of a tensor; ``"swiglu"`` and ``"geglu"`` are the gated silu and gelu. ``bias=False`` leaves all biases
    out. Dropout, in training, falls on the hidden vector.

    >>> FeedForward(3, 7)
    FeedForward(
      3 → 7 → 3, relu
      (up): Linear(in_features=3, out_features=7, bias=True)
      (down): Linear(in_features=7, out_features=3, bias=True)
      (dropout): Dropout(p=0.0, inplace=False)
    )
    """

    def __init__(
        self,
        d: int,
        hidden: int,
        *,
        activation: Activation = "relu",
        gated: bool = False,
        d_out: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.d, self.hidden = integer("d", d, least=1), integer("hidden", hidden, least=1)
        self.d_out = integer("d_out", d if d_out is None else d_out, least=1)
        self.activation, self.phi, gated = _resolve(activation, gated)
        self.up = Linear(self.d, self.hidden, bias=bias)
        self.gate = Linear(self.d, self.hidden, bias=bias) if gated else None
        self.down = Linear(self.hidden, self.d_out, bias=bias)
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → [*, D_out]``"""
        check_tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.d:
            raise ValueError(f"x has shape {list(x.shape)}; this feed-forward takes vectors of {self.d}: [*, {self.d}]")
        check_dtype("x", x, self.up)
        if self.gate is None:
            hidden = self.phi(self.up(x))
        else:
            gate, up = several(x, self.gate, self.up)
            hidden = self.phi(gate) * up
        return self.down(self.dropout(hidden) if self.training else hidden)

    def extra_repr(self) -> str:
        return f"{self.d} → {self.hidden} → {self.d_out}, {self.activation}" + (
            " gated" if self.gate is not None else ""
        )


def _resolve(activation: Activation, gated: bool) -> tuple[str, Callable[[Tensor], Tensor], bool]:
    """The name, the function and whether it is gated."""
    if callable(activation):
        return getattr(activation, "__name__", type(activation).__name__), activation, gated
    if not isinstance(activation, str):
        raise TypeError(f"activation must be a name or a function of a tensor, got {described(activation)}")
    if activation in GATED:
        activation, gated = GATED[activation], True
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"activation must be a function or one of {', '.join((*ACTIVATIONS, *GATED))}; got {activation!r}"
        )
    return activation, ACTIVATIONS[activation], gated
