"""Flips of the claims about the formula itself: weights, conventions, softmax, norms, feed-forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import regard
from regard.claims.theorems import column_convention_equals_row_convention as column
from regard.claims.theorems import matrix_form_equals_per_query_form as matrix


def over_queries(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Softmax along the wrong axis."""
    return (q @ k.mT * options.get("scale", q.shape[-1] ** -0.5)).softmax(-2) @ v


def with_a_one(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """A 1 in the denominator that nobody asked for."""
    return regard.attention(q, k, v, **{"sinks": torch.zeros(q.shape[-3], dtype=q.dtype), **options})


def finite_mask(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, **options: Any) -> Tensor:
    """Hidden scores are −1e4, not −∞, so that a row without keys looks at all of them."""
    bias = None if mask is None else -1e4 * (~mask).to(q)
    return regard.attention(q, k, v, bias=bias, **options)


FLIPS: dict[str, list[dict[str, Any]]] = {
    "weights-are-a-distribution": [{"attend": over_queries}, {"attend": with_a_one}, {"attend": finite_mask}],
    "matrix-form-equals-per-query-form": [
        {"attend": over_queries},
        {"attend": lambda q, k, v: regard.attention(q, k, v, scale=1.0)},
        {"per_query": lambda q, k, v, scale: matrix.by_query(q, k, v, scale / 8)},
        {"attend": lambda q, k, v: regard.attention(q, k, v, mask=regard.Causal())},
    ],
    "column-convention-equals-row-convention": [
        {"head": (column.corrected_columns, column.corrected_rows)},
        {"single": lambda q, k, v, beta: v @ (k.T @ q).softmax(0)},  # β is dropped
        {"corrected": (column.head_of_columns, column.corrected_rows)},
    ],
}
