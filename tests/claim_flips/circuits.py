"""Flips of the claims about circuits."""

from __future__ import annotations

from typing import Any

import torch

from claim_flips.convolution_and_training import one_head
from regard.models import bundled, load

FLIPS: dict[str, list[dict[str, Any]]] = {
    "ov-eigenvalues-from-a-small-matrix": [
        {"small": lambda embedding, value, out, unembedding: out @ embedding.T @ unembedding.T @ value},
        {"small": lambda embedding, value, out, unembedding: value @ out},  # without the tokens
        {"score": lambda eigenvalues: float(eigenvalues.abs().sum() / eigenvalues.abs().sum())},  # has no sign
    ],
    "heads-have-low-rank": [
        {"matrices": lambda layer, head: (layer.q_proj.weight.T @ layer.k_proj.weight, torch.zeros(24, 24) + 1.0)},
        {"matrices": lambda layer, head: (torch.ones(24, 24), torch.eye(24, dtype=torch.float64))},
    ],
    "composition-has-a-baseline": [
        {"score": lambda a, b: (a @ b).norm(dim=(-2, -1))},  # not divided by the sizes
        {"heads": lambda generator, samples, d, d_head: 2 * (torch.eye(d).double().expand(samples, d, d),)},
    ],
    "k-composition-marks-induction-heads": [
        {"trained": lambda: one_head(load(bundled()))},  # all heads of a layer are the same
        {"edges": lambda model, kind, count: {("0.0", "2.2"), ("0.1", "2.3")}},
        {"heads": lambda model: ("1.1", ["2.0", "2.1"])},  # others than the ones that do it
    ],
}
