"""Follow the outputs of heads from the attention call to the layer that reads them, through layouts and casts."""

from __future__ import annotations

import threading
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from regard.interp._axis_tracking import LAYOUT_OPERATIONS, PARTS
from regard.interp._followed_tensors import SAME_WEIGHTS

# What these functions return holds the same numbers, or a part of them, up to rounding.
_FOLLOWED = (
    LAYOUT_OPERATIONS
    | PARTS
    | SAME_WEIGHTS
    | {torch.movedim, Tensor.movedim, torch.moveaxis, Tensor.moveaxis, torch.t, Tensor.t, getattr(Tensor, "T").__get__}  # noqa: B009
    | {torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.narrow, Tensor.narrow}
)


class HeadOutput(Protocol):
    """The output of the heads of one call."""

    def moved(self, tensor: Tensor, heads: Tensor | None) -> None:
        """The model goes on with ``tensor``; ``heads`` is a view of it, ``[*B, H, n, E]``, if that is known."""

    def note_change(self, target: Tensor) -> None:
        """Something writes into a tensor whose changes torch does not count."""


class HeadOutputs(threading.local):
    """The tensors of this thread that hold outputs of heads."""

    def __init__(self) -> None:
        # Several observers may follow the same output.
        self._outputs = WeakTensorKeyDictionary()

    def is_empty(self) -> bool:
        """Whether nothing is followed."""
        return not self._outputs.data

    def add(self, tensor: Tensor, output: HeadOutput) -> None:
        """Follow a tensor."""
        self._outputs[tensor] = (*self._outputs.get(tensor, ()), output)

    def of(self, tensor: Tensor) -> tuple[Any, ...]:
        """The outputs that a tensor holds, or holds a part of."""
        outputs: tuple[Any, ...] = self._outputs.get(tensor, ())
        return outputs

    def pass_on(self, before: Tensor, after: Tensor, heads: Tensor | None = None) -> None:
        """The model gets ``after``, which holds the numbers of ``before``."""
        if after is before or self.is_empty():
            return
        outputs = self.of(before)
        if outputs:
            self._outputs[after] = outputs
        for output in outputs:
            output.moved(after, heads)

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Follow what a torch function made of its first argument."""
        if func not in _FOLLOWED or not args or not isinstance(args[0], Tensor):
            return
        outputs = self.of(args[0])
        if not outputs:
            return
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor is not args[0]:
                self._outputs[tensor] = outputs

    def note_change(self, target: Tensor) -> None:
        """Something writes into a tensor whose changes torch does not count."""
        for outputs in list(self._outputs.values()):
            for output in outputs:
                output.note_change(target)


head_outputs = HeadOutputs()
