"""Which modules of a model run at the moment, with their paths and with the padding masks they were called with."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

# The names that models give to their number of heads.
HEAD_COUNT_NAMES = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "num_head",
    "nhead",
    "attention_heads",
    "num_attn_heads",
)


class ContextHook:
    """A hook of a module within a context. In a copy of the module, or in a saved one, it does nothing."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> ContextHook:
        return ContextHook(_do_nothing)

    def __reduce__(self) -> Any:
        return ContextHook, (_do_nothing,)


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


@dataclass(frozen=True, eq=False)
class RunningModule:
    """A module that runs.

    - ``path``: its path in the model.
    - ``sizes``: the shape of its first tensor; empty if it has none.
    - ``real``: which tokens are not padding, bool ``[B, n]``, as a model of transformers above it was told; None if
      all are, or if nothing says so.
    """

    path: str
    module: nn.Module
    sizes: tuple[int, ...]
    real: Tensor | None

    @property
    def batch_size(self) -> int | None:
        """The first dimension of its first tensor; None if it has none."""
        return self.sizes[0] if self.sizes else None


class RunningModules(threading.local):
    """The modules of one model that run in this thread, the innermost last. Other threads may run the same model."""

    def __init__(self) -> None:
        self.stack: list[RunningModule] = []
        # Called at the end of a forward pass with its result, which it may replace.
        self.at_end: Callable[[Any], Any] | None = None

    @property
    def innermost(self) -> RunningModule | None:
        """The module whose code runs now; None outside of the model."""
        return self.stack[-1] if self.stack else None

    @property
    def batch_size(self) -> int | None:
        """The batch size of the innermost module; None if nothing says it."""
        return self.stack[-1].batch_size if self.stack else None

    def real_queries(self, batch_size: int, n: int, m: int) -> Tensor | None:
        """Which query rows of a self-attention call are real, bool ``[B, n]``; None if all are or nothing says it."""
        real = self.stack[-1].real if self.stack else None
        if real is None or n != m or tuple(real.shape) != (batch_size, n):
            return None
        return real

    def head_count(self, total: int) -> int | None:
        """The number of heads of the attention that runs, if one axis has ``total`` batch entries and heads together.

        None if nothing says it, or if it is ambiguous. The module itself may name its number of heads, or its batch
        size tells, or the module around it names a number.
        """
        if not self.stack:
            return None
        own = _named_head_count(self.stack[-1].module)
        batch_size = self.stack[-1].batch_size
        if own is not None:
            # A batch of as many entries may belong to one head of a loop over heads.
            if total % own or (batch_size == total and own > 1):
                return None
            return own
        if batch_size == total:
            return 1
        if len(self.stack) > 1:
            outer = _named_head_count(self.stack[-2].module)
            if outer is not None and total % outer == 0:
                return outer
        if batch_size and total % batch_size == 0:
            return total // batch_size
        return None

    def may_have_batch_size(self, batch_size: int, heads: int) -> bool:
        """Whether weights ``[batch_size, heads, n, m]`` fit the inputs of the modules that run.

        A module may cut its input into windows, and the sequence may come first.
        """
        sizes = self.stack[-1].sizes if self.stack else ()
        if not sizes or sizes[0] == batch_size:
            return True
        if sizes[0] == heads:
            return False
        if len(sizes) == 3 and sizes[1] == batch_size:
            return True
        if sizes[0] and batch_size % sizes[0] == 0:
            return True
        return batch_size == 1 or any(running.batch_size == batch_size for running in self.stack)

    def are_batch_and_heads(self, batch_size: int, heads: int) -> bool:
        """Whether two axes are the batch and the heads, in this order, as far as the module that runs says it."""
        if self.has_head_count(heads):
            return True
        return not self.has_head_count(batch_size) and self.stack[-1].batch_size == batch_size

    def has_head_count(self, heads: int) -> bool:
        """Whether the module that runs, or the one around it, names this number of heads."""
        return heads in self.named_head_counts()

    def named_head_counts(self) -> list[int]:
        """The numbers of heads that the module that runs and the one around it name."""
        counts = [_named_head_count(running.module) for running in self.stack[-2:]]
        return [count for count in counts if count is not None]

    @contextmanager
    def followed(self, paths: dict[nn.Module, str]) -> Iterator[None]:
        """Follow these modules within the context, by hooks."""
        # What a class says about itself is read once.
        known = {}
        for module, path in paths.items():
            kind: Any = type(module)
            known[module] = (path, _mask_position(kind), _is_stack(kind))

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(module, args, kwargs, *known[module])

        def leave(module: nn.Module, args: Any, out: Any) -> Any:
            # A hook of somebody else may have raised before the module was entered.
            if self.stack and self.stack[-1].module is module:
                self.stack.pop()
                if not self.stack and self.at_end is not None:
                    return self.at_end(out)
            return None

        with ExitStack() as hooks:
            for module in paths:
                before = module.register_forward_pre_hook(ContextHook(enter), prepend=True, with_kwargs=True)
                hooks.callback(before.remove)
                hooks.callback(module.register_forward_hook(ContextHook(leave), always_call=True).remove)
            yield

    def _enter(
        self, module: nn.Module, args: Any, kwargs: Any, path: str, mask_position: int | None, is_stack: bool
    ) -> None:
        outer = self.stack[-1].real if self.stack else None
        sizes: tuple[int, ...] = ()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.ndim > 0:
                sizes = tuple(value.shape)
                break
        real = _real_tokens(args, kwargs, mask_position, is_stack, outer)
        self.stack.append(RunningModule(path, module, sizes, real))


def _named_head_count(module: nn.Module) -> int | None:
    for name in HEAD_COUNT_NAMES:
        count = getattr(module, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def _real_tokens(
    args: Any, kwargs: Any, mask_position: int | None, is_stack: bool, outer: Tensor | None
) -> Tensor | None:
    """The padding that a module is told in ``attention_mask [B, n]``, as models of transformers are; or else ``outer``.

    A stack of layers that is told nothing has no padding, even if it is part of a model that has: the mask of an
    encoder–decoder belongs to its encoder.

    - ``mask_position``: the position of the argument; None if the module has none.
    - ``outer``: the padding of the module around it.
    """
    if mask_position is None:
        return outer
    mask = kwargs.get("attention_mask")
    if mask is None and len(args) > mask_position:
        mask = args[mask_position]
    if mask is None:
        return None if is_stack else outer
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return outer
    real = mask.detach().bool()
    # A mask that hides nothing needs no comparison later.
    return None if bool(real.all()) else real


@lru_cache(maxsize=1024)
def _mask_position(kind: type[nn.Module]) -> int | None:
    """The position of the argument ``attention_mask`` of a class of transformers; None if it has none."""
    if not kind.__module__.startswith("transformers."):
        return None
    names = list(inspect.signature(kind.forward).parameters)[1:]
    return names.index("attention_mask") if "attention_mask" in names else None


@lru_cache(maxsize=1024)
def _is_stack(kind: type[nn.Module]) -> bool:
    """Whether a class is a model of transformers, not one of its layers."""
    return any(base.__name__ == "PreTrainedModel" for base in kind.__mro__)
