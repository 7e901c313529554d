"""``Learned``: one trained vector per position, added to the input; on a line or on a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import can_read_values, check_grid, check_integer
from regard._errors import RegardError
from regard.positions._added_to_input import AddedToInput
from regard.positions._position_tables import LearnedTables, learned_table


class Learned(AddedToInput, LearnedTables):
    """``y_p = x_p + weight_p``; on a grid ``y_(r, c) = x_(r, c) + row_r + column_c``, for x ``[*, n, d]``.

    - ``length``: the number of positions, with a table ``weight [length, d]`` as in BERT, GPT-2 and ViT (whose class
      token is a position like any other); or ``(h, w)`` for a grid, with ``row [h, d]`` and ``column [w, d]``.
    - ``d``: the width of x.

    All tables start as N(0, 0.02²). Positions outside the table are refused. ``start`` and ``position_ids`` of a call
    are as in ``AddedToInput``; a padded row may have any position of the table.

    >>> import torch
    >>> position = Learned(8, 3)
    >>> x = torch.zeros(2, 5, 3)
    >>> bool((position(x, start=3)[1] == position.weight[3:8]).all())
    True
    >>> try:
    ...     position(x, start=4)
    ... except ValueError as error:
    ...     print(error)
    positions 4 … 8 do not fit into this table of length 8: from start=4 at most 4 rows fit
    """

    def __init__(self, length: int | tuple[int, int], d: int) -> None:
        super().__init__()
        self.d = check_integer("d", d, least=1)
        if isinstance(length, tuple | list):
            self.grid = check_grid("length", length)
            self.row = learned_table(self.grid[0], d)
            self.column = learned_table(self.grid[1], d)
        else:
            self.grid = None
            self.length = check_integer("length", length, least=1)
            self.weight = learned_table(self.length, d)
        self.reset_parameters()

    def encoding(self, n: int, start: int = 0) -> Tensor:
        """The rows ``[n, d]`` for positions start … start + n − 1."""
        check_integer("n", n)
        if self.grid is not None:
            before = self.rows_before_grid(n, start)
            return self.grid_encoding(self.row.unsqueeze(1), self.column.unsqueeze(0), before)
        if check_integer("start", start) + n > self.length:
            raise RegardError(
                f"positions {start} … {start + n - 1} do not fit into this table of length {self.length}: "
                f"from start={start} at most {max(self.length - start, 0)} rows fit"
            )
        return self.weight[start : start + n]

    def encoding_at(self, position_ids: Tensor) -> Tensor:
        """The rows ``[*, d]`` for positions ``position_ids [*]``, each within 0 … length − 1."""
        if can_read_values(position_ids) and position_ids.numel():
            first = int(position_ids.min())
            last = int(position_ids.max())
            if first < 0 or last >= self.length:
                raise RegardError(f"position_ids must be within 0 … {self.length - 1}, got {first} … {last}")
        return self.weight[position_ids.to(self.weight.device, torch.int64)]

    def extra_repr(self) -> str:
        return f"{self.length if self.grid is None else self.grid}, d={self.d}"
