"""Read the files of MNIST and datasets in the same format: bytes after a small header, gzipped or not.

images  00 00 08 03, then the count, height and width (four bytes each, big-endian), then the pixels
labels  00 00 08 01, then the count, then the classes
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import torch
from torch import Tensor

from regard._errors import RegardError

MAX_BYTES = 2**30  # of a file, unpacked
IMAGES = "images-idx3-ubyte"
LABELS = "labels-idx1-ubyte"


def is_mnist_folder(folder: Path) -> bool:
    """Whether a folder contains the training images of MNIST."""
    return _find_file(folder, f"train-{IMAGES}") is not None


def read_mnist(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return the images ``[N, height, width]`` and classes ``[N]`` of ``part``, "train" or "t10k", as bytes."""
    images = _read_file(folder, f"{part}-{IMAGES}", 3)
    labels = _read_file(folder, f"{part}-{LABELS}", 1)
    if len(images) != len(labels) or not len(images):
        raise RegardError(f"{folder}: {part} has {len(images):,} images and {len(labels):,} classes; give one each")
    return images, labels


def _find_file(folder: Path, name: str) -> Path | None:
    for file in (folder / name, folder / f"{name}.gz"):
        if file.is_file():
            return file
    return None


def _read_file(folder: Path, name: str, axes: int) -> Tensor:
    """Read a file with ``axes`` dimensions, and check its header against its size."""
    file = _find_file(folder, name)
    if file is None:
        raise RegardError(f"{folder} has neither {name} nor {name}.gz; MNIST has four files")
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
            content = opened.read(MAX_BYTES + 1)  # a small packed file may be huge when unpacked
    except (OSError, EOFError, zlib.error) as error:
        raise RegardError(f"{file} cannot be read: {error}") from None
    if len(content) > MAX_BYTES:
        raise RegardError(f"{file} has more than 1 GiB unpacked; at most 1 GiB is accepted")
    start = 4 + 4 * axes
    if content[:4] != bytes((0, 0, 8, axes)) or len(content) < start:
        raise RegardError(f"{file} does not start as a file of MNIST does: {content[:4].hex(' ') or 'it is empty'}")
    shape = [int.from_bytes(content[k : k + 4], "big") for k in range(4, start, 4)]
    if len(content) - start != math.prod(shape):
        raise RegardError(f"{file} claims {' × '.join(map(str, shape))} bytes, but has {len(content) - start:,}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].view(shape)
