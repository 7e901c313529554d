"""``T5Buckets``: one learned number per head and bucket of distances; buckets are exact near and logarithmic far."""

from __future__ import annotations

import math
from bisect import bisect_left

import torch
from torch import Tensor

from regard._checks import check_head_count, check_integer, check_integer_tensor, check_offset
from regard._errors import RegardError, RegardTypeError
from regard._lowered_scores import Bias, RelativeTerm, positions_1d
from regard.positions._position_tables import LearnedTables, learned_table, summing_dtype


class T5Buckets(LearnedTables, Bias):
    """``bias[h, i, j] = weight[bucket(j − (i + offset)), h]``, learned ``weight [buckets, heads]``.

    With δ = j − (i + offset), b buckets per direction and e = ⌊b/2⌋, the bucket of a distance t is

        t                                                             where t < e
        min(e + ⌊ln(t/e) / ln(max_distance/e) · (b − e)⌋, b − 1)      elsewhere

    - ``heads``: H.
    - ``buckets``: the number of buckets, of both directions together.
    - ``max_distance``: from this distance on, all keys are in the last bucket.
    - ``bidirectional``: True gives b = buckets/2 and t = |δ|, and keys after the query (δ > 0) use the second half of
      the buckets. False, for decoders, gives b = buckets and t = max(−δ, 0): keys after the query share bucket 0.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    The logarithm is computed in float32 as in T5, so that weights of T5 can be used here. ``weight`` starts as
    N(0, 0.02²). The table is ``[1, H, 1, T]`` with T ≤ 2·max_distance + 1 for every n and m.

    >>> T5Buckets.bucket(torch.tensor([-200, -8, -1, 0, 1, 8, 200])).tolist()
    [15, 8, 1, 0, 17, 24, 31]
    >>> T5Buckets(heads=2).dense(torch.zeros(1, 2, 3, 8), 5).shape
    torch.Size([1, 2, 3, 5])
    """

    def __init__(
        self,
        heads: int,
        buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        offset: int | None = None,
    ) -> None:
        super().__init__()
        self.heads = check_integer("heads", heads, least=1)
        self.offset = check_offset(offset)
        _check_buckets(buckets, max_distance, bidirectional)
        self.buckets = buckets
        self.max_distance = max_distance
        self.bidirectional = bidirectional
        self.weight = learned_table(buckets, heads)
        # The table ends where the last bucket begins: a term clamps larger distances to its last column.
        end = _first_distance_of_last_bucket(buckets, max_distance, bidirectional)
        distances = torch.arange(-end, (end if bidirectional else 0) + 1, device="cpu")
        self.first_offset: int = -end
        self.columns: tuple[int, ...] = tuple(self.bucket(distances, buckets, max_distance, bidirectional).tolist())
        self.reset_parameters()

    @staticmethod
    def bucket(distance: Tensor, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
        """The bucket 0 … buckets − 1 of each δ = key − query, integers of any shape."""
        _check_buckets(buckets, max_distance, bidirectional)
        check_integer_tensor("distance", distance)
        if bidirectional:
            per_direction = buckets // 2
            t = distance.abs()
        else:
            per_direction = buckets
            t = (-distance).clamp(min=0)
        exact = per_direction // 2
        # Clamped before the logarithm, because ``where`` below ignores the result for distances under ``exact``.
        log = torch.log(t.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
        far = (exact + (log * (per_direction - exact)).long()).clamp(max=per_direction - 1)
        bucket = torch.where(t < exact, t.long(), far)
        if bidirectional:
            bucket = bucket + (distance > 0) * per_direction
        return bucket

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_head_count(self, self.heads, q)
        columns = torch.tensor(self.columns, device=q.device)
        table = self.weight.to(summing_dtype(q)).to(q.device)[columns].T
        query_positions, key_positions = positions_1d(q.shape[2], m, self.offset, q.device)
        return (RelativeTerm(table[None, :, None], query_positions, key_positions, self.first_offset),)

    def extra_repr(self) -> str:
        options = f"heads={self.heads}, buckets={self.buckets}, max_distance={self.max_distance}"
        options += f", bidirectional={self.bidirectional}"
        return options + self.offset_repr()


def _first_distance_of_last_bucket(buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The smallest distance backwards in the last bucket, by bisection: buckets grow with distance."""

    def bucket(t: int) -> int:
        return int(T5Buckets.bucket(torch.tensor([-t], device="cpu"), buckets, max_distance, bidirectional))

    return bisect_left(range(max_distance), bucket(max_distance), key=bucket)


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    if not isinstance(bidirectional, bool):
        raise RegardTypeError(f"bidirectional must be True or False, got {bidirectional!r}")
    if bidirectional:
        check_integer("buckets", buckets, least=4)
        if buckets % 2:
            raise RegardError(f"buckets must be even, half of them for each direction, got {buckets}")
        exact = buckets // 4
    else:
        exact = check_integer("buckets", buckets, least=2) // 2
    check_integer("max_distance", max_distance)
    if max_distance <= exact:
        raise RegardError(
            f"max_distance must be above {exact}, the distances with a bucket of their own, got {max_distance}"
        )
