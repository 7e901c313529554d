"""Schemes that are added to the input: ``y = x + code``, once, before the first layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.positions.common import check_at, check_floating
from regard.shapes import integer


class AddedToInput(nn.Module):
    """``y_i = x_i + code_{start + i}``, or ``x_i + code_{at_i}``, for x ``[*, n, d]``; y has x's shape and dtype.

    A scheme implements ``code`` and ``code_at``. ``start`` is the position of x's first row: the number of rows already
    in a cache. ``at``: whole positions ``[n]`` or ``[*, n]``, one row of them a batch entry, where rows do not simply
    count on: left padding, packed documents. On a grid of h × w cells, read row by row, the last h·w rows of x are the
    cells and rows before them (class tokens) get no code; such an x is always whole, so ``start`` must be 0 and ``at``
    is refused.

    >>> class Ramp(AddedToInput):
    ...     d, grid = 2, None
    ...     def code_at(self, at):
    ...         return at.unsqueeze(-1).expand(*at.shape, self.d)
    ...     def code(self, n, start=0):
    ...         return self.code_at(torch.arange(start, start + n))
    >>> Ramp()(torch.zeros(3, 2), start=5)
    tensor([[5., 5.],
            [6., 6.],
            [7., 7.]])
    """

    d: int
    grid: tuple[int, int] | None

    def code(self, n: int, start: int = 0) -> Tensor:
        """The rows to add: ``[n, d]``."""
        raise TypeError(f"{type(self).__name__} must say what it adds")

    def code_at(self, at: Tensor) -> Tensor:
        """The rows to add at positions ``at [*]``: ``[*, d]``; on a line only."""
        raise TypeError(f"{type(self).__name__} must say what it adds")

    def forward(self, x: Tensor, start: int = 0, at: Tensor | None = None) -> Tensor:
        """``x [*, n, d] → x + code``."""
        check_floating("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d:
            raise ValueError(f"x has shape {list(x.shape)}; {type(self).__name__} adds its code to [*, n, {self.d}]")
        if at is None:
            return x + self.code(x.shape[-2], start).to(x)
        check_at(at, x.shape[-2], x.shape[:-2], x)
        if self.grid is not None:
            raise ValueError("at gives positions on a line; on a grid every cell has its place: leave at out")
        if integer("start", start) != 0:
            raise ValueError(f"at says every position already, so start must be 0, got {start}")
        return x + self.code_at(at).to(x)

    def prefix(self, n: int, start: int) -> int:
        """How many of n rows come before the grid."""
        assert self.grid is not None
        height, width = self.grid
        if integer("start", start) != 0:
            raise ValueError(f"start is {start}; a grid is given whole, so start must be 0")
        if n < height * width:
            raise ValueError(f"x has {n} rows; a {height} × {width} grid needs at least {height * width}, one a cell")
        return n - height * width

    def on_grid(self, rows: Tensor, columns: Tensor, prefix: int) -> Tensor:
        """``rows [h, 1, d] + columns [1, w, d]``, read row by row after ``prefix`` rows of zeros: ``[n, d]``."""
        cells = (rows + columns).flatten(0, 1)
        return torch.cat([cells.new_zeros(prefix, self.d), cells])
