"""Attention scores that are not computed: what a model does with ``q @ k.T`` is written down instead.

From the product on, as long as the model only scales scores, adds to them, hides some, reshapes the batch axes and
takes the softmax, everything stays a few small tensors. At the product with values regard's own attention computes
the output from q, k and v, and no n × n matrix is made. As soon as the model does something else, the scores are
computed as the model wrote them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.interp._deferred_tensor import DeferredTensor
from regard.interp._mask_tensor import MaskTensor
from regard.interp._matrix_products import MatrixProduct
from regard.interp._score_parts import HIDDEN_BELOW, Part, Scores
from regard.interp._transformers_masks import CacheMask

SOFTMAXES = frozenset({torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax})
_SUMS = frozenset({torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__})
_PRODUCTS = frozenset({torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__})
_QUOTIENTS = frozenset({torch.div, Tensor.div, Tensor.__truediv__, Tensor.div_, Tensor.__itruediv__})
_FILLS = frozenset({torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_})
_MAXIMA = frozenset({torch.max, Tensor.max, torch.maximum, Tensor.maximum, torch.clamp, Tensor.clamp})
_CAST_METHODS = {
    Tensor.float: torch.float32,
    Tensor.double: torch.float64,
    Tensor.half: torch.float16,
    Tensor.bfloat16: torch.bfloat16,
}
_CASTS = frozenset({*_CAST_METHODS, Tensor.to, Tensor.type, Tensor.type_as})
_DROPOUTS = frozenset({F.dropout, torch.dropout})
# These return the same memory, so that a later change in place shows in both tensors.
_SAME_MEMORY = frozenset(
    {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unsqueeze, torch.unsqueeze, Tensor.squeeze, torch.squeeze}
    | {Tensor.contiguous, Tensor.detach, torch.detach}
)
_IN_PLACE = frozenset(
    {Tensor.add_, Tensor.__iadd__, Tensor.mul_, Tensor.__imul__, Tensor.div_, Tensor.__itruediv__, Tensor.masked_fill_}
)


class DeferredScores(DeferredTensor):
    """Scores, or the weights that their softmax is, which are not computed.

    - ``make``: computes them as the model wrote them.
    - ``scores``: what they are, before the softmax if the softmax was taken.
    - ``reads``: the tensors that they are computed from, as long as they are not computed.
    - ``before_softmax``: the deferred scores whose softmax this is; None for scores.
    - ``softmax_record``: what the caller remembers of the softmax.
    - ``was_changed``: whether the numbers changed in place after they were computed.
    """

    scores: Scores
    reads: tuple[Tensor, ...]
    before_softmax: DeferredScores | None
    softmax_record: Any
    was_changed: bool
    _made_of: DeferredScores | None
    _made_from_this: list[weakref.ref[DeferredScores]]

    @staticmethod
    def __new__(
        cls: Any,
        make: Callable[[], Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        scores: Scores,
        reads: tuple[Tensor, ...],
    ) -> DeferredScores:
        device = scores.q.tensor.device

        def make_as_at_first() -> Tensor:
            # Scores are only deferred where nothing asks for gradients and nothing changes dtypes.
            with torch.no_grad(), torch.autocast(device.type, enabled=False):
                return make()

        x: DeferredScores = DeferredTensor.__new__(cls, make_as_at_first, tuple(shape), dtype, device)
        x.was_changed = False
        x.scores = scores
        x.reads = reads
        x.before_softmax = None
        x.softmax_record = None
        x._made_of = None
        x._made_from_this = []
        return x

    @property
    def is_computed(self) -> bool:
        """Whether the numbers exist already."""
        return self._dense is not None

    @property
    def is_released(self) -> bool:
        """Whether the forward pass that made this ended: from then on it is a tensor like others."""
        return "scores" not in self.__dict__

    def dense(self) -> Tensor:
        numbers = super().dense()
        self.reads = ()
        return numbers

    def is_shared(self) -> bool:
        """Whether other deferred tensors were made from this one, or may have its memory."""
        return self._made_of is not None or any(ref() is not None for ref in self._made_from_this)

    def compute_what_depends(self) -> None:
        """Compute the numbers, and those of all deferred tensors that were made from this one."""
        self.dense()
        for ref in self._made_from_this:
            other = ref()
            if other is not None:
                other.compute_what_depends()

    def mark_changed(self) -> None:
        """Remember that the numbers changed in place; tensors with the same memory changed, too."""
        x: DeferredScores | None = self
        while x is not None:
            x.was_changed = True
            x = x._made_of

    def release(self) -> None:
        """Compute the numbers, and forget what they were made from."""
        self.dense()
        self.__dict__.pop("scores", None)
        self.before_softmax = None
        self.softmax_record = None
        self._made_of = None
        self._made_from_this = []


def defer_product(
    product: MatrixProduct, compute: Callable[[], Tensor], reads: tuple[Tensor, ...]
) -> DeferredScores | None:
    """Defer a product of queries and keys; None if it does not have that form.

    - ``compute``: calls the function that the model called.
    - ``reads``: the tensors that it was called with.
    """
    *lead, row, column = product.out_axes
    inner = (set(product.a_axes) & set(product.b_axes)) - set(product.out_axes)
    if len(inner) != 1 or row in product.b_axes or column in product.a_axes:
        return None
    if row not in product.a_axes or column not in product.b_axes:
        return None
    (width,) = inner
    a, b = product.a, product.b
    if set(product.a_axes) - {row, width} - set(lead) or set(product.b_axes) - {column, width} - set(lead):
        return None
    if a.dtype != b.dtype or a.device != b.device or product.alpha <= 0:
        return None
    q = _with_axes(a, product.a_axes, (*lead, row, width))
    k = _with_axes(b, product.b_axes, (*lead, column, width))
    batch = tuple(torch.broadcast_shapes(q.shape[:-2], k.shape[:-2]))
    shape = (*batch, q.shape[-2], k.shape[-2])
    added: tuple[Part, ...] = ()
    if product.added is not None:
        if not _broadcasts(product.added, shape) or isinstance(product.added, DeferredTensor):
            return None
        added = (Part(product.added, batch),)
    scores = Scores(Part(q, batch), Part(k, batch), (a, b), float(product.alpha), added)
    return DeferredScores(compute, shape, a.dtype, scores, reads)


def _with_axes(x: Tensor, axes: Sequence[str], order: Sequence[str]) -> Tensor:
    """A view of x with its axes in this order; an axis that it does not have is 1."""
    missing = [axis for axis in order if axis not in axes]
    x = x[(None,) * len(missing)]
    labels = [*missing, *axes]
    return x.permute([labels.index(axis) for axis in order])


def _broadcasts(x: Tensor, shape: Sequence[int]) -> bool:
    if x.ndim > len(shape):
        return False
    pairs = zip(reversed(x.shape), reversed(shape), strict=False)
    return all(size in (1, wanted) for size, wanted in pairs)


def continue_deferred(func: Any, args: Any, kwargs: dict[str, Any]) -> DeferredScores | None:
    """The result of a function of deferred scores, also deferred; None if their numbers are needed."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, DeferredScores)]
    if len(places) != 1 or any(isinstance(value, DeferredScores) for value in kwargs.values()):
        return None
    x: DeferredScores = args[places[0]]
    if x.is_computed or torch.is_autocast_enabled(x.device.type):
        return None
    if func in _IN_PLACE and (places[0] != 0 or x.is_shared()):
        return None
    # Single numbers count as they are now. Larger tensors are watched for changes: they are in ``reads``.
    args = tuple(_copy_if_single(arg) for arg in args)
    kwargs = {name: _copy_if_single(value) for name, value in kwargs.items()}
    step = _next_step(func, args, kwargs, x, places[0])
    if step is None or step.scores.needs_gradients():
        return None
    reads = x.reads
    if func not in _CASTS:
        others = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.ndim > 0]
        reads = (*reads, *(other for other in others if other is not x))
    if func in _IN_PLACE:
        return _change_in_place(func, args, kwargs, x, step, reads)
    result = DeferredScores(lambda: func(*_numbers(args), **kwargs), step.shape, step.dtype, step.scores, reads)
    result.before_softmax = x if func in SOFTMAXES else x.before_softmax
    result.softmax_record = x.softmax_record
    if func in _SAME_MEMORY or _returns_its_argument(func, x, step):
        result._made_of = x
    x._made_from_this.append(weakref.ref(result))
    return result


