"""Flips of the claims about costs: parameters, operations and memory."""

from __future__ import annotations

from typing import Any

from regard.claims.theorems import sequential_heads_save_memory as heads_in_turn
from regard.nn import MultiHeadAttention

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
}
