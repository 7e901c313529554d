"""Flips of the claims that others were modelled on."""

from __future__ import annotations

from typing import Any

import torch

import regard

FLIPS: dict[str, list[dict[str, Any]]] = {
    "score-variance-is-d": [
        {"score": lambda q, k: (q * k).sum(-1) / q.shape[-1] ** 0.5},  # scaled already
        {"score": lambda q, k: (q * k).sum(-1) + 0.2 * q.shape[-1] ** 0.5},  # a mean
    ],
    "mask-times-infinity": [
        {"masked": lambda scores, mask: scores.masked_fill(mask != 0, -torch.inf).softmax(-1)},  # right: it holds
        {"corrected": lambda scores, hidden: (scores - 1e-3 * hidden).softmax(-1)},
    ],
    "hard-limit": [
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=min(scale, 1.0))},
        {"attend": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},
    ],
}
