"""Where the heads of an image model attend relative to the query: peak, centre and width of their profiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard._errors import RegardError
from regard.training._evolution import Evolution


@dataclass(frozen=True)
class HeadOffsets:
    """Offsets of every head h at every record s, from its profile: p(δ) is the mean weight at δ = key − query.

        peak [S, H, 2] = argmax_δ p(δ)
        centre [S, H, 2] = Σ p δ / Σ p
        width [S, H] = √(Σ p ‖δ − centre‖² / Σ p)

    δ is (rows, columns). ``layers``: the numbers of the heads of each layer.
    """

    peak: Tensor
    centre: Tensor
    width: Tensor
    layers: list[list[int]]

    def count_covered(self, radius: int = 1) -> list[list[int]]:
        """For every record and layer, count the offsets within ``radius`` of the query that are the peak of a head."""
        counts = []
        for peak in self.peak:
            # If several heads have the same peak, count it once.
            inside = peak.abs().amax(-1) <= radius
            counts.append([len(peak[heads][inside[heads]].unique(dim=0)) for heads in self.layers])
        return counts


def head_offsets(evolution: Evolution) -> HeadOffsets:
    """Compute the offsets from the records of an image model; other models have 1-D profiles and are refused."""
    if not evolution.on_grid:
        raise RegardError("these heads were recorded on a line; only image models have two-dimensional offsets")
    # [S, H, rows, columns]
    profiles = torch.stack([record.tensors["profile"] for record in evolution.records]).double()
    axes = [torch.arange(side) - side // 2 for side in profiles.shape[2:]]
    delta = torch.cartesian_prod(*axes)  # [y · x, 2]
    # All offsets of a head in one dimension, in the order of delta.
    flat = profiles.flatten(2)
    peak = delta[flat.argmax(-1)]
    p = flat / flat.sum(-1, keepdim=True)
    centre = p @ delta.double()
    width = (p * (delta - centre.unsqueeze(-2)).square().sum(-1)).sum(-1).sqrt()

    layers: dict[str, list[int]] = {path: [] for path in evolution.paths}
    for index, (path, _) in enumerate(evolution.heads):
        layers[path].append(index)
    return HeadOffsets(peak, centre, width, list(layers.values()))
