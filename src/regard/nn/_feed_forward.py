"""The position-wise feed-forward network: two linear layers with an activation between them; a third one if gated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_dtype, check_integer, check_probability, check_tensor, describe_value
from regard._errors import RegardError, RegardTypeError
from regard.nn._linear import Linear, apply_linears

Activation = str | Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
# Names of gated networks, and the activation of their gate.
GATED = {"swiglu": "silu", "geglu": "gelu"}


class FeedForward(nn.Module):
    """``FF(x) = h W_down + b_down``,  ``h = φ(x W_up + b_up)``, or gated ``h = φ(x W_gate + b_gate) ⊙ (x W_up + b_up)``

        x [*, D]      W_up, W_gate [D, D_ff]      W_down [D_ff, D_out]

    Each position is computed alone, with the same weights.

    - ``d``: D, the width of the input.
    - ``hidden``: D_ff, the width between the two layers.
    - ``activation``: φ, one of ``"relu"`` (default), ``"gelu"``, ``"gelu_tanh"``, ``"silu"``, or a function of a
      tensor. ``"swiglu"`` and ``"geglu"`` are the gated silu and the gated gelu.
    - ``gated``: use the gated form (default False).
    - ``d_out``: D_out (default D).
    - ``bias``: False leaves all biases out (default True).
    - ``dropout``: probability, applied to h in training only (default 0).

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
        self.d = check_integer("d", d, least=1)
        self.hidden = check_integer("hidden", hidden, least=1)
        self.d_out = check_integer("d_out", d_out if d_out is not None else d, least=1)
        self.activation, self.activation_function, gated = _resolve_activation(activation, gated)
        self.up = Linear(self.d, self.hidden, bias=bias)
        self.gate = Linear(self.d, self.hidden, bias=bias) if gated else None
        self.down = Linear(self.hidden, self.d_out, bias=bias)
        self.dropout = nn.Dropout(check_probability("dropout", dropout))

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → [*, D_out]``"""
        check_tensor("x", x)
        if x.ndim == 0 or x.shape[-1] != self.d:
            raise RegardError(f"x has shape {list(x.shape)}; this feed-forward takes vectors of {self.d}")
        check_dtype("x", x, self.up)

        if self.gate is None:
            hidden = self.activation_function(self.up(x))
        else:
            gate, up = apply_linears(x, self.gate, self.up)  # both [*, D_ff], from one read of x
            hidden = self.activation_function(gate) * up

        # The call of a module costs time even if it does nothing, so inference skips it.
        if self.training:
            hidden = self.dropout(hidden)
        return self.down(hidden)

    def extra_repr(self) -> str:
        text = f"{self.d} → {self.hidden} → {self.d_out}, {self.activation}"
        if self.gate is not None:
            text += " gated"
        return text


def _resolve_activation(activation: Activation, gated: bool) -> tuple[str, Callable[[Tensor], Tensor], bool]:
    """The name of an activation, its function, and whether the network is gated."""
    if callable(activation):  # a function has no entry in GATED, so ``gated`` decides
        return getattr(activation, "__name__", type(activation).__name__), activation, gated
    if not isinstance(activation, str):
        raise RegardTypeError(f"activation must be a name or a function of a tensor, got {describe_value(activation)}")
    if activation in GATED:
        activation = GATED[activation]
        gated = True
    if activation not in ACTIVATIONS:
        known = ", ".join((*ACTIVATIONS, *GATED))
        raise RegardError(f"activation must be a function or one of {known}; got {activation!r}")
    return activation, ACTIVATIONS[activation], gated
