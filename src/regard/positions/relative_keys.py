"""Shaw's relative keys: a learned vector a distance, met by the query as if it were part of the key."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.positions.common import check_heads, check_offset, check_scale, check_width, learned, reset, table_dtype
from regard.scores import Bias, RelativeTerm, positions_1d
from regard.shapes import integer


class RelativeKeys(nn.Module, Bias):
    """``bias[h, i, j] = scale · q_i · r_{clip(j − (i + offset), −c, c)}``: scores become ``scale · q_i · (k_j + r)``.

    q ``[B, H, n, d]``; learned ``weight [1 or H, 2c + 1, d]``, row c + δ of which is r_δ; c is ``max_distance``.

    - ``heads=None``: all heads share one set of vectors, as Shaw's do; a number: each head has its own.
    - ``scale=None`` is 1/√d, the operator's own default; give the operator's scale here too where it is another.
    - like every bias it is added after a softcap, which does not bend it.
    - ``weight`` starts as N(0, 0.02²). ``offset=None`` is m − n: the last query stands at the last key.

    The table ``[B, H, n, 2c + 1]`` is one product a query and distance, never one a query and key.

    >>> keys = RelativeKeys(d=8, max_distance=2)
    >>> keys.dense(torch.randn(1, 3, 5, 8), 7).shape
    torch.Size([1, 3, 5, 7])
    """

    def __init__(
        self, d: int, max_distance: int, heads: int | None = None, scale: float | None = None, offset: int | None = None
    ) -> None:
        super().__init__()
        self.d = integer("d", d, least=1)
        self.max_distance = integer("max_distance", max_distance)
        self.heads = None if heads is None else integer("heads", heads, least=1)
        self.scale = check_scale(scale, d)
        self.offset = check_offset(offset)
        self.weight = learned(1 if heads is None else heads, 2 * max_distance + 1, d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02²) for all that is learned."""
        reset(self.weight)

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        if self.heads is not None:
            check_heads(self, self.heads, q)
        check_width(self, self.d, q)
        table = query_table(q, self.weight, self.scale)
        return (RelativeTerm(table, *positions_1d(q.shape[2], m, self.offset, q.device), -self.max_distance),)

    def extra_repr(self) -> str:
        said = f"d={self.d}, max_distance={self.max_distance}, heads={self.heads}, scale={self.scale:.6g}"
        return said if self.offset is None else f"{said}, offset={self.offset}"


def query_table(q: Tensor, vectors: Tensor, scale: float) -> Tensor:
    """``scale · q_i · r_t`` for q ``[B, H, n, d]`` and r ``[1 or H, T, d]``: ``[B, H, n, T]``."""
    dtype = table_dtype(q)
    q, vectors = q.to(dtype), vectors.to(device=q.device, dtype=dtype) * scale
    if vectors.shape[0] == 1:
        table = torch.einsum("bhnd,td->bhnt", q, vectors[0])
    else:
        table = torch.einsum("bhnd,htd->bhnt", q, vectors)
    return table.to(dtype)  # autocast may have multiplied in less
