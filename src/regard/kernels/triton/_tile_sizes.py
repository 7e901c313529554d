"""How many queries and keys a tile has, and how many warps compute it: one table for all GPUs.

``scripts/measure/gpu_variants.py`` compiles every entry, and the careful launches, and prints what they need. The sizes
are chosen so that nothing of the forward pass is spilled up to a width of 128, and so that every tile fits the shared
memory of every GPU in the list there. A call that is observed has smaller tiles than one that is not, so its output may
be rounded differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class TileSize:
    """The tile of one program: ROWS queries, blocks of KEYS keys, and how Triton compiles the loop over the blocks."""

    rows: int
    keys: int
    warps: int = 8
    stages: int = 2


# The largest width of q, k and v. A tile of a wider call does not fit into registers.
MAX_WIDTH = 256

# By kind of pass, bytes per number, and the width of q or v (the larger one), padded to a power of two. Options and
# observables need registers beside the scores of a tile, so their tiles are smaller. The gradients of biases are not
# computed in a loop over keys, so nothing can be loaded ahead.
_TILES: dict[str, dict[int, dict[int, TileSize]]] = {
    "forward": {
        2: {
            32: TileSize(128, 64),
            64: TileSize(128, 64),
            128: TileSize(64, 64),
            256: TileSize(64, 32),
        },
        4: {
            32: TileSize(64, 32),
            64: TileSize(64, 32),
            128: TileSize(64, 16),
            256: TileSize(16, 16),
        },
    },
    "forward with options": {
        2: {
            32: TileSize(64, 32),
            64: TileSize(64, 32),
            128: TileSize(64, 32),
            256: TileSize(32, 32),
        },
        4: {
            32: TileSize(32, 32),
            64: TileSize(32, 16),
            128: TileSize(16, 32),
            256: TileSize(16, 16),
        },
    },
    "forward observed": {
        2: {
            32: TileSize(64, 32),
            64: TileSize(64, 32),
            128: TileSize(32, 32),
            256: TileSize(32, 16),
        },
        4: {
            32: TileSize(32, 32),
            64: TileSize(32, 32),
            128: TileSize(16, 32),
            256: TileSize(16, 16),
        },
    },
    "weights": {
        2: {
            32: TileSize(64, 32),
            64: TileSize(64, 32),
            128: TileSize(64, 32),
            256: TileSize(32, 32),
        },
        4: {
            32: TileSize(32, 32),
            64: TileSize(32, 32),
            128: TileSize(32, 16),
            256: TileSize(16, 16),
        },
    },
    "backward": {
        2: {
            32: TileSize(64, 32),
            64: TileSize(64, 32),
            128: TileSize(64, 32),
            256: TileSize(32, 32),
        },
        4: {
            32: TileSize(32, 32),
            64: TileSize(32, 32),
            128: TileSize(32, 16),
            256: TileSize(16, 16),
        },
    },
    "bias gradients": {
        2: {
            32: TileSize(64, 16, stages=1),
            64: TileSize(64, 16, stages=1),
            128: TileSize(64, 16, stages=1),
            256: TileSize(32, 16, stages=1),
        },
        4: {
            32: TileSize(32, 16, stages=1),
            64: TileSize(32, 16, stages=1),
            128: TileSize(16, 16, stages=1),
            256: TileSize(16, 16, stages=1),
        },
    },
}


def tile_size(kind: str, bytes_per_number: int, width: int) -> TileSize:
    """The tile of a kind of pass for a padded width; "weights" is a pass over queries and keys without values."""
    sizes = _TILES[kind][bytes_per_number]
    return sizes[max(32, width)]


def careful_tile(tile: TileSize) -> TileSize:
    """The tile of the second launch, which computes again what was not finite.

    It needs more shared memory than the first launch, so it does not load ahead. The sizes are the same, because the
    programs of both launches have the same numbers and add in the same order.
    """
    return replace(tile, stages=1)


def padded_width(width: int) -> int:
    """The width of a tile: a power of two, and at least 16, the smallest width of a matrix product."""
    padded = 16
    while padded < width:
        padded *= 2
    return padded
