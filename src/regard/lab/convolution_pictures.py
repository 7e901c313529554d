"""The room «convolution»: pictures to lay a kernel on; handwritten digits, and pictures that are generated."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.training.tasks.pictures import digits

__all__ = ["generated", "pictures"]

SIDE = 12
WRITTEN = """
............
.##.....#...
#..#...###..
#..#....#...
####....#...
#..#....##..
............
###....##...
#..#..#..#..
###...#.....
#..#..#..#..
###....##...
"""


@lru_cache(maxsize=1)
def pictures() -> dict[str, Any]:
    """Name → rows of numbers from 0 to 1; ``missing``: why there are no digits."""
    found = {name: _rows(x) for name, x in generated().items()}
    try:
        known = digits()
    except ImportError as error:
        return {"pictures": found, "missing": str(error)}
    first = {f"digit {i}": known.pixels[known.classes == i][0, 0].double() / 255 for i in range(10)}
    return {"pictures": {**{name: _rows(x) for name, x in first.items()}, **found}, "missing": ""}


def generated() -> dict[str, Tensor]:
    """Pictures whose edges, corners and textures a kernel finds."""
    y, x = torch.meshgrid(*[torch.arange(SIDE, dtype=torch.float64)] * 2, indexing="ij")
    middle = (SIDE - 1) / 2
    away = ((y - middle) ** 2 + (x - middle) ** 2).sqrt()
    return {
        "disc": (middle - 0.8 - away).clamp(0, 1),
        "stripes": ((x + y) % 4 < 2).double(),
        "checker": ((x // 3 + y // 3) % 2).double(),
        "text": torch.tensor([[float(mark == "#") for mark in line] for line in WRITTEN.split()], dtype=torch.float64),
        "slope": (x + y) / (2 * (SIDE - 1)),
        "point": ((y == SIDE // 2) & (x == SIDE // 2)).double(),
    }


def _rows(x: Tensor) -> list[list[float]]:
    return [[round(value, 3) for value in row] for row in x.tolist()]
