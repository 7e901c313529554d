"""The heads of a recording as rows of numbers: the mean of every observable over the counted rows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from regard._devices import widest
from regard._observables import Observation
from regard.interp._group_table import group_means
from regard.interp._head_table import HEAD_COLUMNS, POSITION_COLUMNS
from regard.interp._token_labels import is_cross_attention


def head_rows(observations: Mapping[str, Observation], metadata: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``{"path", "head", "rows", …}`` for each head; a mean that was not measured or is not finite is None.

    If groups of keys were measured, there are also ``"on <name>"`` for each group, and ``"elsewhere"``.

    In cross-attention no key is before, after or near a query, so the columns of positions are None too.

    - ``metadata``: of the recording; it says which layers are cross-attention.
    """
    rows = []
    for path, observation in observations.items():
        means: dict[str, torch.Tensor | None] = {name: _means(observation, name) for name in HEAD_COLUMNS}
        if is_cross_attention(metadata, path):
            means |= dict.fromkeys(POSITION_COLUMNS)
        means |= group_means(observation)
        for index, head in enumerate(observation.heads):
            row: dict[str, Any] = {"path": path, "head": head, "rows": int(observation.rows[index])}
            for name, values in means.items():
                row[name] = None
                # The mean of a head without counted rows is NaN.
                if values is not None and math.isfinite(values[index]):
                    row[name] = float(values[index])
            rows.append(row)
    return rows


def _means(observation: Observation, name: str) -> torch.Tensor | None:
    """The mean ``[H]`` of a column over the counted rows; None if it was not measured."""
    counted = observation.counted
    if counted is None or observation.entropy is None:
        return None
    if name != "spread":
        # Calls of unequal sizes keep no row values when they are merged.
        if getattr(observation, name) is None:
            return None
        return observation.mean(name)
    if observation.visible is None:
        return None
    largest_entropy = widest(observation.visible).log()
    spread = torch.where(largest_entropy > 0, widest(observation.entropy) / largest_entropy, 0.0)
    return torch.where(counted, spread, 0).sum((0, 2)) / counted.sum((0, 2))
