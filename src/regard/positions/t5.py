"""T5's relative positions: one number a bucket of distances, exact when near and logarithmic when far."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.positions.common import check_heads, check_offset, check_whole, learned, reset, summing_dtype
from regard.scores import Bias, RelativeTerm, positions_1d
from regard.shapes import integer


class T5Buckets(nn.Module, Bias):
    """``bias[h, i, j] = weight[bucket(j − (i + offset)), h]``, learned ``weight [buckets, heads]``.

    With δ = j − (i + offset), b buckets a side and e = ⌊b/2⌋, a distance t falls into

        t                                                             where t < e
        min(e + ⌊ln(t/e) / ln(max_distance/e) · (b − e)⌋, b − 1)      elsewhere

    - ``bidirectional``: b = buckets/2 and t = |δ|; keys after the query (δ > 0) use the second half of the buckets.
    - else b = buckets and t = max(−δ, 0): a decoder's, where all keys after the query share bucket 0.
    - the logarithm is taken in float32, as T5 takes it, so that weights trained there mean the same here.
    - the last bucket is reached by ``max_distance`` at the latest; the table ends there, ``[1, H, 1, T]`` with
      T ≤ 2·max_distance + 1 whatever n and m are.

    ``weight`` starts as N(0, 0.02²). ``offset=None`` is m − n: the last query stands at the last key.

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
        self.heads = integer("heads", heads, least=1)
        self.offset = check_offset(offset)
        _check_buckets(buckets, max_distance, bidirectional)
        self.buckets, self.max_distance, self.bidirectional = buckets, max_distance, bidirectional
        self.weight = learned(buckets, heads)
        # Beyond the last bucket's first distance, columns would only repeat what clamping to the table says.
        end = _last_bucket_from(buckets, max_distance, bidirectional)
        at = torch.arange(-end, (end if bidirectional else 0) + 1, device="cpu")
        self.first: int = -end
        self.columns: tuple[int, ...] = tuple(self.bucket(at, buckets, max_distance, bidirectional).tolist())
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02²) for all that is learned."""
        reset(self.weight)

    @staticmethod
    def bucket(distance: Tensor, buckets: int = 32, max_distance: int = 128, bidirectional: bool = True) -> Tensor:
        """The bucket of each δ = key − query: whole numbers of any shape → whole numbers 0 … buckets − 1."""
        _check_buckets(buckets, max_distance, bidirectional)
        check_whole("distance", distance)
        side = buckets // 2 if bidirectional else buckets
        exact = side // 2
        t = distance.abs() if bidirectional else (-distance).clamp(min=0)
        log = torch.log(t.clamp(min=exact).float() / exact) / math.log(max_distance / exact)
        far = (exact + (log * (side - exact)).long()).clamp(max=side - 1)
        near_or_far = torch.where(t < exact, t.long(), far)
        return near_or_far + (distance > 0) * side if bidirectional else near_or_far

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_heads(self, self.heads, q)
        columns = torch.tensor(self.columns, device=q.device)
        table = self.weight.to(device=q.device, dtype=summing_dtype(q))[columns].T
        return (RelativeTerm(table[None, :, None], *positions_1d(q.shape[2], m, self.offset, q.device), self.first),)

    def extra_repr(self) -> str:
        said = f"heads={self.heads}, buckets={self.buckets}, max_distance={self.max_distance}"
        said += f", bidirectional={self.bidirectional}"
        return said if self.offset is None else f"{said}, offset={self.offset}"


def _last_bucket_from(buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The smallest distance back in the last bucket, by bisection: buckets grow with distance."""

    def bucket(t: int) -> int:
        return int(T5Buckets.bucket(torch.tensor([-t], device="cpu"), buckets, max_distance, bidirectional))

    last, low, high = bucket(max_distance), 0, max_distance
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if bucket(middle) == last else (middle + 1, high)
    return low


def _check_buckets(buckets: int, max_distance: int, bidirectional: bool) -> None:
    if not isinstance(bidirectional, bool):
        raise TypeError(f"bidirectional must be True or False, got {bidirectional!r}")
    integer("buckets", buckets, least=4 if bidirectional else 2)
    if bidirectional and buckets % 2:
        raise ValueError(f"buckets is {buckets}; half of them serve each direction, so it must be even")
    exact = (buckets // 2 if bidirectional else buckets) // 2
    integer("max_distance", max_distance)
    if max_distance <= exact:
        raise ValueError(f"max_distance must be above {exact}, the distances with a bucket each, got {max_distance}")
