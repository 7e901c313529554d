"""The result of a forward pass with numbers in place of deferred scores."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch.utils._pytree import tree_leaves, tree_map_only

from regard.interp._deferred_scores import DeferredScores


def with_numbers(result: Any) -> Any:
    """The same result with ordinary tensors. Data classes stay the objects that the model made; their fields change."""
    leaves = tree_leaves(result)
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            _replace_fields(leaf)
    if any(isinstance(leaf, DeferredScores) for leaf in leaves):
        return tree_map_only(DeferredScores, DeferredScores.dense, result)
    return result


def _replace_fields(instance: Any) -> None:
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name, None)
        replaced = with_numbers(value)
        if replaced is not value:
            object.__setattr__(instance, field.name, replaced)
