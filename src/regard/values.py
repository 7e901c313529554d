"""Values that travel: registers small data classes with torch's pytrees, so that they pass through ``torch.export``."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def _tuples(x: Any) -> Any:
    """JSON knows only lists: what ``torch.export.save`` wrote, as it was."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def value(cls: type[T]) -> type[T]:
    """Class decorator: tensors and values inside the fields are leaves, everything else is part of the type.

    Rebuilding skips ``__post_init__``: leaves may be placeholders then, and were checked when first built.
    """
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def travels(x: Any) -> bool:
        if isinstance(x, tuple):
            return any(travels(y) for y in x)
        return isinstance(x, Tensor) or type(x) in pytree.SUPPORTED_NODES

    def flatten(x: T) -> tuple[list[Any], tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]]:
        moving = tuple(name for name in names if travels(getattr(x, name)))
        fixed = tuple((name, getattr(x, name)) for name in names if name not in moving)
        return [getattr(x, name) for name in moving], (moving, fixed)

    def unflatten(leaves: Any, context: Any) -> T:
        moving, fixed = context
        x = object.__new__(cls)
        for name, item in (*zip(moving, leaves, strict=True), *fixed):
            object.__setattr__(x, name, item)
        return x

    def flatten_with_keys(x: T) -> tuple[list[Any], Any]:
        leaves, context = flatten(x)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    # Plain data without code: what torch.export.save keeps of its example inputs may be read back.
    torch.serialization.add_safe_globals([cls])
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_tuples,
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls
