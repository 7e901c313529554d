"""Sizes, position schemes and the tolerance that the tests of caches share."""

from __future__ import annotations

import torch

from regard.positions import ALiBi, RelativeKeys, RelativeTable, Rotary, T5Buckets

F64 = torch.float64
D, HEADS, N = 12, 3, 11

INSIDE = {
    "none": lambda: None,
    "rotary": lambda: Rotary(4),
    "alibi": lambda: ALiBi(heads=HEADS),
    "table": lambda: RelativeTable(HEADS, 2),
    "shaw": lambda: RelativeKeys(4, 3),
    "t5": lambda: T5Buckets(HEADS, bidirectional=False),
}


def rows(t: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """k [2, 3, t, 5] and v [2, 3, t, 7] that count upwards."""
    at = torch.arange(first, first + t, dtype=torch.float32).unsqueeze(-1)
    return at.expand(2, 3, t, 5), (100 + at).expand(2, 3, t, 7)


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal up to the rounding of float64."""
    torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
