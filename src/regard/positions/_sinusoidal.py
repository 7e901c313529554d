"""``Sinusoidal``: sines and cosines of geometric wavelengths, added to the input; on a line or on a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import check_grid, check_integer, check_positive
from regard._devices import float64_device
from regard._errors import RegardError
from regard.positions._added_to_input import AddedToInput


class Sinusoidal(AddedToInput):
    """``y_p = x_p + c_p``,  ``c_{p, 2i} = sin(p / base^{2i/d})``,  ``c_{p, 2i+1} = cos(p / base^{2i/d})``.

    Nothing is learned and any length is allowed. c ``[n, d]`` is computed in float64 and rounded once to x's dtype.

    - ``d``: the width of x. If it is odd, the last sine has no cosine.
    - ``base``: the largest wavelength is 2π·base.
    - ``grid``: ``(h, w)`` for a grid. The first d/2 features encode the cell's row, the last d/2 its column, each with
      d/2 in place of d; d must be even.

    ``start`` and ``position_ids`` of a call are as in ``AddedToInput``.

    >>> Sinusoidal(4).encoding(2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 1.0000]], dtype=torch.float64)
    >>> Sinusoidal(6, grid=(2, 2))(torch.zeros(5, 6))[0]  # a class token before four cells
    tensor([0., 0., 0., 0., 0., 0.])
    """

    def __init__(self, d: int, base: float = 10000.0, grid: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.d = check_integer("d", d, least=1)
        self.base = check_positive("base", base)
        self.grid = None if grid is None else check_grid("grid", grid)
        if self.grid is not None and d % 2:
            raise RegardError(f"d must be even on a grid (half of it for rows, half for columns), got {d}")

    def encoding(self, n: int, start: int = 0) -> Tensor:
        """The rows ``[n, d]`` for positions start … start + n − 1, in float64."""
        check_integer("n", n)
        if self.grid is None:
            positions = torch.arange(n, dtype=torch.float64) + check_integer("start", start)
            return _sines_and_cosines(positions, self.d, self.base)
        height, width = self.grid
        half = self.d // 2
        before = self.rows_before_grid(n, start)
        row_codes = _sines_and_cosines(torch.arange(height, dtype=torch.float64), half, self.base)
        column_codes = _sines_and_cosines(torch.arange(width, dtype=torch.float64), half, self.base)
        # Zeros in the other half, so that the sum of both is the concatenation.
        rows = torch.nn.functional.pad(row_codes, (0, half))
        columns = torch.nn.functional.pad(column_codes, (half, 0))
        return self.grid_encoding(rows.unsqueeze(1), columns.unsqueeze(0), before)

    def encoding_at(self, position_ids: Tensor) -> Tensor:
        """The rows ``[*, d]`` for integer positions ``position_ids [*]``, in float64."""
        positions = position_ids.to(float64_device(position_ids)).to(torch.float64)
        return _sines_and_cosines(positions, self.d, self.base)

    def extra_repr(self) -> str:
        options = f"d={self.d}, base={self.base:g}"
        return options if self.grid is None else f"{options}, grid={self.grid}"


def _sines_and_cosines(positions: Tensor, d: int, base: float) -> Tensor:
    """``positions [*] → [*, d]``: sines and cosines in turn."""
    exponent = torch.arange(0, d, 2, dtype=torch.float64, device=positions.device)  # 2i
    angle = positions.unsqueeze(-1) * base ** (-exponent / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :d]
