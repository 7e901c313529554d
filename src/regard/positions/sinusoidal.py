"""Sinusoidal positions: waves of geometric wavelengths, added to the input; on a line or on a grid."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.positions.added import AddedToInput
from regard.positions.common import check_grid
from regard.shapes import integer, number


class Sinusoidal(AddedToInput):
    """``y_p = x_p + c_p``,  ``c_{p, 2i} = sin(p / base^{2i/d})``,  ``c_{p, 2i+1} = cos(p / base^{2i/d})``.

    x ``[*, n, d]``, c ``[n, d]``; nothing is learned and any length is served. The code is computed in float64 and then
    rounded once to x's dtype.

    - odd d: the formula as it stands; the last sine has no cosine beside it.
    - ``grid=(h, w)``: the first d/2 features are the code of the cell's row y, the last d/2 that of its column x, each
      with d/2 in place of d above; d must be even. The last h·w rows of x are the cells; rows before them get no code.
    - ``start``: the position of x's first row, at least 0; always 0 on a grid. ``at``: positions of their own, on a
      line.

    >>> Sinusoidal(4).code(2)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 1.0000]], dtype=torch.float64)
    >>> Sinusoidal(6, grid=(2, 2))(torch.zeros(5, 6))[0]  # a class token before four cells
    tensor([0., 0., 0., 0., 0., 0.])
    """

    def __init__(self, d: int, base: float = 10000.0, grid: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.d = integer("d", d, least=1)
        self.base = number("base", base)
        if not 0 < self.base < float("inf"):
            raise ValueError(f"base must be a finite number > 0, got {base}")
        self.grid = None if grid is None else check_grid("grid", grid)
        if self.grid is not None and d % 2:
            raise ValueError(f"d is {d}; on a grid half of the features code y and half x, so d must be even")

    def code(self, n: int, start: int = 0) -> Tensor:
        """The rows ``[n, d]`` for positions start … start + n − 1, in float64."""
        integer("n", n)
        if self.grid is None:
            at = torch.arange(n, dtype=torch.float64) + integer("start", start)
            return _waves(at, self.d, self.base)
        (height, width), prefix = self.grid, self.prefix(n, start)
        y = _waves(torch.arange(height, dtype=torch.float64), self.d // 2, self.base)
        x = _waves(torch.arange(width, dtype=torch.float64), self.d // 2, self.base)
        rows, columns = torch.nn.functional.pad(y, (0, self.d // 2)), torch.nn.functional.pad(x, (self.d // 2, 0))
        return self.on_grid(rows.unsqueeze(1), columns.unsqueeze(0), prefix)

    def code_at(self, at: Tensor) -> Tensor:
        """The rows ``[*, d]`` for whole positions ``at [*]``, in float64."""
        return _waves(at.to("cpu" if at.device.type == "mps" else at.device, torch.float64), self.d, self.base)

    def extra_repr(self) -> str:
        return f"d={self.d}, base={self.base:g}" + ("" if self.grid is None else f", grid={self.grid}")


def _waves(at: Tensor, d: int, base: float) -> Tensor:
    """``at [*] → [*, d]``: sines and cosines in turn."""
    pair = torch.arange(0, d, 2, dtype=torch.float64, device=at.device)  # 2i
    angle = at.unsqueeze(-1) * base ** (-pair / d)
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(-2)[..., :d]
