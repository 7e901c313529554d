"""Sample images of the Convolution page: handwritten digits, and images that are generated."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.training.tasks.image_data import load_digits

SIDE = 12
LETTERS = """
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
def sample_images() -> dict[str, Any]:
    """Return name → rows of numbers from 0 to 1. ``missing`` says why there are no digits, if they are missing."""
    images = {}
    missing = ""
    try:
        digits = load_digits()
        for digit in range(10):
            first = digits.pixels[digits.classes == digit][0, 0]
            images[f"digit {digit}"] = first.double() / 255
    except ImportError as error:
        missing = str(error)
    images |= generated_images()
    # Three decimals are enough to show, and keep the response small.
    return {"pictures": {name: image.round(decimals=3).tolist() for name, image in images.items()}, "missing": missing}


def generated_images() -> dict[str, Tensor]:
    """Return images with the edges, corners and textures that kernels detect."""
    axis = torch.arange(SIDE, dtype=torch.float64)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    middle = (SIDE - 1) / 2
    radius = ((y - middle) ** 2 + (x - middle) ** 2).sqrt()
    letters = torch.tensor([[float(mark == "#") for mark in line] for line in LETTERS.split()], dtype=torch.float64)
    return {
        "disc": (middle - 0.8 - radius).clamp(0, 1),
        "stripes": ((x + y) % 4 < 2).double(),
        "checker": ((x // 3 + y // 3) % 2).double(),
        "text": letters,
        "slope": (x + y) / (2 * (SIDE - 1)),
        "point": ((y == SIDE // 2) & (x == SIDE // 2)).double(),
    }
