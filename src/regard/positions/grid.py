"""Relative positions on a grid: one table for rows and one for columns, with or without the query.

``OnGrid`` is what every bias on a grid shares; ``Grid`` learns its tables.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.positions.common import check_heads, check_offset, check_scale, check_width, learned, reset, table_dtype
from regard.positions.relative_keys import query_table
from regard.scores import Bias, RelativeTerm, positions_2d
from regard.shapes import integer


class OnGrid(nn.Module, Bias):
    """``bias[h, i, j] = table⁰[h, δ₁] + table¹[h, δ₂]``, δ = key − query on a ``height × width`` grid read row by row.

    A scheme implements ``table``. The grid is the last height·width keys; there must be that many. Keys before it
    (class tokens) stand nowhere, and so do queries that stand before or after the grid; a pair with one of them gets 0.
    ``offset=None`` is m − n: the last query stands at the last key.
    """

    def __init__(self, height: int, width: int, heads: int, offset: int | None) -> None:
        super().__init__()
        self.height, self.width = integer("height", height, least=1), integer("width", width, least=1)
        self.heads = integer("heads", heads, least=1)
        self.offset = check_offset(offset)

    def table(self, q: Tensor, axis: int) -> Tensor:
        """``[1, H, 1, 2·size − 1]`` or, where the query takes part, ``[B, H, n, 2·size − 1]``; axis 0 is rows."""
        raise TypeError(f"{type(self).__name__} must say what it adds")

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        check_heads(self, self.heads, q)
        on_y, on_x = positions_2d(q.shape[2], m, self.height, self.width, self.offset, q.device)
        return (
            RelativeTerm(self.table(q, 0), *on_y, 1 - self.height),
            RelativeTerm(self.table(q, 1), *on_x, 1 - self.width),
        )

    def extra_repr(self) -> str:
        said = [f"{self.height}, {self.width}, heads={self.heads}", *self.said()]
        return ", ".join(said if self.offset is None else [*said, f"offset={self.offset}"])

    def said(self) -> list[str]:
        """What a scheme adds to its ``repr``."""
        return []


class Grid(OnGrid):
    """``bias[h, i, j] = y[h, δ₁] + x[h, δ₂]``, and with d also ``+ scale · q_i · (r^y_{h, δ₁} + r^x_{h, δ₂})``.

    δ = key − query = (δ₁ rows down, δ₂ columns right) on a ``height × width`` grid read row by row. Learned:

        y [heads, 2·height − 1]   key_y [heads, 2·height − 1, d]      column (row) height − 1 is δ₁ = 0
        x [heads, 2·width − 1]    key_x [heads, 2·width − 1, d]       column (row) width − 1 is δ₂ = 0

    Separable: heights and widths add instead of multiplying, in parameters and in memory. key_y and key_x hold
    r^y and r^x; q is ``[B, H, n, d]``.

    - the grid is the last height·width keys; there must be that many. Keys before it (class tokens) stand nowhere, and
      so do queries that stand before or after the grid; a pair with one of them gets 0.
    - ``scale=None`` is 1/√d; without d there is nothing to scale, and a scale is refused.
    - all start as N(0, 0.02²). ``offset=None`` is m − n: the last query stands at the last key.

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
        self.d = None if d is None else integer("d", d, least=1)
        if d is None and scale is not None:
            raise ValueError(f"scale is {scale}, but without d there is no product with the query to scale; give d too")
        self.scale = None if d is None else check_scale(scale, d)
        self.y, self.x = learned(heads, 2 * height - 1), learned(heads, 2 * width - 1)
        self.key_y = None if d is None else learned(heads, 2 * height - 1, d)
        self.key_x = None if d is None else learned(heads, 2 * width - 1, d)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02²) for all that is learned."""
        reset(*self.parameters())

    def table(self, q: Tensor, axis: int) -> Tensor:
        """One axis: ``[1, H, 1, T]``, or ``[B, H, n, T]`` where the query takes part."""
        plain, vectors = ((self.y, self.key_y), (self.x, self.key_x))[axis]
        table = plain.to(device=q.device, dtype=table_dtype(q))[None, :, None]
        if self.d is None or self.scale is None or vectors is None:
            return table
        check_width(self, self.d, q)
        return table + query_table(q, vectors, self.scale)

    def said(self) -> list[str]:
        return [] if self.scale is None else [f"d={self.d}, scale={self.scale:.6g}"]
