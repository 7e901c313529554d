"""``Sources``: values at which linear paths begin, and what each of them contributes to a number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._devices import widest
from regard._errors import RegardError
from regard.interp._model_blocks import HEAD


@dataclass(frozen=True)
class Source:
    """Where a linear path begins.

    - ``kind``: ``"token embedding"``, ``"position embedding"``, ``"embedding"`` (of token types, for example),
      ``"head"``, ``"feed-forward"``, ``"other"`` (a layer that is neither, such as a state-space layer),
      ``"constant"``, or ``"unseen"``, which cannot be a part.
    - ``path``: the module, or the name of the parameter of a constant.
    - ``call``: the number of the call of this module.
    """

    kind: str
    path: str
    call: int = 0


class _Begin(torch.autograd.Function):
    """A copy of a value, at which a linear path begins. The backward pass reports the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, source: Source, sources: Sources) -> Tensor:
        ctx.save_for_backward(value)
        ctx.source = source
        ctx.sources = sources
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        (value,) = ctx.saved_tensors
        ctx.sources.receive(ctx.source, value, gradient)
        return None, None, None, None


class Sources:
    """The sources of one run, and what they contribute to a number that the run computed."""

    def __init__(self) -> None:
        # Filled in a backward pass. The gradients of heads are those of one row: its number, and [H, E].
        self.values: dict[Source, Tensor] = {}
        self.head_gradients: dict[Source, tuple[int, Tensor]] = {}
        self._order: dict[Source, None] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def receive(self, source: Source, value: Tensor, gradient: Tensor) -> None:
        """Called in a backward pass: add ⟨value, gradient⟩ to the contributions of a source."""
        # A value that has no influence may be anything, also NaN.
        products = torch.where(gradient == 0, 0.0, widest(value) * widest(gradient))
        if source.kind == HEAD:
            products = products.reshape(-1, *products.shape[-3:]).sum((0, 2, 3))
            rows = gradient.reshape(-1, *gradient.shape[-3:])
            used = (rows != 0).any(-1).any(1).nonzero()
            # Through the residual stream a token reaches its own logits only.
            if len(used) == 1 and used[0, 0] == 0:
                self.head_gradients[source] = (int(used[0, 1]), rows[0, :, used[0, 1]].clone())
        else:
            products = products.sum()
        self.values[source] = self.values.get(source, 0.0) + products

    def begin(self, value: Tensor, source: Source) -> Tensor:
        """A copy of a value, with a linear path that begins here."""
        if value.is_complex():
            raise RegardError(f"{source.path} adds complex numbers to the residual stream; they cannot be split")
        self._order.setdefault(source)
        begun: Tensor = _Begin.apply(self._anchor, value, source, self)
        return begun

    def contributions(self, value: Tensor, *, again: bool = False) -> dict[Source, Tensor]:
        """⟨x_c, ∂value/∂x_c⟩ of every source c with a linear path to a number: a number, or one per head ``[H]``.

        - ``again``: whether there will be another backward pass through the same graph.
        """
        self.values = {}
        self.head_gradients = {}
        if value.requires_grad:
            try:
                torch.autograd.grad(value, [self._anchor], retain_graph=again, allow_unused=True)
            except RuntimeError as error:
                raise RegardError(f"the model changes in place what its linear paths need: {error}") from error
        # In the order in which the model made them.
        return {source: self.values[source] for source in self._order if source in self.values}
