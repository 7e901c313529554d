"""Flips of the claims about costs: parameters, operations and memory."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn

from regard.attention import attention
from regard.claims.theorems import cost_absolute, cost_relative
from regard.claims.theorems import sequential_heads_save_memory as heads_in_turn
from regard.convolution import AttentionConvolution, to_attention
from regard.nn import MultiHeadAttention
from regard.positions import RelativeTable


def values_first(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """Relative attention without a projection of values."""
    n = len(z)
    return (codes.flatten(0, 1) @ vector.unsqueeze(-1)).view(n, n).softmax(-1) @ z


def from_far(z: Tensor, value: Tensor, codes: Tensor, vector: Tensor) -> Tensor:
    """Relative attention with the offset turned round."""
    return cost_relative.by_position(z, value, -codes, vector)


def turned(conv: nn.Conv2d) -> AttentionConvolution:
    """The conversion with every tap at the opposite offset."""
    other = copy.deepcopy(conv)
    other.weight.data.copy_(conv.weight.flip(-1, -2))
    return to_attention(other)


FLIPS: dict[str, list[dict[str, Any]]] = {
    "cost-multi-head": [
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, **{**more, "kv_heads": 1})},  # one key head
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, d_key=d, **more)},  # heads as wide as the model
    ],
    "parameter-count": [
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, **{**more, "qkv_bias": True})},
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, **{**more, "kv_heads": 1})},
        {"formula": lambda h, i, k, v, o: h * i * (2 * k + v) + h * v * o},  # the bias is forgotten
        {"formula": lambda h, i, k, v, o: h * i * (2 * k + v) + v * o + o},  # one head's output alone is projected
    ],
    "sequential-heads-save-memory": [
        {"one_by_one": heads_in_turn.recomputed},  # then training keeps n² too
        {"again": heads_in_turn.in_turn},  # nothing is computed again
        {"one_by_one": heads_in_turn.together},  # not in turn at all
    ],
    "design-8x512": [
        {"layer": MultiHeadAttention},  # with a bias
        {"layer": lambda d, h: MultiHeadAttention(d, h, d_key=32, out_bias=False)},  # half as wide
        {"attend": attention},  # tiled: no weights are stored
    ],
    "heads-cost-nothing-extra": [
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, **{"d_key": d, **more})},  # wider heads
        {"layer": lambda d, h, **more: MultiHeadAttention(d, h, kv_heads=1, **more)},
    ],
    "cost-absolute": [
        {"once": cost_absolute.entry_by_entry},
        {"naive": cost_absolute.projected_once},
        {"once": lambda z, maps: cost_absolute.projected_once(z, (maps[1], maps[0], maps[2]))},
    ],
    "cost-relative": [
        {"relative": values_first},
        {"relative": from_far},
    ],
    "bottleneck-regimes": [
        {"layer": lambda d, h: MultiHeadAttention(d, h, d_out=4 * d)},  # a wide output: they meet elsewhere
        {"layer": lambda d, h: MultiHeadAttention(d, h, kv_heads=1)},
    ],
    "attention-vs-rnn": [
        {"attend": attention},  # nothing is stored
        {"recurrent": lambda d: nn.Linear(d, d)},  # no step waits for another
        {"recurrent": lambda d: MultiHeadAttention(d, 1)},
    ],
    "attention-less-work-than-rnn": [
        {"layer": lambda d, h: MultiHeadAttention(d, h, kv_heads=1)},  # cheaper projections
        {"recurrent": lambda d: nn.Linear(d, d)},  # no recurrence
        {"layer": lambda d, h: nn.RNN(d, d, batch_first=True)},
        {"gated": lambda d: nn.GRU(d, d, batch_first=True)},  # three gates, not four
    ],
    "relative-is-cheaper": [
        {"absolute": cost_absolute.entry_by_entry},  # then the saving grows as D
        {"beside": lambda d, h, n: MultiHeadAttention(d, h, position=RelativeTable(h, n - 1))},
        {"relative": values_first},
    ],
    "head-is-kernel-or-tap": [
        {"convert": lambda conv: to_attention(conv, alpha=2.0)},  # heads look beside their taps
        {"convert": turned},
    ],
}
