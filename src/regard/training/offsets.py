"""Where heads look from a cell of a picture while a model learns: the offset with the most weight, centre and width."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.training.evolution import Evolution

__all__ = ["Offsets", "offsets"]


@dataclass(frozen=True)
class Offsets:
    """Of every head at every record, from its profile p(δ), the mean weight at δ = key − query (rows, columns):

    peak [S, H, 2] = argmax_δ p(δ)      centre [S, H, 2] = Σ p δ / Σ p      width [S, H] = √(Σ p ‖δ − centre‖² / Σ p)
    """

    peak: Tensor
    centre: Tensor
    width: Tensor
    layers: list[list[int]]  # which of the H heads are a layer's

    def covered(self, radius: int = 1) -> list[list[int]]:
        """At every record, layer by layer: how many of the (2r + 1)² offsets around the query some head has as peak."""
        return [[len(self._inside(peak[heads], radius)) for heads in self.layers] for peak in self.peak]

    @staticmethod
    def _inside(peak: Tensor, radius: int) -> set[tuple[int, int]]:
        return {(y, x) for y, x in peak.tolist() if max(abs(y), abs(x)) <= radius}


def offsets(evolution: Evolution) -> Offsets:
    """From the records of a model that reads pictures; others have profiles on a line, and are refused."""
    if not evolution.on_grid:
        raise ValueError("these heads were recorded on a line; offsets in the plane are known of models of pictures")
    profiles = torch.stack([record.tensors["profile"] for record in evolution.records]).double()  # [S, H, 2r+1, 2r+1]
    sides = profiles.shape[2:]
    axes = [torch.arange(side) - side // 2 for side in sides]
    delta = torch.stack([x.flatten() for x in torch.meshgrid(*axes, indexing="ij")], -1)  # [taps, 2]
    flat = profiles.flatten(2)
    peak = delta[flat.argmax(-1)]
    p = flat / flat.sum(-1, keepdim=True)
    centre = p @ delta.double()
    width = (p * (delta - centre.unsqueeze(-2)).square().sum(-1)).sum(-1).sqrt()
    paths = [path for path, _ in evolution.heads]
    layers = [[at for at, here in enumerate(paths) if here == path] for path in evolution.paths]
    return Offsets(peak, centre, width, layers)
