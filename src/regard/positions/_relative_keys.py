"""``RelativeKeys`` (Shaw): one learned vector per distance, multiplied with the query as if added to the key."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import (
    check_finite_scale,
    check_head_count,
    check_integer,
    check_offset,
    check_optional_integer,
    check_query_width,
)
from regard._lowered_scores import Bias, RelativeTerm, positions_1d
from regard.positions._position_tables import LearnedTables, learned_table, table_dtype


class RelativeKeys(LearnedTables, Bias):
    """``bias[h, i, j] = scale · q_i · r_{clip(j − (i + offset), −c, c)}``: scores become ``scale · q_i · (k_j + r)``.

    q ``[B, H, n, d]``; learned ``weight [1 or H, 2c + 1, d]``, whose row c + δ is r_δ. It starts as N(0, 0.02²).

    - ``d``: the width of queries.
    - ``max_distance``: c ≥ 0.
    - ``heads``: None shares one set of vectors among all heads, as Shaw does; a number gives each head its own.
    - ``scale``: None means 1/√d, the operator's default; if the operator gets another scale, give it here too.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    Like every bias it is added after the softcap. The table ``[B, H, n, 2c + 1]`` has one product per query and
    distance, never one per query and key.

    >>> keys = RelativeKeys(d=8, max_distance=2)
    >>> keys.dense(torch.randn(1, 3, 5, 8), 7).shape
    torch.Size([1, 3, 5, 7])
    """

    def __init__(
        self, d: int, max_distance: int, heads: int | None = None, scale: float | None = None, offset: int | None = None
    ) -> None:
        super().__init__()
        self.d = check_integer("d", d, least=1)
        self.max_distance = check_integer("max_distance", max_distance)
        self.heads = check_optional_integer("heads", heads, least=1)
        self.scale = check_finite_scale(scale, d)
        self.offset = check_offset(offset)
        self.weight = learned_table(1 if heads is None else heads, 2 * max_distance + 1, d)
        self.reset_parameters()

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        if self.heads is not None:
            check_head_count(self, self.heads, q)
        check_query_width(self, self.d, q)
        table = query_table(q, self.weight, self.scale)
        query_positions, key_positions = positions_1d(q.shape[2], m, self.offset, q.device)
        return (RelativeTerm(table, query_positions, key_positions, -self.max_distance),)

    def extra_repr(self) -> str:
        options = f"d={self.d}, max_distance={self.max_distance}, heads={self.heads}, scale={self.scale:.6g}"
        return options + self.offset_repr()


def query_table(q: Tensor, vectors: Tensor, scale: float) -> Tensor:
    """``scale · q_i · r_t`` for q ``[B, H, n, d]`` and r ``[1 or H, T, d]``: ``[B, H, n, T]``."""
    dtype = table_dtype(q)
    q = q.to(dtype)
    vectors = vectors.to(dtype).to(q.device) * scale
    if vectors.shape[0] == 1:
        table = torch.einsum("bhnd,td->bhnt", q, vectors[0])
    else:
        table = torch.einsum("bhnd,htd->bhnt", q, vectors)
    return table.to(dtype)  # under autocast the product has a lower precision
