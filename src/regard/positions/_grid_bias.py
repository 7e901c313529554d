"""Relative positions on a grid: ``GridBias``, the base class, and ``Grid``, which learns one table per axis."""

from __future__ import annotations

from torch import Tensor, nn

from regard._checks import check_finite_scale, check_head_count, check_integer, check_offset, check_query_width
from regard._errors import RegardError, RegardTypeError
from regard._lowered_scores import Bias, RelativeTerm, positions_2d
from regard.positions._position_tables import LearnedTables, learned_table, table_dtype
from regard.positions._relative_keys import query_table


class GridBias(nn.Module, Bias):
    """``bias[h, i, j] = table⁰[h, δ₁] + table¹[h, δ₂]``, δ = key − query on a ``height × width`` grid, row by row.

    A subclass implements ``table``. ``Grid`` describes the arguments.
    """

    def __init__(self, height: int, width: int, heads: int, offset: int | None) -> None:
        super().__init__()
        self.height = check_integer("height", height, least=1)
        self.width = check_integer("width", width, least=1)
        self.heads = check_integer("heads", heads, least=1)
        self.offset = check_offset(offset)

    def table(self, q: Tensor, axis: int) -> Tensor:
        """Return the table of an axis (0: rows, 1: columns), ``[1 or B, H, 1 or n, 2·size − 1]``."""
        raise RegardTypeError(f"{type(self).__name__} must implement table(q, axis)")

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_head_count(self, self.heads, q)
        (query_y, key_y), (query_x, key_x) = positions_2d(q.shape[2], m, self.height, self.width, self.offset, q.device)
        return (
            RelativeTerm(self.table(q, 0), query_y, key_y, 1 - self.height),
            RelativeTerm(self.table(q, 1), query_x, key_x, 1 - self.width),
        )

    def extra_repr(self) -> str:
        return f"{self.height}, {self.width}, heads={self.heads}{self.more_repr()}{self.offset_repr()}"

    def more_repr(self) -> str:
        """What a subclass adds to its ``repr``, beginning with a comma."""
        return ""


class Grid(GridBias, LearnedTables):
    """``bias[h, i, j] = y[h, δ₁] + x[h, δ₂]``, and with d also ``+ scale · q_i · (r^y_{h, δ₁} + r^x_{h, δ₂})``.

    δ = key − query = (δ₁ rows down, δ₂ columns right) on a ``height × width`` grid in row-major order. Learned:

        y [heads, 2·height − 1]   key_y [heads, 2·height − 1, d]      column (row) height − 1 is δ₁ = 0
        x [heads, 2·width − 1]    key_x [heads, 2·width − 1, d]       column (row) width − 1 is δ₂ = 0

    key_y and key_x hold r^y and r^x. There is one table per axis, so parameters and memory grow with height + width,
    not with height · width. All tables start as N(0, 0.02²).

    - ``height``, ``width``, ``heads``: the grid is the last height·width keys. Keys before it (class tokens) have no
      position, and neither have queries before or after the grid; a pair with one of them gets 0.
    - ``d``: the width of queries, for the part that depends on the query; None leaves it out.
    - ``scale``: None means 1/√d. A scale without d is refused.
    - ``offset``: None means m − n, which aligns the last query with the last key.

    >>> import torch
    >>> grid = Grid(2, 3, heads=1)
    >>> bias = grid.dense(torch.zeros(1, 1, 7, 8), 7)[0, 0]  # a class token and six cells
    >>> bool((bias[0] == 0).all()), bool(bias[1, 6] == grid.y[0, 1 + 1] + grid.x[0, 2 + 2])
    (True, True)
    """

    def __init__(
        self,
        height: int,
        width: int,
        heads: int,
        d: int | None = None,
        scale: float | None = None,
        offset: int | None = None,
    ) -> None:
        super().__init__(height, width, heads, offset)
        self.y = learned_table(heads, 2 * height - 1)
        self.x = learned_table(heads, 2 * width - 1)
        if d is None:
            if scale is not None:
                raise RegardError(f"scale needs d, the width of queries that it multiplies; got scale={scale} alone")
            self.d = None
            self.scale = None
            self.key_y = None
            self.key_x = None
        else:
            self.d = check_integer("d", d, least=1)
            self.scale = check_finite_scale(scale, d)
            self.key_y = learned_table(heads, 2 * height - 1, d)
            self.key_x = learned_table(heads, 2 * width - 1, d)
        self.reset_parameters()

    def table(self, q: Tensor, axis: int) -> Tensor:
        """One axis: ``[1, H, 1, T]``, or ``[B, H, n, T]`` with d."""
        numbers = (self.y, self.x)[axis]
        vectors = (self.key_y, self.key_x)[axis]
        table = numbers.to(table_dtype(q)).to(q.device)[None, :, None]
        if self.d is None or self.scale is None or vectors is None:
            return table
        check_query_width(self, self.d, q)
        return table + query_table(q, vectors, self.scale)

    def more_repr(self) -> str:
        return "" if self.scale is None else f", d={self.d}, scale={self.scale:.6g}"
