"""``MaskTensor``: a mask value that models of ``transformers`` may use as a tensor.

``transformers`` asks regard for a mask and hands it to the layers. Most models pass it on untouched, and regard's
attention then reads the mask value: two numbers per row. Some models index the mask, repeat it, add it to scores or
copy it. They get an ordinary tensor, as if ``transformers`` itself had made the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.interp._deferred_tensor import QUESTIONS, DeferredTensor
from regard.masks import Mask

_MASK_VALUE = "regard_mask_value"  # the attribute of a dense mask that holds the mask value it was made from

# Operations that return the mask itself: it has no gradients, and its numbers are contiguous.
_UNCHANGED = frozenset({Tensor.detach, Tensor.contiguous, Tensor.cpu})

# These give the memory away: torch does not count the changes that follow.
_MEMORY = frozenset(
    {getattr(Tensor, "data").__get__, Tensor.numpy, Tensor.__array__, Tensor.data_ptr}  # noqa: B009
    | {Tensor.untyped_storage, Tensor.__dlpack__}
)

# Sums of scores and a mask. A bool mask has no meaning in them: transformers adds 0 or the lowest finite number.
_SUMS = frozenset(
    {torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, torch.ops.aten.add.Tensor}
)


class MaskTensor(DeferredTensor):
    """A bool mask ``[B, 1, n, m]`` (True = may attend) whose numbers are computed on first use.

    - ``regard_mask_value``: the mask value, which regard's attention reads.
    - ``make``: returns the ordinary bool tensor; it is called at most once.
    - ``dtype``: ``torch.bool``, or a floating-point dtype. A floating-point mask is 0 where a query may attend and the
      lowest finite number elsewhere, as ``transformers``' own eager masks are.

    In a sum with a floating-point tensor a bool mask has these numbers, too. Operations that change nothing return the
    mask itself. If the numbers change in place, also through a view, then they count, and the mask value does not.

    >>> mask = MaskTensor(regard.Causal(), lambda: torch.ones(2, 2).tril().bool()[None, None], (1, 1, 2, 2), "cpu")
    >>> mask.shape, mask.regard_mask_value._name()
    (torch.Size([1, 1, 2, 2]), 'Causal()')
    >>> mask[0, 0]
    tensor([[ True, False],
            [ True,  True]])
    >>> bool((torch.zeros(2, 2) + mask)[0, 0, 0, 1] < -1e38)
    True
    """

    regard_mask_value: Mask
    _version_at_first: int | None
    _gave_memory: bool

    @staticmethod
    def __new__(
        cls: Any,
        value: Mask,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        device: torch.device | str,
        dtype: torch.dtype = torch.bool,
    ) -> MaskTensor:
        mask: MaskTensor = DeferredTensor.__new__(cls, make, shape, dtype, device)
        mask.regard_mask_value = value
        mask._version_at_first = None
        mask._gave_memory = False
        return mask

    def dense(self) -> Tensor:
        if self._dense is None:
            numbers = super().dense()
            with torch._C.DisableTorchFunction():
                self._dense = _with_change_counter(numbers)
                self._version_at_first = self._dense._version
        assert self._dense is not None
        return self._dense

    def mask_value(self) -> Mask | None:
        """The mask value; None if the numbers may have changed since they were computed."""
        if self._gave_memory or (self._dense is not None and self._dense._version != self._version_at_first):
            return None
        return self.regard_mask_value

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """The mask as an ordinary floating-point tensor."""
        if self.dtype == torch.bool:
            return mask_as_numbers(self.dense(), dtype)
        return self.dense().to(dtype)

    def with_numbers(self, dtype: torch.dtype) -> MaskTensor:
        """The same mask as a floating-point one."""
        return MaskTensor(self.regard_mask_value, lambda: self.numbers(dtype), self.shape, self.device, dtype)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"MaskTensor({self.regard_mask_value._name()}, shape={list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in QUESTIONS and args and isinstance(args[0], MaskTensor) and _changes_nothing(func, args, kwargs):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)

    @classmethod
    def call_with_numbers(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func in _MEMORY:
            for arg in args:
                if isinstance(arg, MaskTensor):
                    arg._gave_memory = True
        if func in _SUMS:
            args = [_as_summand(arg, args) if isinstance(arg, MaskTensor) else arg for arg in args]
        return super().call_with_numbers(func, args, kwargs)


def _with_change_counter(x: Tensor) -> Tensor:
    """The same numbers in a tensor whose changes torch counts: those of inference mode have no counter."""
    if not x.is_inference():
        return x
    with torch.inference_mode(False):
        return x.clone()


def attach_mask_value(dense: Tensor, value: Mask) -> Tensor:
    """A dense mask from which ``mask_value_of`` reads this mask value as long as nothing changes it."""
    dense = _with_change_counter(dense)
    setattr(dense, _MASK_VALUE, (value, dense._version))
    return dense


def mask_value_of(mask: Any) -> Mask | None:
    """The mask value of a mask that regard made; None if it has none, or if it changed in place."""
    if isinstance(mask, MaskTensor):
        return mask.mask_value()
    value, version = getattr(mask, _MASK_VALUE, (None, None))
    return value if version is not None and mask._version == version else None


def _as_summand(mask: MaskTensor, summands: Any) -> Tensor:
    """The numbers that stand for a mask in a sum with a floating-point tensor; elsewhere the bool tensor."""
    for other in summands:
        if not isinstance(other, MaskTensor) and isinstance(other, Tensor) and other.is_floating_point():
            return mask.numbers(other.dtype)
    return mask.dense()


def mask_as_numbers(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a bool mask is True, the lowest finite number of the dtype elsewhere."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


def _changes_nothing(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation on a mask gives the same mask. Layers and hooks of ``accelerate`` make such calls."""
    mask: MaskTensor = args[0]
    if func in _UNCHANGED:
        return not kwargs and (func is not Tensor.cpu or mask.device.type == "cpu")
    if func is Tensor.bool:
        return mask.dtype == torch.bool
    if func is Tensor.__getitem__:
        return _selects_everything(mask, args[1])
    if func is Tensor.to:
        return _moves_nowhere(mask, args[1:], kwargs)
    return False


def _selects_everything(mask: Tensor, index: Any) -> bool:
    """Whether ``mask[index]`` is the whole mask: many layers cut it to the number of their keys."""
    if not isinstance(index, tuple) or len(index) > mask.ndim:
        return False
    for part, size in zip(index, mask.shape, strict=False):
        if not isinstance(part, slice) or part.indices(size) != (0, size, 1):
            return False
    return True


def _moves_nowhere(mask: Tensor, targets: Any, kwargs: dict[str, Any]) -> bool:
    """Whether ``mask.to(*targets, **kwargs)`` names the device and the dtype that the mask has."""
    device = kwargs.get("device", mask.device)
    dtype = kwargs.get("dtype", mask.dtype)
    for target in targets:
        if isinstance(target, Tensor):
            return False
        if isinstance(target, torch.dtype):
            dtype = target
        elif isinstance(target, str | torch.device):
            device = target
    return not kwargs.get("copy", False) and torch.device(device) == mask.device and dtype == mask.dtype
