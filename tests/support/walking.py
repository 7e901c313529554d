"""Helpers of the tests that count the FLOPs of live models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.budget._count_live_model import ModelCounts

__all__ = ["Calls", "attention_flops", "encoder_layer_flops", "meta", "seen_whole"]


class Calls(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def meta(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


def seen_whole(counts: ModelCounts) -> tuple[int | None, int | None]:
    """Assert that every operator was counted, on shapes alone. Returns the FLOPs of forward and backward."""
    assert counts.uncounted_operators == () and counts.ran_on == "shapes"
    assert counts.flops_by_module.get("", 0) == counts.forward_flops
    return counts.forward_flops, counts.backward_flops


def attention_flops(B: int, H: int, n: int, m: int, d: int, e: int) -> int:
    return 2 * B * H * n * m * (d + e)


def encoder_layer_flops(B: int, n: int, D: int, hidden: int) -> int:
    return 2 * B * n * (4 * D * D + 2 * D * hidden) + 4 * B * n * n * D
