"""Reads a GGUF file: its metadata and its tensors. Every count, size and offset is checked before it is used.

    "GGUF"  version  number of tensors  number of entries
    entries:  key, type, value
    tensors:  name, number of dimensions, dimensions (the last one first), type, offset in the data
    data, aligned

The reader of the ``gguf`` package trusts the file: a damaged count makes it allocate memory without end. So the header
is read here, and that package only converts quantised blocks to numbers.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._error_report import error_line
from regard._errors import RegardError
from regard._files import open_regular
from regard._shapes import aligned

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
MOST_ENTRIES = 2**16  # of metadata, and of tensors
MOST_VALUES = 2**23  # numbers and texts in all arrays of a file; the largest vocabularies have 2¹⁸ tokens and merges
LONGEST_NAME = 256  # letters of a key, or of the name of a tensor
MOST_DIMENSIONS = 4  # the limit of ggml
LARGEST_SIZE = 2**31 - 1  # of one dimension
LARGEST_ALIGNMENT = 2**16
DEFAULT_ALIGNMENT = 32
NUMBERS_AT_ONCE = 2**22  # that are dequantised in one step

# The types of values in the metadata: the number in the file → the format of ``struct``.
NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING = 8
ARRAY = 9

# The types of tensors that torch has. They stay in the mapped file.
PLAIN_TYPES = {0: torch.float32, 1: torch.float16, 28: torch.float64, 30: torch.bfloat16}


@dataclass(frozen=True)
class StoredArray:
    """Where a tensor is in the file: its shape in torch's order, the number of its type, and its bytes."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class GgufFile:
    """The metadata and the tensors of a GGUF file, which is memory-mapped.

    - ``metadata``: the entries by key. Arrays are lists.
    - ``arrays``: the tensors by name.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_regular(path) as opened:
            size = os.fstat(opened.fileno()).st_size
            if opened.read(len(MAGIC)) != MAGIC:
                raise RegardError(f"{path} must be a GGUF file, which begins with GGUF, got other bytes")
            # A private copy: a parameter that is trained must not change the file. Pages are copied when written.
            self._bytes = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
        header = _Header(path, self._bytes)
        self.metadata = header.metadata
        self.arrays = header.arrays

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of this name. Quantised tensors are float32, or ``dtype``; others are views of the file."""
        array = self.arrays[name]
        raw = torch.frombuffer(self._bytes, dtype=torch.uint8, count=array.size, offset=array.start)
        if array.kind in PLAIN_TYPES:
            # Misaligned bytes cannot be seen as numbers, so they are copied first.
            if array.start % PLAIN_TYPES[array.kind].itemsize:
                raw = raw.clone()
            return aligned(raw.view(PLAIN_TYPES[array.kind])).view(array.shape)
        return self._dequantise(array, raw, dtype if dtype is not None else torch.float32)

    def _dequantise(self, array: StoredArray, raw: Tensor, dtype: torch.dtype) -> Tensor:
        import gguf
        import numpy

        kind = gguf.GGMLQuantizationType(array.kind)
        rows = raw.view(math.prod(array.shape[:-1]), -1)
        values = torch.empty(rows.shape[0], array.shape[-1], dtype=dtype)
        # A part of the rows at a time: the conversion needs several times the memory of its result.
        step = max(1, NUMBERS_AT_ONCE // array.shape[-1])
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step].numpy()
            # Scales of damaged blocks may overflow. The check of the weights names such a tensor.
            with numpy.errstate(all="ignore"):
                try:
                    numbers = gguf.quants.dequantize(part, kind)
                except NotImplementedError as error:
                    raise RegardError(f"{self.path}: {array.name} cannot be converted: {error_line(error)}") from None
            values[start : start + step] = torch.from_numpy(numpy.ascontiguousarray(numbers))
        return values.view(array.shape)


