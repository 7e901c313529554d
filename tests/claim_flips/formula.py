"""Flips of the claims about the formula: weights, conventions, softmax, norms and the feed-forward network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.theorems import column_convention_equals_row_convention as column
from regard.claims.theorems import concat_is_sum_of_heads as concat
from regard.claims.theorems import matrix_form_equals_per_query_form as matrix
from regard.claims.theorems import subspace_selector as subspace
from regard.nn import FeedForward, MultiHeadAttention


def over_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with the softmax over the wrong axis."""
    return (q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)).softmax(-2) @ v


def with_extra_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attention with an additional 1 in the denominator of the softmax."""
    return regard.attention(q, k, v, **{"sinks": torch.zeros(q.shape[-3], dtype=q.dtype), **options})


def finite_mask(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Attention with hidden scores of −1e4, not −∞, so that a row without keys attends to all of them."""
    bias = None if mask is None else -1e4 * (~mask).to(q)
    return regard.attention(q, k, v, bias=bias, **options)


def small_norm(d: int) -> regard.nn.RMSNorm:
    """A norm that gives queries and keys the length d^¼, so that scores are at most √d and have deviation 1."""
    norm = regard.nn.RMSNorm(d)
    torch.nn.init.constant_(norm.weight, d**-0.25)
    return norm


class WholeNorm(torch.nn.LayerNorm):
    """A layer norm with the statistics of all rows together."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape) * self.weight + self.bias


class Unbiased(regard.nn.LayerNorm):
    """A layer norm that divides by the deviation with d − 1."""

    def forward(self, x: Tensor) -> Tensor:
        variance = x.var(-1, keepdim=True, correction=1)
        return self.weight * (x - x.mean(-1, keepdim=True)) / (variance + self.eps).sqrt() + self.bias


class Uncentred(regard.nn.LayerNorm):
    """A layer norm that does not subtract the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.var(-1, keepdim=True, correction=0) + self.eps).sqrt() + self.bias


class Mixing(FeedForward):
    """A feed-forward network that adds a little of the previous position."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 1e-3 * x.roll(1, -2))


class PositionDependent(FeedForward):
    """A feed-forward network that adds a little of the position itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-3 * torch.arange(x.shape[-2])[:, None]


def shared_stack(d: int, heads: int, layers: int, hidden: int) -> regard.nn.Encoder:
    """An encoder with one feed-forward network in all layers."""
    stack = regard.nn.Encoder(d, heads=heads, layers=layers, hidden=hidden)
    for block in stack.blocks:
        block.feedforward = stack.blocks[0].feedforward
    return stack


def oblique_bases(d: int, m: int, p: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random bases: neither orthonormal nor orthogonal to each other."""
    a = torch.randn(d, m, generator=generator, dtype=torch.float64) / d**0.5
    b = torch.randn(d, p, generator=generator, dtype=torch.float64) / d**0.5
    return a, b


FLIPS: dict[str, list[dict[str, Any]]] = {
    "weights-are-a-distribution": [
        {"attention_fn": over_queries},
        {"attention_fn": with_extra_one},
        {"attention_fn": finite_mask},
    ],
    "matrix-form-equals-per-query-form": [
        {"attention_fn": over_queries},
        {"attention_fn": lambda q, k, v: regard.attention(q, k, v, scale=1.0)},
        {"per_query": lambda q, k, v, scale: matrix.sums_per_query(q, k, v, scale / 8)},
        {"attention_fn": lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal())},
    ],
    "column-convention-equals-row-convention": [
        {"head": (column.corrected_columns, column.corrected_rows)},
        {"single": lambda q, k, v, beta: v @ (k.T @ q).softmax(0)},  # β is dropped
        {"corrected": (column.head_of_columns, column.corrected_rows)},
    ],
    "unscaled-softmax-saturates": [
        {"attention_fn": lambda q, k, v, **options: regard.attention(q, k, v, **{**options, "scale": None})},
        {"attention_fn": lambda q, k, v, **options: regard.attention(q, k, v, softcap=2.0, **options)},
        {"layer": lambda d, heads, scale: MultiHeadAttention(d, heads, scale=None)},
        {"layer": lambda d, heads, scale: MultiHeadAttention(d, heads, scale=scale, qk_norm=small_norm)},
    ],
    "jacobian-norm-bound": [
        {"attention_fn": lambda q, k, v, bias: regard.attention(q, k, v, bias=3 * bias)},  # the temperature is ⅓
        {"bound": lambda n, eps: n * eps**2},
        {"bound": lambda n, eps: (n - 1) ** 2 * eps**2},
    ],
    "softmax-keeps-order": [
        {"attention_fn": lambda q, k, v, scale: (q @ k.mT / (q @ k.mT).sum(-1, keepdim=True)) @ v},  # no exponential
        {"attention_fn": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},
        {"attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=scale / 2)},
    ],
    "concat-is-sum-of-heads": [
        {"slices": lambda w, heads: [w[h::heads] for h in range(heads)]},  # interleaved
        {"slices": concat.rows_of_next},
        {"attention_fn": lambda q, k, v: regard.attention(q, k, v, scale=1.0)},
        {"layer": lambda *sizes, **options: MultiHeadAttention(*sizes, mask=regard.Causal(), **options)},
    ],
    "layer-norm-depends-on": [
        {"layer": torch.nn.BatchNorm1d},
        {"layer": lambda d: WholeNorm(d)},
        {"batch": lambda d: torch.nn.BatchNorm1d(d, track_running_stats=False)},  # the batch's statistics in use too
        {"batch": regard.nn.LayerNorm},
    ],
    "layer-norm-radius": [
        {"norm": lambda d, eps: Unbiased(d, eps)},
        {"norm": lambda d, eps: regard.nn.LayerNorm(d, eps=max(eps, 1e-5))},
        {"norm": lambda d, eps: Uncentred(d, eps)},
    ],
    "feed-forward-is-pointwise": [
        {"make": lambda d, hidden: Mixing(d, hidden)},
        {"make": lambda d, hidden: PositionDependent(d, hidden)},
        {"make": lambda d, hidden: FeedForward(d, hidden, activation="gelu")},
        {"stack": lambda d, heads, layers, hidden: shared_stack(d, heads, layers, hidden)},
    ],
    "weights-explain-output": [
        {"keys": 9},
        {"values": lambda m, d, generator: torch.ones(m, d, dtype=torch.float64)},
        {"attention_fn": lambda q, k, v, **options: regard.attention(q, k, v, sinks=q.new_zeros(1), **options)},
    ],
    "subspace-selector": [
        {"selector": subspace.transposed_projector},
        {"selector": lambda a: torch.eye(len(a), dtype=a.dtype) - a @ a.T},  # the other subspace
        {"bases": oblique_bases},
        {"sharpness": 2.0},
    ],
}
