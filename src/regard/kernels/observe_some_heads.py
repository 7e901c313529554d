"""Observe some heads of a call: the other heads run without measurements, at full speed."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._lowered_scores import Scores
from regard._observables import Observe
from regard.kernels import ops

# Observables with the heads in the first dimension; in the others the batch comes first.
PER_HEAD = ("rows", "key_mass", "map", "map_rows", "profile", "profile_rows")


def observed_attention(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str, observe: Observe, real_queries: Tensor | None
) -> list[Tensor]:
    """``ops.observed_attention``: out of all heads, then row_max, row_sum and the observables of ``observe.heads``."""
    heads = list(observe.heads or ())
    H = q.shape[1]
    if max(heads) >= H:
        raise RegardError(f"Observe heads must be between 0 and {H - 1}, the heads of q; got {max(heads)}")

    # The hash of dropout contains a head's number among all heads, so all of them run together.
    if scores.dropout > 0:
        out, *values = ops.observed_attention(q, k, v, scores, backend, observe, real_queries)
        names = ("row_max", "row_sum", *ops.observable_names(observe))
        results = [out]
        for name, value in zip(names, values, strict=True):
            results.append(value[heads] if name in PER_HEAD else value[:, heads])
        return results

    # Any selection of query heads can break the groups, so each head gets a key head of its own.
    groups = _key_heads(heads, q, k)
    out, *values = ops.observed_attention(
        q[:, heads], k[:, groups], v[:, groups], scores.select_heads(heads), backend, observe, real_queries
    )
    others = [head for head in range(H) if head not in heads]
    if others:
        groups = _key_heads(others, q, k)
        rest = ops.attention_output(q[:, others], k[:, groups], v[:, groups], scores.select_heads(others), backend)
        out = torch.cat([out, rest], 1)
    # Back to the order of the heads in q.
    order = torch.argsort(torch.tensor(heads + others, device=q.device))
    return [out[:, order], *values]


def select_heads(heads: tuple[int, ...] | None, q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor, Scores]:
    """q, k and options of these heads, each with a key head of its own; None selects all heads and copies nothing."""
    if heads is None:
        return q, k, scores
    chosen = list(heads)
    return q[:, chosen], k[:, _key_heads(chosen, q, k)], scores.select_heads(chosen)


def _key_heads(heads: list[int], q: Tensor, k: Tensor) -> list[int]:
    """The key head that each query head uses."""
    return [head * k.shape[1] // q.shape[1] for head in heads]
