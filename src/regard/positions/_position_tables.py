"""Learned tables of position schemes: how they are created, their initial values, and the dtype they are used in.

A table is first converted and then moved to the device of q, ``weight.to(dtype).to(q.device)``: one ``to`` with both
may convert on a device without float64, forward or backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

INITIAL_STD = 0.02  # learned tables start as N(0, 0.02²), the usual choice for embeddings


def table_dtype(q: Tensor) -> torch.dtype:
    """The dtype of tables for queries q: float64 for float64, else float32. bfloat16 would round distances.

    >>> table_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.promote_types(q.dtype, torch.float32)


def summing_dtype(q: Tensor) -> torch.dtype:
    """The dtype of tables in which many entries share one parameter: float64 on a CPU, so its gradient is exact.

    >>> summing_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float64
    """
    if q.device.type in ("cpu", "meta"):
        return torch.float64
    return table_dtype(q)


def learned_table(*sizes: int) -> nn.Parameter:
    """A learned table of these sizes; ``reset_parameters`` gives it its initial values."""
    return nn.Parameter(torch.empty(*sizes))


class LearnedTables(nn.Module):
    """Base class of the schemes whose parameters are all learned tables."""

    def reset_parameters(self) -> None:
        """Set all tables to their initial values, N(0, 0.02²)."""
        for table in self.parameters():
            nn.init.normal_(table, std=INITIAL_STD)
