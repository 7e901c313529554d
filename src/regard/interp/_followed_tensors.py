"""What is remembered of tensors while attention written by hand is followed, and which functions mean what for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard._hooks import Observer
from regard.interp._deferred_scores import DeferredScores
from regard.interp._deferred_tensor import DeferredTensor

# Weights of keys whose score is this much below the largest one of the row are 0 in every dtype.
HIDDEN_RANGE = 9000.0
# Functions that make something else of scores than weights that sum to 1.
OTHER_WEIGHTS = frozenset(
    {torch.exp, Tensor.exp, torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.relu, torch.relu, Tensor.relu}
    | {F.gumbel_softmax, F.softmin, F.elu, F.softplus}
)
# What these functions make of scores are no scores any more.
NO_SCORES = frozenset({F.layer_norm, F.rms_norm, F.group_norm, F.batch_norm, F.embedding, F.silu, F.gelu})

# Operations on weights that change no number, apart from rounding and dropout.
SAME_WEIGHTS = frozenset(
    {Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.double}
    | {Tensor.contiguous, Tensor.clone, Tensor.detach, torch.clone, torch.detach, F.dropout, torch.dropout}
)
# Operations that may set weights to 0.
ZEROS = frozenset(
    {Tensor.masked_fill, torch.masked_fill, Tensor.masked_fill_, torch.where, Tensor.where}
    | {Tensor.nan_to_num, torch.nan_to_num, Tensor.mul, Tensor.mul_, torch.mul, Tensor.__mul__, Tensor.__imul__}
)

_IN_PLACE_OPERATORS = frozenset(
    {"__iadd__", "__isub__", "__imul__", "__itruediv__", "__ifloordiv__", "__imod__", "__ipow__"}
    | {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
)


@dataclass(eq=False)
class Softmax:
    """A softmax over scores.

    - ``paths``: the observers of the module that computed it, with its path.
    - ``used``: whether its weights were multiplied with values in a way that was recognised.
    - ``exists``: False as long as its weights are deferred, and nobody needed their numbers.
    - ``measured``: which parts of its weights were measured.
    """

    paths: list[tuple[Observer, str]]
    used: bool = False
    exists: bool = True
    measured: set[Any] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class Weights:
    """What is known about a tensor of attention weights.

    - ``softmax``: where they come from; None if they were made by another function than softmax.
    - ``scores``: the input of the softmax, in the layout of the weights; None if it changed in place.
    - ``key_axis``: the axis that counts keys.
    - ``version``, ``scores_version``: how often both tensors had changed in place; None if torch does not count it.
    """

    softmax: Softmax | None
    scores: Tensor | None
    key_axis: int
    version: int | None
    scores_version: int | None


def first_tensor(args: Any) -> Tensor | None:
    """The first positional argument, if it is a tensor; models may also name all arguments."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    return None


def change_count(x: Tensor) -> int | None:
    """How often a tensor, or a view of it, changed in place; None in inference mode, where torch does not count it."""
    return None if x.is_inference() else x._version


def softmax_axis(args: Any, kwargs: dict[str, Any], ndim: int) -> int | None:
    axis = kwargs.get("dim")
    if axis is None and len(args) > 1:
        axis = args[1]
    return axis % ndim if isinstance(axis, int) else None


def has_deferred(args: Any, kwargs: dict[str, Any]) -> bool:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, DeferredScores):
            return True
        if isinstance(arg, list | tuple) and any(isinstance(x, DeferredScores) for x in arg):
            return True
    return False


def changes_in_place(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a torch function writes into a tensor that it is given. Torch's names tell: ``add_``, ``__iadd__`` …"""
    name: str = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or name in _IN_PLACE_OPERATORS
    return name.endswith("_") or kwargs.get("out") is not None or kwargs.get("inplace") is True


def may_share_memory(a: Tensor, b: Tensor) -> bool:
    if a is b:
        return True
    addresses = []
    for x in (a, b):
        numbers: Tensor | None = x
        if isinstance(x, DeferredTensor):
            numbers = x._dense
        if numbers is None:
            # What is not computed has no memory yet.
            return False
        try:
            addresses.append(numbers.untyped_storage().data_ptr())
        except (RuntimeError, NotImplementedError):
            # Tensors of other libraries may not say where their numbers are.
            return True
    return addresses[0] == addresses[1]
