"""The files that MNIST comes in: bytes after a small header, packed or not.

images  00 00 08 03, then how many, height and width (four bytes each, the largest first), then the pixels
labels  00 00 08 01, then how many, then the classes
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["read", "there"]

LARGEST = 2**30  # bytes of a file, unpacked
FILES = {"images": ("images-idx3-ubyte", 3), "labels": ("labels-idx1-ubyte", 1)}


def there(folder: Path) -> bool:
    """Whether a folder holds MNIST's training pictures."""
    return any((folder / f"train-{FILES['images'][0]}{suffix}").is_file() for suffix in ("", ".gz"))


def read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Pictures ``[N, height, width]`` and classes ``[N]``, bytes, of ``part``: "train" or "t10k"."""
    images, labels = (_opened(folder, f"{part}-{name}", axes) for name, axes in FILES.values())
    if len(images) != len(labels) or not len(images):
        raise ValueError(
            f"{folder}: {part} has {len(images):,} pictures and {len(labels):,} classes; one each is right"
        )
    return images, labels


def _opened(folder: Path, name: str, axes: int) -> Tensor:
    file = next((x for x in (folder / name, folder / f"{name}.gz") if x.is_file()), None)
    if file is None:
        raise ValueError(f"{folder} has no {name}, packed or not; MNIST has four files")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            found = opened.read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if len(found) > LARGEST:
        raise ValueError(f"{file} holds over 1 GiB; that does not belong in memory")
    if found[:4] != bytes((0, 0, 8, axes)) or len(found) < 4 + 4 * axes:
        raise ValueError(f"{file} does not begin as a file of MNIST does: {found[:4].hex(' ') or 'it is empty'}")
    sizes = [int.from_bytes(found[4 + 4 * i : 8 + 4 * i], "big") for i in range(axes)]
    start = 4 + 4 * axes
    if len(found) - start != math.prod(sizes):
        raise ValueError(f"{file} says {' × '.join(map(str, sizes))} bytes, but holds {len(found) - start:,}")
    return torch.frombuffer(bytearray(found), dtype=torch.uint8)[start:].view(sizes)
