"""Groups of keys for tests: runs, single keys, keys in no group, more labels than keys and fewer."""

from __future__ import annotations

import torch
from torch import Tensor

from regard import Groups

GROUPS = (
    Groups({"first": slice(0, 2), "middle": [3, 5, 7], "far": range(9, 300), "empty": []}),
    Groups(torch.arange(400) % 5 - 1, names=("a", "b", "c", "d")),
    Groups([0]),
)


def weights_on_groups(weights: Tensor, groups: Groups) -> Tensor:
    """``[B, H, n, m] → [B, H, n, C]``: the definition, key by key."""
    labels = groups.for_keys(weights.shape[-1])
    if labels.ndim == 1:
        labels = labels.unsqueeze(0)
    sums = [(weights * (labels == c)[:, None, None]).sum(-1) for c in range(len(groups))]
    return torch.stack(sums, -1)
