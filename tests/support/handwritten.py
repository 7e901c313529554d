"""Attention modules that are written by hand, in any style."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

B, H, N, D, E = 2, 3, 7, 5, 4
LOWEST = torch.finfo(torch.float32).min
CAUSAL = torch.ones(N, N).tril().bool()
ADDED = torch.zeros(1, 1, N, N).masked_fill(~CAUSAL, LOWEST)
ALIBI = torch.linspace(-1, 0, N).reshape(1, 1, N) * torch.tensor([1.0, 0.5, 0.25]).reshape(H, 1, 1)

Parts = Callable[[Tensor, Tensor, Tensor], Tensor]


class Handwritten(nn.Module):
    """Heads in the style of ``attend(q, k, v)``, which gets ``[B, H, n, ·]`` and returns the output of the heads."""

    num_heads = H

    def __init__(self, attend: Parts) -> None:
        super().__init__()
        self.attend = attend
        self.q = nn.Linear(6, H * D)
        self.k = nn.Linear(6, H * D)
        self.v = nn.Linear(6, H * E)
        self.out = nn.Linear(H * E, 6)
        # Weights that differ visibly between keys.
        nn.init.normal_(self.q.weight)
        nn.init.normal_(self.k.weight)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (H, D)).transpose(1, 2)
        k = self.k(x).unflatten(-1, (H, D)).transpose(1, 2)
        v = self.v(x).unflatten(-1, (H, E)).transpose(1, 2)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        y = self.attend(*self.heads(x))
        return self.out(y.transpose(1, 2).flatten(-2))


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(D)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


def own_weights(module: Handwritten, x: Tensor) -> Tensor:
    """The weights of a module, from its output with the unit matrix as values."""
    q, k, _ = module.heads(x)
    unit = torch.eye(x.shape[1]).expand(*q.shape[:2], -1, -1)
    return module.attend(q, k, unit)
