"""Register small data classes as torch pytrees, so that they pass through ``torch.compile`` and ``torch.export``."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


def register_pytree(cls: type[T]) -> type[T]:
    """Class decorator that registers a data class as a pytree.

    Fields that hold tensors or other pytrees become children. All other fields are stored in the context of the tree,
    so ``torch.compile`` specializes on them. Unflattening does not call ``__post_init__``: children may be placeholders
    of a trace, and the original values were already checked.
    """
    names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]

    def flatten(x: T) -> tuple[list[Any], tuple[tuple[str, ...], tuple[tuple[str, Any], ...]]]:
        child_names = []
        children = []
        constants = []
        for name in names:
            value = getattr(x, name)
            if _has_tensors(value):
                child_names.append(name)
                children.append(value)
            else:
                constants.append((name, value))
        return children, (tuple(child_names), tuple(constants))

    def unflatten(children: Any, context: Any) -> T:
        child_names, constants = context
        x = object.__new__(cls)
        for name, value in (*zip(child_names, children, strict=True), *constants):
            object.__setattr__(x, name, value)
        return x

    def flatten_with_keys(x: T) -> tuple[list[Any], Any]:
        children, context = flatten(x)
        keys = [pytree.GetAttrKey(name) for name in context[0]]
        return list(zip(keys, children, strict=True)), context

    # The classes hold data only, so torch may load them from files that torch.export.save wrote.
    torch.serialization.add_safe_globals([cls])
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        to_dumpable_context=lambda context: context,
        from_dumpable_context=_lists_to_tuples,
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


def _has_tensors(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_has_tensors(item) for item in value)
    return isinstance(value, Tensor) or type(value) in pytree.SUPPORTED_NODES


def _lists_to_tuples(x: Any) -> Any:
    """Convert lists back to tuples: JSON has no tuples, and contexts consist of tuples."""
    return tuple(map(_lists_to_tuples, x)) if isinstance(x, list) else x
