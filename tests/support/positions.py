"""Sizes, tolerances and random tensors of the tests of positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

F64 = torch.float64
EXACT = {"rtol": 0.0, "atol": 1e-12}
B, H, D = 2, 3, 5


def randn(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=F64)


def queries(n: int, d: int = D, heads: int = H) -> Tensor:
    return torch.randn(B, heads, n, d, dtype=F64)


def spread(module: nn.Module) -> None:
    """Set all parameters to random numbers near 1 in size, in float64, so that rounding errors are below 1e-12."""
    module.double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
