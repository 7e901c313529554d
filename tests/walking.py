"""What the tests of counted live models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.budget.walk import Counted

__all__ = ["Calls", "attention_flops", "encoder_layer_flops", "meta", "seen_whole"]


class Calls(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def meta(*shape: int, grad: bool = False) -> Tensor:
    return torch.empty(*shape, device="meta", requires_grad=grad)


def seen_whole(found: Counted) -> tuple[int | None, int | None]:
    assert found.uncounted == () and found.ran == "shapes"
    assert found.flops.get("", 0) == found.forward
    return found.forward, found.backward


def attention_flops(B: int, H: int, n: int, m: int, d: int, e: int) -> int:
    return 2 * B * H * n * m * (d + e)


def encoder_layer_flops(B: int, n: int, D: int, hidden: int) -> int:
    return 2 * B * n * (4 * D * D + 2 * D * hidden) + 4 * B * n * n * D
