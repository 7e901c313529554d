"""Flips of three simple claims, which show the pattern."""

from __future__ import annotations

from typing import Any

import torch

import regard

FLIPS: dict[str, list[dict[str, Any]]] = {
    "score-variance-is-d": [
        {"score": lambda q, k: (q * k).sum(-1) / q.shape[-1] ** 0.5},  # already scaled
        {"score": lambda q, k: (q * k).sum(-1) + 0.2 * q.shape[-1] ** 0.5},  # with a mean that is not 0
    ],
    "mask-times-infinity": [
        {
            "masked": lambda scores, mask: scores.masked_fill(mask != 0, -torch.inf).softmax(-1)
        },  # a correct mask, so the statement holds
        {"corrected": lambda scores, hidden: (scores - 1e-3 * hidden).softmax(-1)},
    ],
    "hard-limit": [
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=min(scale, 1.0))},
        {"attention_fn": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},
    ],
}
