"""A learned number a distance and head, clipped: the plainest relative position there is."""

from __future__ import annotations

from torch import Tensor, nn

from regard.positions.common import check_heads, check_offset, learned, reset, table_dtype
from regard.scores import Bias, RelativeTerm, positions_1d
from regard.shapes import integer


class RelativeTable(nn.Module, Bias):
    """``bias[h, i, j] = weight[h, clip(j − (i + offset), −c, c) + c]``, learned ``weight [heads, 2c + 1]``.

    c is ``max_distance``, at least 0; every key farther than c takes the number at distance c. Column c is the key that
    stands where the query stands. ``weight`` starts as N(0, 0.02²). ``offset=None`` is m − n: the last query stands at
    the last key.

    >>> import torch
    >>> table = RelativeTable(heads=1, max_distance=1)
    >>> _ = table.weight.data.copy_(torch.tensor([[-1.0, 0.0, 1.0]]))
    >>> table.dense(torch.zeros(1, 1, 2, 8), 4)[0, 0].tolist()
    [[-1.0, -1.0, 0.0, 1.0], [-1.0, -1.0, -1.0, 0.0]]
    """

    def __init__(self, heads: int, max_distance: int, offset: int | None = None) -> None:
        super().__init__()
        self.heads = integer("heads", heads, least=1)
        self.max_distance = integer("max_distance", max_distance)
        self.offset = check_offset(offset)
        self.weight = learned(heads, 2 * max_distance + 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02²) for all that is learned."""
        reset(self.weight)

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_heads(self, self.heads, q)
        table = self.weight.to(device=q.device, dtype=table_dtype(q))
        where = positions_1d(q.shape[2], m, self.offset, q.device)
        return (RelativeTerm(table[None, :, None], *where, -self.max_distance),)

    def extra_repr(self) -> str:
        said = f"heads={self.heads}, max_distance={self.max_distance}"
        return said if self.offset is None else f"{said}, offset={self.offset}"
