"""Learned positions: one trained vector a place, added to the input; on a line or on a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.positions.added import AddedToInput
from regard.positions.common import check_grid, learned, reset
from regard.shapes import integer, readable


class Learned(AddedToInput):
    """``y_p = x_p + weight_p``; on a grid ``y_(r, c) = x_(r, c) + row_r + column_c``.

    x ``[*, n, d]``. ``Learned(length, d)`` holds ``weight [length, d]``, the table of BERT, GPT-2 and ViT (whose class
    token is a place like any other). ``Learned((h, w), d)`` holds ``row [h, d]`` and ``column [w, d]``: h + w vectors
    for h·w cells. All start as N(0, 0.02²).

    - an x that reaches beyond ``length`` is refused: there is nothing to add.
    - on a grid the last h·w rows of x are the cells; rows before them (class tokens) get no code.
    - ``start``: the position of x's first row, at least 0; always 0 on a grid. ``at``: positions of their own, on a
      line, each in the table (a padded row may have any, 0 for instance).

    >>> import torch
    >>> position = Learned(8, 3)
    >>> x = torch.zeros(2, 5, 3)
    >>> bool((position(x, start=3)[1] == position.weight[3:8]).all())
    True
    >>> position(x, start=4)
    Traceback (most recent call last):
    ValueError: positions 4 … 8 were asked for (5 rows from start=4), but this table has length 8: at most 4 rows fit
    """

    def __init__(self, length: int | tuple[int, int], d: int) -> None:
        super().__init__()
        self.d = integer("d", d, least=1)
        if isinstance(length, tuple | list):
            self.grid = check_grid("length", length)
            self.row, self.column = learned(self.grid[0], d), learned(self.grid[1], d)
        else:
            self.grid = None
            self.length = integer("length", length, least=1)
            self.weight = learned(self.length, d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02²) for all that is learned."""
        reset(*self.parameters())

    def code(self, n: int, start: int = 0) -> Tensor:
        """The rows ``[n, d]`` for positions start … start + n − 1."""
        integer("n", n)
        if self.grid is not None:
            prefix = self.prefix(n, start)
            return self.on_grid(self.row.unsqueeze(1), self.column.unsqueeze(0), prefix)
        if integer("start", start) + n > self.length:
            raise ValueError(
                f"positions {start} … {start + n - 1} were asked for ({n} rows from start={start}), "
                f"but this table has length {self.length}: at most {max(self.length - start, 0)} rows fit"
            )
        return self.weight[start : start + n]

    def code_at(self, at: Tensor) -> Tensor:
        """The rows ``[*, d]`` for positions ``at [*]``, each within 0 … length − 1."""
        if readable(at) and at.numel() and not 0 <= int(at.min()) <= int(at.max()) < self.length:
            raise ValueError(
                f"at goes from {int(at.min())} to {int(at.max())}; this table has positions 0 … {self.length - 1}"
            )
        return self.weight[at.to(self.weight.device, torch.int64)]

    def extra_repr(self) -> str:
        return f"{self.length if self.grid is None else self.grid}, d={self.d}"