class _Header:
    """Reads the parts of a file that come before the data."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path = path
        self.content = content
        self.position = len(MAGIC)
        self.values = 0  # numbers and texts in arrays so far
        version = self._number("I", "version")
        if version not in VERSIONS:
            detail = ""
            if int.from_bytes(int(version).to_bytes(4, "little"), "big") in VERSIONS:
                detail = " (its bytes are in big-endian order)"
            raise self._error(f"the version must be {' or '.join(map(str, VERSIONS))}, got {version}{detail}")
        tensors = self._count("number of tensors", MOST_ENTRIES)
        entries = self._count("number of metadata entries", MOST_ENTRIES)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._name("a metadata key")
            if key in self.metadata:
                raise self._error(f"metadata must have each key once, got {key} twice")
            self.metadata[key] = self._value(key)
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise self._error(
                f"the model must be in one file, got one part of {parts!r:.20}; join them with llama-gguf-split --merge"
            )
        self.arrays = self._read_arrays(tensors)

    def _value(self, key: str) -> Any:
        kind = self._number("I", f"type of {key}")
        if kind == STRING:
            return self._text(key)
        if kind in NUMBER_FORMATS:
            return self._number(NUMBER_FORMATS[kind], key)
        if kind != ARRAY:
            raise self._error(f"{key} must have a type from 0 to 12, got {kind}")

        kind = self._number("I", f"type of {key}")
        # All arrays together are limited, because a number takes more memory in Python than in the file.
        length = self._count(f"length of {key}", MOST_VALUES - self.values)
        self.values += length
        if kind == STRING:
            return [self._text(key) for _ in range(length)]
        if kind not in NUMBER_FORMATS:
            raise self._error(f"{key} must be a list of numbers or texts, got elements of type {kind}")
        return list(self._unpack(f"<{length}{NUMBER_FORMATS[kind]}", key))

    def _read_arrays(self, count: int) -> dict[str, StoredArray]:
        infos = [self._array_info() for _ in range(count)]

        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        valid = isinstance(alignment, int) and 8 <= alignment <= LARGEST_ALIGNMENT and alignment.bit_count() == 1
        if not valid:
            raise self._error(f"general.alignment must be a power of 2 from 8 to 65,536, got {alignment!r:.40}")
        data = -(-self.position // alignment) * alignment

        arrays: dict[str, StoredArray] = {}
        end = data
        # In the order of the file, so that each tensor is compared with the one before it.
        for name, shape, kind, offset in sorted(infos, key=lambda info: info[3]):
            if name in arrays:
                raise self._error(f"tensors must have different names, got {name} twice")
            if offset % alignment:
                raise self._error(f"the offset of {name} must be a multiple of {alignment}, got {offset}")
            size = self._array_size(name, shape, kind)
            start = data + offset
            if start + size > len(self.content):
                raise self._error(
                    f"{name} must end within the file of {len(self.content):,} bytes, got an end at byte "
                    f"{start + size:,}; the file is truncated or damaged"
                )
            if start < end:
                raise self._error(f"{name} must begin after the tensor before it, got an overlap")
            arrays[name] = StoredArray(name, shape, kind, start, size)
            end = start + size
        return arrays

    def _array_info(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape in torch's order, type and offset of the next tensor."""
        name = self._name("the name of a tensor")
        dimensions = self._number("I", f"number of dimensions of {name}")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise self._error(f"{name} must have 1 to {MOST_DIMENSIONS} dimensions, got {dimensions}")
        sizes = self._unpack(f"<{dimensions}Q", name)
        if not all(1 <= size <= LARGEST_SIZE for size in sizes):
            raise self._error(f"the dimensions of {name} must be from 1 to 2³¹ − 1, got {list(sizes)}")
        kind = self._number("I", f"type of {name}")
        offset = self._number("Q", f"offset of {name}")
        return name, tuple(reversed(sizes)), kind, offset

    def _array_size(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """The bytes of a tensor."""
        if kind in PLAIN_TYPES:
            return math.prod(shape) * PLAIN_TYPES[kind].itemsize
        block, block_bytes = self._block_size(name, kind)
        if shape[-1] % block:
            raise self._error(f"the rows of {name} must be blocks of {block} numbers, got rows of {shape[-1]}")
        return math.prod(shape) // block * block_bytes

    def _block_size(self, name: str, kind: int) -> tuple[int, int]:
        """How many numbers a block of a quantised type has, and how many bytes."""
        if find_spec("gguf") is None:
            raise self._error(
                f"{name} is quantised, which needs the package gguf: pip install 'regard[gguf]'; without it only "
                "float32, float16, bfloat16 and float64 are read"
            )
        import gguf

        # Integers are no weights, and these types have no conversion.
        try:
            quantised = gguf.GGMLQuantizationType(kind)
        except ValueError:
            quantised = None
        if quantised is None or (quantised.name.startswith("I") and quantised.name[1:].isdigit()):
            raise self._error(f"{name} must have a type of numbers that gguf {_gguf_version()} knows, got {kind}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[quantised]
        return block, block_bytes

    def _count(self, name: str, most: int) -> int:
        count = self._number("Q", name)
        if count > most:
            raise self._error(f"the {name} must be at most {most:,}, got {count:,}")
        return int(count)

    def _number(self, code: str, name: str) -> Any:
        return self._unpack(f"<{code}", name)[0]

    def _name(self, what: str) -> str:
        """A key or the name of a tensor, which error messages print."""
        name = self._text(what)
        if not name.isprintable() or not 1 <= len(name) <= LONGEST_NAME:
            raise self._error(f"{what} must be 1 to {LONGEST_NAME} printable letters, got {name[:40]!r}")
        return name

    def _text(self, name: str) -> str:
        length = self._number("Q", name)
        # Not strict: a damaged letter in a description is no reason to refuse a model.
        return self._take(length, name).decode("utf-8", errors="replace")

    def _unpack(self, layout: str, name: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self._take(struct.calcsize(layout), name))

    def _take(self, size: int, name: str) -> bytes:
        """The next bytes of the file."""
        end = self.position + size
        if end > len(self.content):
            raise self._error(
                f"{name} must end within the file of {len(self.content):,} bytes, got an end at byte {end:,}; the "
                "file is truncated or damaged"
            )
        taken = self.content[self.position : end]
        self.position = end
        return taken

    def _error(self, message: str) -> RegardError:
        return RegardError(f"{self.path}: {message}")


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file: by its suffix, or by its first bytes, because some programs store it without one.

    >>> is_gguf(regard.models.bundled() / "model.safetensors")
    False
    """
    if not path.is_file():
        return False
    if path.suffix.lower() == SUFFIX:
        return True
    try:
        with open_regular(path) as opened:
            return opened.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def _gguf_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gguf")
    except PackageNotFoundError:
        return ""
