"""``RelativeTable``: one learned number per head and clipped distance, added to scores."""

from __future__ import annotations

from torch import Tensor

from regard._checks import check_head_count, check_integer, check_offset
from regard._lowered_scores import Bias, RelativeTerm, positions_1d
from regard.positions._position_tables import LearnedTables, learned_table, table_dtype


class RelativeTable(LearnedTables, Bias):
    """``bias[h, i, j] = weight[h, clip(j − (i + offset), −c, c) + c]``, learned ``weight [heads, 2c + 1]``.

    - ``heads``: H.
    - ``max_distance``: c ≥ 0. Every key farther than c gets the number at distance c. Column c is distance 0.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    ``weight`` starts as N(0, 0.02²).

    >>> import torch
    >>> table = RelativeTable(heads=1, max_distance=1)
    >>> _ = table.weight.data.copy_(torch.tensor([[-1.0, 0.0, 1.0]]))
    >>> table.dense(torch.zeros(1, 1, 2, 8), 4)[0, 0].tolist()
    [[-1.0, -1.0, 0.0, 1.0], [-1.0, -1.0, -1.0, 0.0]]
    """

    def __init__(self, heads: int, max_distance: int, offset: int | None = None) -> None:
        super().__init__()
        self.heads = check_integer("heads", heads, least=1)
        self.max_distance = check_integer("max_distance", max_distance)
        self.offset = check_offset(offset)
        self.weight = learned_table(heads, 2 * max_distance + 1)
        self.reset_parameters()

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_head_count(self, self.heads, q)
        table = self.weight.to(table_dtype(q)).to(q.device)
        query_positions, key_positions = positions_1d(q.shape[2], m, self.offset, q.device)
        return (RelativeTerm(table[None, :, None], query_positions, key_positions, -self.max_distance),)

    def extra_repr(self) -> str:
        options = f"heads={self.heads}, max_distance={self.max_distance}"
        return options + self.offset_repr()
