"""Random float64 tensors, with and without gradients."""

from __future__ import annotations

import torch

D = torch.float64


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=D)


def with_grad(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone().requires_grad_() for x in tensors]
