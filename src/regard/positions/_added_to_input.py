"""``AddedToInput``: base class of the encodings that are added to the input once, before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard._checks import check_float_tensor, check_integer, check_position_ids
from regard._errors import RegardError, RegardTypeError


class AddedToInput(nn.Module):
    """``y_i = x_i + encoding_{start + i}`` for x ``[*, n, d]``; y has x's shape and dtype.

    A subclass has ``d`` and ``grid``, and implements ``encoding`` and ``encoding_at``.

    - ``start``: the position of the first row, for example the number of tokens in a cache.
    - ``position_ids``: integers ``[n]`` or ``[*, n]``, one row per batch entry, where positions are not consecutive
      (left padding, packed documents).
    - on a grid of h × w cells the last h·w rows of x are the cells in row-major order. Rows before them (class tokens)
      get no encoding. x is always complete, so ``start`` must be 0 and ``position_ids`` None.

    >>> class Ramp(AddedToInput):
    ...     d, grid = 2, None
    ...     def encoding_at(self, position_ids):
    ...         return position_ids.unsqueeze(-1).expand(*position_ids.shape, self.d)
    ...     def encoding(self, n, start=0):
    ...         return self.encoding_at(torch.arange(start, start + n))
    >>> Ramp()(torch.zeros(3, 2), start=5)
    tensor([[5., 5.],
            [6., 6.],
            [7., 7.]])
    """

    d: int
    grid: tuple[int, int] | None

    def encoding(self, n: int, start: int = 0) -> Tensor:
        """The rows to add: ``[n, d]``."""
        raise RegardTypeError(f"{type(self).__name__} must implement encoding(n, start)")

    def encoding_at(self, position_ids: Tensor) -> Tensor:
        """The rows to add at positions ``position_ids [*]``: ``[*, d]``; not used with a grid."""
        raise RegardTypeError(f"{type(self).__name__} must implement encoding_at(position_ids)")

    def forward(self, x: Tensor, start: int = 0, position_ids: Tensor | None = None) -> Tensor:
        """``x [*, n, d] → x + encoding``."""
        check_float_tensor("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d:
            raise RegardError(f"x has shape {list(x.shape)}; for {type(self).__name__} it must be [*, n, {self.d}]")
        if position_ids is None:
            return x + self.encoding(x.shape[-2], start).to(x)
        # Positions are given explicitly from here on.
        check_position_ids(position_ids, x.shape[-2], x.shape[:-2], x)
        if self.grid is not None:
            raise RegardError("position_ids must be None on a grid, where every cell has its position")
        if check_integer("start", start) != 0:
            raise RegardError(f"start must be 0 where position_ids are given, got {start}")
        return x + self.encoding_at(position_ids).to(x)

    def rows_before_grid(self, n: int, start: int) -> int:
        """How many of n rows come before the grid."""
        assert self.grid is not None
        height, width = self.grid
        cells = height * width
        if check_integer("start", start) != 0:
            raise RegardError(f"start must be 0 on a grid, got {start}")
        if n < cells:
            raise RegardError(f"x has {n} rows; a grid of {height} × {width} needs at least {cells}, one per cell")
        return n - cells

    def grid_encoding(self, rows: Tensor, columns: Tensor, before: int) -> Tensor:
        """``rows [h, 1, d] + columns [1, w, d]`` in row-major order after ``before`` rows of zeros: ``[n, d]``."""
        cells = (rows + columns).flatten(0, 1)
        return torch.cat([cells.new_zeros(before, self.d), cells])
