"""Observables by their plain formulas, in float64, from a whole matrix of attention weights.

This is the independent half of the comparison: nothing here uses regard's kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAP_SIZE = 4
SMALLEST_SINK = 1e-5  # less weight than this is missing from a row by rounding


def plain_observables(weights: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Entropy, peak, distance, sink, key mass and pooled map of attention weights.

    - ``weights [B, H, n, m]``: rows sum to 1, or to less if a learned sink has the rest.
    - ``counted [B, H, n]``: the rows that count; the values of the others are 0.

    >>> weights = torch.tensor([[[[1.0, 0.0], [0.5, 0.5]]]])
    >>> values = plain_observables(weights, torch.ones(1, 1, 2, dtype=torch.bool))
    >>> values["distance"].tolist(), values["key_mass"].tolist()
    ([[[0.0, 0.5]]], [[0.75, 0.25]])
    """
    w_BHNM = weights.double()
    n = w_BHNM.shape[-2]
    m = w_BHNM.shape[-1]
    # A learned sink takes part in the distribution, and so in its entropy.
    rest = 1 - w_BHNM.sum(-1)
    rest = torch.where(rest > SMALLEST_SINK, rest, 0.0)
    distance = (torch.arange(m) - torch.arange(n).unsqueeze(-1) - (m - n)).abs()
    rows = {
        "entropy": _surprise(w_BHNM).sum(-1) + _surprise(rest),
        "peak": w_BHNM.amax(-1),
        "distance": (w_BHNM * distance).sum(-1),
        "sink": w_BHNM[..., 0],
    }
    values = {name: torch.where(counted, value, 0.0) for name, value in rows.items()}

    # Rows that do not count have no part in the mean; a head in which no row counts gets 0.
    counted_weights = torch.where(counted.unsqueeze(-1), w_BHNM, 0.0).sum(0)
    counts = counted.double().sum(0)
    values["key_mass"] = counted_weights.sum(-2) / counts.sum(-1).clamp(min=1).unsqueeze(-1)

    # Rows of the map are means over the rows that count, its columns are sums over keys.
    row_bin = torch.nn.functional.one_hot(torch.arange(n) * MAP_SIZE // n, MAP_SIZE).double()
    key_bin = torch.nn.functional.one_hot(torch.arange(m) * MAP_SIZE // m, MAP_SIZE).double()
    pooled = row_bin.mT @ counted_weights @ key_bin
    values["map"] = pooled / (counts @ row_bin).clamp(min=1).unsqueeze(-1)
    return values


def _surprise(weights: Tensor) -> Tensor:
    """−w log w, which is 0 at w = 0."""
    return torch.where(weights > 0, -weights * weights.clamp(min=1e-300).log(), 0.0)
