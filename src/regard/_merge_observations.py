"""Merge the observations of two calls into one.

The class ``Observation`` imports this module, so its name is not used here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._groups import merged_groups


def merge_pair(a: Any, b: Any, row_values: Sequence[str]) -> Any:
    """Merge two observations, as ``Observation.merge`` describes.

    - ``row_values``: the names of the row values.
    """
    if not _measured_alike(a.observe, b.observe):
        raise RegardError(
            f"only observations with the same Observe options can be merged, got {a.observe} and {b.observe}"
        )
    if a.rows.shape != b.rows.shape:
        heads = f"{a.rows.shape[0]} and {b.rows.shape[0]}"
        raise RegardError(f"only observations with equal numbers of heads merge, got {heads}")
    same_size = a.n is not None and (a.n, a.m) == (b.n, b.m)
    merged: dict[str, Any] = {}

    # Values with a batch dimension are concatenated if n and m are equal; otherwise they have no common shape.
    for name in (*row_values, "counted", "top", "top_at", "groups", "value_norm"):
        values = [getattr(a, name), getattr(b, name)]
        merged[name] = None
        if same_size and all(value is not None for value in values):
            merged[name] = torch.cat(values)
    if merged["groups"] is not None and a.observe.groups != b.observe.groups:
        entries = (a.groups.shape[0], b.groups.shape[0])
        groups = merged_groups(a.observe.groups, b.observe.groups, entries, a.m)
        merged["observe"] = replace(a.observe, groups=groups)

    # Means over rows are weighted by the number of their rows.
    for name, counts in (("key_mass", "rows"), ("map", "map_rows"), ("profile", "profile_rows")):
        merged[name] = _weighted_mean(getattr(a, name), getattr(b, name), getattr(a, counts), getattr(b, counts))
    for name in ("rows", "map_rows", "profile_rows"):
        counts_a = getattr(a, name)
        merged[name] = None if counts_a is None else counts_a + getattr(b, name)
    if not same_size:
        merged |= {"n": None, "m": None, "key_mass": None}
    return replace(a, **merged, saved_calls=a.saved_calls + b.saved_calls)


def _measured_alike(a: Any, b: Any) -> bool:
    """Whether two ``Observe`` options measure the same: they are equal, or differ only in the keys of their groups."""
    if a == b:
        return True
    if a.groups is None or b.groups is None or a.groups.names != b.groups.names:
        return False
    return bool(replace(a, groups=None) == replace(b, groups=None))


def _weighted_mean(x: Tensor | None, y: Tensor | None, x_count: Tensor, y_count: Tensor) -> Tensor | None:
    """``(x·x_count + y·y_count) / (x_count + y_count)``; counts broadcast over the last dimensions of x."""
    if x is None or y is None or x.shape != y.shape:
        return None
    missing = [1] * (x.ndim - x_count.ndim)
    x_weight = x_count.to(x.dtype).reshape(*x_count.shape, *missing)
    y_weight = y_count.to(x.dtype).reshape(*y_count.shape, *missing)
    return (x_weight * x + y_weight * y) / (x_weight + y_weight).clamp(min=1)
