"""Follow one axis of a tensor through operations that only change the layout, and remember which axes were joined."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

# Operations that split or join axes. Axes after the last one that changes keep their sizes.
RESHAPES = frozenset(
    {Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.unflatten, torch.unflatten}
    | {Tensor.view_as, Tensor.reshape_as, Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to}
)
SWAPS = frozenset({Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims})
PERMUTATIONS = frozenset({Tensor.permute, torch.permute})
LAST_TWO = frozenset({getattr(Tensor, "mT").__get__})  # noqa: B009
NEW_AXIS = frozenset({Tensor.unsqueeze, torch.unsqueeze})
REMOVED_AXIS = frozenset({Tensor.squeeze, torch.squeeze})

# Functions that take a tensor apart along its first axis.
PARTS = frozenset({torch.unbind, Tensor.unbind, Tensor.__getitem__, torch.select, Tensor.select})

LAYOUT_OPERATIONS = RESHAPES | SWAPS | PERMUTATIONS | LAST_TWO | NEW_AXIS | REMOVED_AXIS | {Tensor.__getitem__}


def follow_axis(func: Any, args: Any, kwargs: dict[str, Any], after: Tensor, axis: int) -> int | None:
    """Where an axis of the first argument is in the result ``after``; None if the operation splits, joins or cuts it.

    - ``axis``: not negative.

    >>> x = torch.zeros(2, 3, 4)
    >>> follow_axis(Tensor.transpose, (x, 0, 2), {}, x.transpose(0, 2), 2)
    0
    >>> follow_axis(Tensor.view, (x, 6, 4), {}, x.view(6, 4), 2)
    1
    >>> print(follow_axis(Tensor.view, (x, 2, 12), {}, x.view(2, 12), 2))
    None
    """
    before: Tensor = args[0]
    if func in SWAPS:
        first, second = _numbers(args, kwargs, ("dim0", "dim1"), ("axis0", "axis1"))
        swapped = {first % before.ndim: second % before.ndim, second % before.ndim: first % before.ndim}
        return swapped.get(axis, axis)
    if func in LAST_TWO:
        return {before.ndim - 1: before.ndim - 2, before.ndim - 2: before.ndim - 1}.get(axis, axis)
    if func in PERMUTATIONS:
        order = args[1:] or (kwargs["dims"],)
        if len(order) == 1 and isinstance(order[0], list | tuple):
            order = order[0]
        return [place % before.ndim for place in order].index(axis)
    if func in NEW_AXIS:
        (place,) = _numbers(args, kwargs, ("dim",), ("dim",))
        return axis + 1 if place % after.ndim <= axis else axis
    if func in REMOVED_AXIS:
        return _after_squeeze(before, after, args, kwargs, axis)
    if func is Tensor.__getitem__:
        return _after_indexing(before, args[1], axis)
    # From the right, sizes must be equal up to and including the axis.
    from_right = before.ndim - axis
    if after.ndim < from_right or after.shape[after.ndim - from_right :] != before.shape[axis:]:
        return None
    return after.ndim - from_right


def _numbers(args: Any, kwargs: dict[str, Any], names: tuple[str, ...], others: tuple[str, ...]) -> list[int]:
    values = list(args[1:])
    for name, other in list(zip(names, others, strict=True))[len(values) :]:
        values.append(kwargs[name] if name in kwargs else kwargs[other])
    return values


def _after_squeeze(before: Tensor, after: Tensor, args: Any, kwargs: dict[str, Any], axis: int) -> int | None:
    removed = [i for i in range(before.ndim) if before.shape[i] == 1]
    chosen = args[1] if len(args) > 1 else kwargs.get("dim")
    if chosen is not None:
        if isinstance(chosen, int):
            chosen = (chosen,)
        removed = [i for i in removed if i in [place % before.ndim for place in chosen]]
    if axis in removed:
        return None
    return axis - sum(i < axis for i in removed)


def _after_indexing(before: Tensor, index: Any, axis: int) -> int | None:
    """Slices and new axes keep an axis, unless the axis itself is cut: the remaining weights do not sum to 1."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(part is None or part is Ellipsis or isinstance(part, int | slice) for part in parts):
        return None
    taken = sum(isinstance(part, int | slice) for part in parts)
    if Ellipsis in [part for part in parts if part is Ellipsis]:
        place = next(i for i, part in enumerate(parts) if part is Ellipsis)
        parts = (*parts[:place], *[slice(None)] * (before.ndim - taken), *parts[place + 1 :])
    old = 0
    new = 0
    for part in parts:
        if part is None:
            new += 1
            continue
        if old == axis:
            is_whole = isinstance(part, slice) and part.indices(before.shape[axis]) == (0, before.shape[axis], 1)
            return new if is_whole else None
        if isinstance(part, slice):
            new += 1
        old += 1
    return new + axis - old


def varies_faster(x: Tensor, axis: int, other: int) -> bool:
    """Whether steps along an axis are shorter in memory than those along another one.

    >>> varies_faster(torch.zeros(3, 3), 1, 0), varies_faster(torch.zeros(3, 3), 0, 1)
    (True, False)
    """
    if x.shape[axis] <= 1 or x.shape[other] <= 1:
        return False
    return 0 < x.stride(axis) < x.stride(other)


class JoinedAxes:
    """Remembers tensors with an axis that was joined of two: ``[B, H, n, d]`` → ``[B·H, n, d]``.

    >>> joined = JoinedAxes()
    >>> x = torch.zeros(2, 3, 4, 5)
    >>> y = x.reshape(6, 4, 5)
    >>> joined.follow(Tensor.reshape, (x, 6, 4, 5), y)
    >>> joined.first_axis(y)
    (2, 3)
    """

    def __init__(self) -> None:
        # The axis, and the sizes of both.
        self._joined = WeakTensorKeyDictionary()

    def first_axis(self, x: Tensor) -> tuple[int, int] | None:
        """The sizes of the two axes that were joined to the first one; None if it is not known."""
        axis, first, second = self._joined.get(x, (None, 0, 0))
        return (first, second) if axis == 0 else None

    def follow(self, func: Any, args: Any, out: Any) -> None:
        """Remember what a function did to its first argument."""
        before = args[0] if args else None
        if not isinstance(before, Tensor):
            return
        if func in RESHAPES and isinstance(out, Tensor):
            self._note_reshape(before, out)
        elif func in PARTS and before in self._joined:
            # Queries, keys and values may be parts of one tensor [3, B·H, n, d].
            axis, first, second = self._joined[before]
            for part in tree_leaves(out):
                is_part = isinstance(part, Tensor) and part.shape == before.shape[1:]
                if is_part and axis > 0:
                    self._joined[part] = (axis - 1, first, second)

    def _note_reshape(self, before: Tensor, after: Tensor) -> None:
        if before.ndim != after.ndim + 1:
            return
        for axis in range(after.ndim - 2):
            if before.shape[axis] == before.shape[axis + 1] and varies_faster(before, axis, axis + 1):
                # Sizes do not tell batch entries from heads, and in memory they are in the other order.
                continue
            is_start_equal = after.shape[:axis] == before.shape[:axis]
            is_end_equal = after.shape[axis + 1 :] == before.shape[axis + 2 :]
            is_product = after.shape[axis] == before.shape[axis] * before.shape[axis + 1]
            if is_start_equal and is_end_equal and is_product:
                self._joined[after] = (axis, before.shape[axis], before.shape[axis + 1])
                return
