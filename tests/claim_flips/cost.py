"""Flips of the claims about cost: parameters, operations and memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from claim_flips.convolution_and_training import flipped
from regard._operator import attention
from regard.claims.theorems import cost_absolute, cost_relative
from regard.claims.theorems import sequential_heads_save_memory as sequential_heads
from regard.convolution import to_attention
from regard.nn import MultiHeadAttention
from regard.positions import RelativeTable


def without_value_projection(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """Relative attention that does not project the values."""
    n = len(z)
    return (codes.flatten(0, 1) @ vector.unsqueeze(-1)).view(n, n).softmax(-1) @ z


def with_opposite_offsets(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """Relative attention with offsets of the other sign."""
    return cost_relative.by_position(z, value, -codes, vector)


FLIPS: dict[str, list[dict[str, Any]]] = {
    "cost-multi-head": [
        {
            "layer": lambda d, h, **options: MultiHeadAttention(d, h, **{**options, "kv_heads": 1})
        },  # all heads share one key head
        {"layer": lambda d, h, **options: MultiHeadAttention(d, h, d_key=d, **options)},  # heads as wide as the model
    ],
    "parameter-count": [
        {"layer": lambda d, h, **options: MultiHeadAttention(d, h, **{**options, "qkv_bias": True})},
        {"layer": lambda d, h, **options: MultiHeadAttention(d, h, **{**options, "kv_heads": 1})},
        {"formula": lambda h, i, k, v, o: h * i * (2 * k + v) + h * v * o},  # without the bias
        {"formula": lambda h, i, k, v, o: h * i * (2 * k + v) + v * o + o},  # projects only one head
    ],
    "sequential-heads-save-memory": [
        {"one_by_one": sequential_heads.recomputed},  # then training keeps only n² too
        {"one_by_one_recomputed": sequential_heads.sequential},  # nothing is computed again
        {"one_by_one": sequential_heads.plain},  # all heads at once
    ],
    "design-8x512": [
        {"layer": MultiHeadAttention},  # with a bias
        {"layer": lambda d, h: MultiHeadAttention(d, h, d_key=32, out_bias=False)},  # half as wide
        {"attention_fn": attention},  # tiled: no weights are stored
    ],
    "heads-cost-nothing-extra": [
        {"layer": lambda d, h, **options: MultiHeadAttention(d, h, **{"d_key": d, **options})},  # wider heads
        {"layer": lambda d, h, **options: MultiHeadAttention(d, h, kv_heads=1, **options)},
    ],
    "cost-absolute": [
        {"once": cost_absolute.entry_by_entry},
        {"naive": cost_absolute.projected_once},
        {"once": lambda z, maps: cost_absolute.projected_once(z, (maps[1], maps[0], maps[2]))},
    ],
    "cost-relative": [
        {"relative": without_value_projection},
        {"relative": with_opposite_offsets},
    ],
    "bottleneck-regimes": [
        {"layer": lambda d, h: MultiHeadAttention(d, h, d_out=4 * d)},  # a wide output moves the crossover
        {"layer": lambda d, h: MultiHeadAttention(d, h, kv_heads=1)},
    ],
    "attention-vs-rnn": [
        {"attention_fn": attention},  # nothing is stored
        {"recurrent": lambda d: nn.Linear(d, d)},  # steps do not depend on each other
        {"recurrent": lambda d: MultiHeadAttention(d, 1)},
    ],
    "attention-less-work-than-rnn": [
        {"layer": lambda d, h: MultiHeadAttention(d, h, kv_heads=1)},  # cheaper projections
        {"recurrent": lambda d: nn.Linear(d, d)},  # no recurrence
        {"layer": lambda d, h: nn.RNN(d, d, batch_first=True)},
        {"gated": lambda d: nn.GRU(d, d, batch_first=True)},  # three gates, not four
    ],
    "relative-is-cheaper": [
        {"absolute": cost_absolute.entry_by_entry},  # the saving then grows as D
        {"beside": lambda d, h, n: MultiHeadAttention(d, h, position=RelativeTable(h, n - 1))},
        {"relative": without_value_projection},
    ],
    "head-is-kernel-or-tap": [
        {"convert": lambda conv: to_attention(conv, alpha=2.0)},  # heads also attend beside their taps
        {"convert": flipped},
    ],
}
