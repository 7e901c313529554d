"""``DeferredTensor``: a tensor whose numbers are computed on first use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

# Questions about a tensor that do not need its numbers.
_PROPERTIES = ["shape", "ndim", "dtype", "device", "layout", "requires_grad"]
_PROPERTIES += ["is_cuda", "is_meta", "is_sparse", "is_quantized"]
QUESTIONS = frozenset({getattr(Tensor, name).__get__ for name in _PROPERTIES}) | frozenset(
    {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.__len__}
    | {Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous}
    | {torch.is_floating_point, torch.is_complex, torch.numel}
)


class DeferredTensor(Tensor):
    """A tensor that has a shape, a dtype and a device, and whose numbers are computed on first use.

    Every operation except those of ``QUESTIONS`` works on the ordinary tensor and returns an ordinary tensor.
    ``make`` returns the ordinary tensor; it is called at most once.

    >>> made = []
    >>> x = DeferredTensor(lambda: made.append(1) or torch.ones(2, 3), (2, 3), torch.float32, "cpu")
    >>> x.shape, made
    (torch.Size([2, 3]), [])
    >>> (x + x).sum(), type(x + x), made
    (tensor(12.), <class 'torch.Tensor'>, [1])
    """

    _make: Callable[[], Tensor] | None
    _dense: Tensor | None

    @staticmethod
    def __new__(
        cls: Any,
        make: Callable[[], Tensor],
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Any:
        x: DeferredTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        x._make = make
        x._dense = None
        return x

    def __init__(self, *args: Any) -> None:
        super().__init__()

    def dense(self) -> Tensor:
        """The ordinary tensor."""
        if self._dense is None:
            assert self._make is not None
            # What follows a model's functions must not follow these.
            with torch._C.DisableTorchFunction():
                self._dense = self._make()
            # What the numbers were made from is not needed any more.
            self._make = None
        return self._dense

    def __repr__(self) -> str:  # type: ignore[override]
        if self._dense is not None:
            return repr(self._dense)
        return f"{type(self).__name__}(shape={list(self.shape)}, {self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy is an ordinary tensor.
        return self.dense().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.dense().clone()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in QUESTIONS:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return cls.call_with_numbers(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Operations that start in C++ arrive here only.
        return cls.call_with_numbers(func, args, kwargs or {})

    @classmethod
    def call_with_numbers(cls, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Call ``func`` with ordinary tensors in place of deferred ones, also in lists and dictionaries."""
        args, kwargs = tree_map_only(DeferredTensor, lambda x: x.dense(), (args, kwargs))
        return func(*args, **kwargs)
