"""Attention at scale 0: weights do not depend on q, so batch entries with equal weights are computed together."""

from __future__ import annotations

from torch import Tensor

from regard._lowered_scores import Scores
from regard.kernels import ops, triton

# Columns of v that are multiplied together. A wider tile no longer stays in the cache.
MAX_WIDTH = 1024


def attention_output(q: Tensor, k: Tensor, v: Tensor, scores: Scores, backend: str) -> Tensor:
    """``ops.attention_output``; at scale 0, values of F batch entries with equal weights are one wide value.

    A [H, n, m] v_b [m, e], b = 1 … F  →  A [v₁ … v_F] [m, F·e]
    """
    entries = _entries_together(v, scores, MAX_WIDTH if backend != "triton" else triton.MAX_WIDTH)
    if entries == 1:
        return ops.attention_output(q, k, v, scores, backend)
    batch, heads, m, e = v.shape
    groups = batch // entries
    wide = v.unflatten(0, (-1, entries)).permute(0, 2, 3, 1, 4).reshape(groups, heads, m, entries * e)
    out = ops.attention_output(q[:groups], k[:groups], wide, scores, backend)
    return out.unflatten(-1, (entries, e)).permute(0, 3, 1, 2, 4).flatten(0, 1)


def _entries_together(v: Tensor, scores: Scores, max_width: int) -> int:
    """F, the number of batch entries that are computed together: a divisor of the batch, 1 if weights may differ."""
    if scores.scale != 0 or scores.dropout > 0 or not v.numel():
        return 1
    parts = (scores.lo, scores.hi, scores.mask, scores.bias, *[term.table for term in scores.terms])
    # A part with one entry in the batch dimension is shared by all entries.
    if any(part is not None and part.shape[0] > 1 for part in parts):
        return 1
    batch = v.shape[0]
    # The largest divisor that fits: all groups have the same size.
    most = max(1, max_width // v.shape[-1])
    return max(f for f in range(1, min(batch, most) + 1) if batch % f == 0)