def _copy_if_single(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.ndim == 0 else x


def _numbers(args: Any) -> list[Any]:
    return [arg.dense() if isinstance(arg, DeferredScores) else arg for arg in args]


def _returns_its_argument(func: Any, x: DeferredScores, step: _Step) -> bool:
    """Whether a cast to the dtype that a tensor has, or dropout that drops nothing, returned the tensor itself."""
    return (func in _CASTS or func in _DROPOUTS) and step.dtype == x.dtype


def _change_in_place(
    func: Any, args: Any, kwargs: dict[str, Any], x: DeferredScores, step: _Step, reads: tuple[Tensor, ...]
) -> DeferredScores:
    make = x._make
    assert make is not None

    def change() -> Tensor:
        changed: Tensor = func(make(), *args[1:], **kwargs)
        return changed

    x._make = change
    x.scores = step.scores
    x.reads = reads
    return x


@dataclass(frozen=True)
class _Step:
    """What a function makes of deferred scores: their shape, their dtype and what they are."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    scores: Scores


def _next_step(func: Any, args: Any, kwargs: dict[str, Any], x: DeferredScores, place: int) -> _Step | None:
    """How a function changes deferred scores; None if it is not supported."""
    same = _Step(tuple(x.shape), x.dtype, x.scores)
    if func in _SAME_MEMORY:
        return _reshape(func, args, kwargs, x)
    if func in _CASTS:
        return _cast(func, args, kwargs, x)
    if func in _DROPOUTS:
        return same if place == 0 and not _drops_something(args, kwargs) else None
    if func in (Tensor.clone, torch.clone):
        return same
    # What follows makes other weights of weights.
    if x.before_softmax is not None:
        return None
    if func in SOFTMAXES:
        return _softmax(args, kwargs, x)
    if func in _FILLS:
        return _fill(args, kwargs, x)
    if func is torch.where or func is Tensor.where:
        return _where(args, kwargs, x)
    if kwargs or len(args) != 2:
        return _bounded_below(func, args, kwargs, x)
    other = args[1 - place]
    if func in _SUMS:
        return _add(other, x)
    if func in _PRODUCTS:
        return _multiply(_as_number(other), x)
    if func in _QUOTIENTS and place == 0:
        number = _as_number(other)
        return _multiply(1 / number if number else None, x)
    return _bounded_below(func, args, kwargs, x)


def _reshape(func: Any, args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    """The batch axes may be split and joined. Queries and keys must stay the last two."""
    if func in (Tensor.contiguous, Tensor.detach, torch.detach):
        return _Step(tuple(x.shape), x.dtype, x.scores)
    if args[0] is not x or 0 in x.shape:
        return None
    after = func(torch.empty(x.shape, dtype=x.dtype, device="meta"), *args[1:], **kwargs)
    if after.ndim < 3 or after.shape[-2:] != x.shape[-2:]:
        return None
    return _Step(tuple(after.shape), x.dtype, x.scores)


def _cast(func: Any, args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    if args[0] is not x or kwargs.keys() - {"dtype"}:
        return None
    if func in _CAST_METHODS:
        target = _CAST_METHODS[func]
    else:
        targets = [*args[1:], *kwargs.values()]
        if len(targets) != 1:
            return None
        target = targets[0]
        if isinstance(target, Tensor) and target.device == x.device:
            target = target.dtype
    if not isinstance(target, torch.dtype) or not target.is_floating_point:
        return None
    return _Step(tuple(x.shape), target, x.scores)


def _drops_something(args: Any, kwargs: dict[str, Any]) -> bool:
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", args[2] if len(args) > 2 else True)
    return bool(training) and p > 0


def _softmax(args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    dtype = kwargs.get("dtype")
    if args[0] is not x or dim not in (-1, x.ndim - 1):
        return None
    if len(args) > 2 or kwargs.keys() - {"dim", "dtype", "_stacklevel"}:
        return None
    return _Step(tuple(x.shape), x.dtype if dtype is None else dtype, x.scores)


def _add(other: Any, x: DeferredScores) -> _Step | None:
    if isinstance(other, MaskTensor):
        # The mask value stays, if its axes are those of the scores. A mask for a part of a cache's keys has others.
        value = other.mask_value()
        has_axes = x.ndim == 4 and other.shape[-2:] == x.shape[-2:] and other.shape[0] in (1, x.shape[0])
        if has_axes and value is not None and x.dtype != torch.float16 and not isinstance(value, CacheMask):
            masks = (*x.scores.masks, value)
            return _Step(tuple(x.shape), x.dtype, replace(x.scores, masks=masks))
        other = other.numbers(x.dtype)
    if not isinstance(other, Tensor) or not other.is_floating_point() or not _broadcasts(other, x.shape):
        return None
    if isinstance(other, DeferredTensor) or other.device != x.device:
        return None
    dtype = torch.promote_types(x.dtype, other.dtype) if other.ndim > 0 else x.dtype
    added = (*x.scores.added, Part(other, tuple(x.shape[:-2])))
    return _Step(tuple(x.shape), dtype, replace(x.scores, added=added))


def _multiply(number: float | None, x: DeferredScores) -> _Step | None:
    if number is None or not 0 < number < math.inf:
        return None
    # Scores of hidden keys must stay far below all others. Mask values stand for the lowest number of a dtype.
    hidden_score = x.scores.hidden_score * number
    if not hidden_score < HIDDEN_BELOW or (x.scores.masks and number < 1 / -HIDDEN_BELOW):
        return None
    # A product also changes what was added before.
    added = tuple(replace(part, tensor=part.tensor * number) for part in x.scores.added)
    scores = replace(x.scores, scale=x.scores.scale * number, added=added, hidden_score=hidden_score)
    return _Step(tuple(x.shape), x.dtype, scores)


def _as_number(x: Any) -> float | None:
    if isinstance(x, Tensor) and x.ndim == 0:
        # A number that is learned keeps its gradient.
        return None if x.requires_grad and torch.is_grad_enabled() else float(x)
    if isinstance(x, int | float) and not isinstance(x, bool):
        return float(x)
    return None


def _fill(args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    mask = kwargs.get("mask", args[1] if len(args) > 1 else None)
    value = kwargs.get("value", args[2] if len(args) > 2 else None)
    if args[0] is not x:
        return None
    return _hide(mask, value, x)


def _where(args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    """``where(condition, x, low)`` or ``where(condition, low, x)``."""
    if kwargs or len(args) != 3 or not isinstance(args[0], Tensor) or args[0].dtype != torch.bool:
        return None
    if args[1] is x:
        return _hide(~args[0], args[2], x)
    return _hide(args[0], args[1], x) if args[2] is x else None


def _hide(mask: Any, value: Any, x: DeferredScores) -> _Step | None:
    """Hide the keys at which a bool mask is True, if the number there is one of a hidden key."""
    number = _as_number(value)
    if number is None or not number < HIDDEN_BELOW:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not _broadcasts(mask, x.shape):
        return None
    if isinstance(mask, DeferredTensor):
        mask = mask.dense()
    if mask.device != x.device:
        return None
    hidden = (*x.scores.hidden, Part(mask, tuple(x.shape[:-2])))
    hidden_score = max(x.scores.hidden_score, number)
    return _Step(tuple(x.shape), x.dtype, replace(x.scores, hidden=hidden, hidden_score=hidden_score))


def _bounded_below(func: Any, args: Any, kwargs: dict[str, Any], x: DeferredScores) -> _Step | None:
    """A lower bound that is as low as the scores of hidden keys changes nothing that is visible."""
    bounds = [*args[1:], *kwargs.values()]
    if func not in _MAXIMA or args[0] is not x or len(bounds) != 1 or kwargs.keys() - {"min", "other"}:
        return None
    if func in (torch.max, Tensor.max) and not isinstance(bounds[0], Tensor):
        return None
    number = _as_number(bounds[0])
    if number is None or not number < HIDDEN_BELOW:
        return None
    return _Step(tuple(x.shape), x.dtype, x.scores)
