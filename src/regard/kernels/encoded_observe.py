"""``Observe`` as plain arguments of the operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from regard._groups import Groups
from regard._observables import Observe
from regard._shapes import resolve_offset


def encode_observe(observe: Observe, n: int, m: int) -> list[int]:
    """``observe`` as integers, for the operator; ``queries`` and ``groups`` are passed separately, as tensors."""
    # −1 stands for an axis without a radius, and a grid of 0 × 0 for none.
    radii = (*observe.profile_radii(), -1, -1)[:2]
    grid = observe.grid if observe.grid is not None else (0, 0)
    offset = resolve_offset(n, m, observe.offset)
    sizes = [observe.map, *radii, int(observe.key_mass), observe.top, observe.sink, observe.local]
    group_count = len(observe.groups) if observe.groups is not None else 0
    return [*sizes, *grid, offset, group_count, int(observe.differentiable)]


def key_groups(observe: Observe) -> Tensor | None:
    """The labels of the groups ``[B or 1, m]``, for the operator."""
    return observe.groups.labels if observe.groups is not None else None


def decode_observe(encoded: Sequence[int], labels: Tensor | None) -> Observe:
    """What ``encode_observe`` and ``key_groups`` made of ``observe``."""
    *numbers, group_count, differentiable = encoded
    map_size, radius_y, radius_x, key_mass, top, sink, local, height, width, offset = numbers
    profile: int | tuple[int, int] | None = None
    if radius_x >= 0:
        profile = (radius_y, radius_x)
    elif radius_y >= 0:
        profile = radius_y
    grid = (height, width) if height else None
    groups = None
    if labels is not None:
        # The kernels need no names.
        groups = Groups._unchecked(labels, tuple(map(str, range(group_count))))
    options: dict[str, Any] = {"groups": groups, "differentiable": bool(differentiable)}
    return Observe(map_size, profile, bool(key_mass), top, sink, local, grid, offset, **options)
