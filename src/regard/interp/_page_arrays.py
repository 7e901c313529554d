"""The arrays of the offline page: integers of a stated error, deflated, as printable text.

A number is stored as ``value = scale[head] · (code / largest code)^power``. Codes of more than 8 bits are stored as
planes: first the low bytes of the whole array, then the next bytes. All arrays of a page form one block, which is
compressed with deflate and written in base 91: two characters hold 13 bits.

The strongest keys of a row are sorted by key, the last key first. ``keys [H, k, R]`` holds the distance from the query
to the first of them (query − key, modulo 2^bits), then the distance from each key to the next; ``top [H, k, R]`` holds
the square roots of their weights. Code 0 of ``top`` means that there is no such key. If S = 1, key 0 is left out of the
lists, because its weight is 1 − ``rest``.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

LEAST_WEIGHT = 1e-5  # smaller weights are not in lists
LIST_BITS = (10, 9, 8, 7)  # of the weights in lists, the finest first
# Printable ASCII without the four characters that HTML, JSON or an attribute could misread.
ALPHABET = "".join(chr(code) for code in range(32, 127) if chr(code) not in '<&"\\')
BITS_PER_PAIR = 13  # of two characters: 91² = 8,281 ≥ 2^13
WHOLE_OF_SAMPLE = 0.95  # a large block compresses a little better than a small sample of it
SAMPLED_HEADS = 24  # whose lists are compressed to estimate the size of all lists


def encode_numbers(values: Tensor, bits: int, *, power: int = 1) -> dict[str, Any]:
    """Numbers ≥ 0 as integers ``codes``; the largest number of each head has the largest code."""
    values = values.detach().to("cpu", torch.float32).double()
    x = torch.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0).clamp(min=0)
    scale = x.flatten(1).amax(1)
    relative = x / scale.where(scale > 0, 1).reshape(-1, *[1] * (x.ndim - 1))
    codes = (relative ** (1 / power) * (2**bits - 1)).round().numpy().astype(_integer_type(bits))
    return {"bits": bits, "power": power, "scale": scale.tolist(), "shape": list(x.shape), "codes": codes}


def with_base64(encoded: dict[str, Any]) -> dict[str, Any]:
    """The same description with ``data``, the codes as base64, instead of ``codes``: one array by itself."""
    described = {name: encoded[name] for name in encoded if name != "codes"}
    return described | {"data": base64.b64encode(encoded["codes"].tobytes()).decode("ascii")}


def encode_keys(
    top: Tensor, top_at: Tensor, *, first_query: int, largest_index: int, first_key_is_known: bool
) -> dict[str, Any]:
    """The keys of lists ``[H, R, k]`` as distances, and their weights in the same order, both ``[H, k, R]``.

    - ``top``, ``top_at``: the strongest weights of a row and their keys; −1 where there is no key.
    - ``first_query``: the query of the first row.
    - ``largest_index``: no query or key is larger.
    - ``first_key_is_known``: leave key 0 out.
    """
    keys = top_at.detach().cpu().numpy().astype("int64")
    weights = top.detach().to("cpu", torch.float32).numpy()
    present = (keys >= 0) & (weights >= LEAST_WEIGHT)
    if first_key_is_known:
        present &= keys != 0

    # The last key comes first, because most heads look at near keys; absent keys come last.
    order = numpy.argsort(numpy.where(present, -keys, 1), axis=-1, kind="stable")
    present = numpy.take_along_axis(present, order, -1)
    keys = numpy.take_along_axis(keys, order, -1)
    queries = first_query + numpy.arange(keys.shape[1])
    distances = numpy.empty_like(keys)
    distances[..., 0] = queries - keys[..., 0]
    distances[..., 1:] = keys[..., :-1] - keys[..., 1:]
    bits = 16 if largest_index < 2**16 else 32
    codes = (numpy.where(present, distances, 0) % 2**bits).astype(_integer_type(bits)).transpose(0, 2, 1)
    weights = numpy.where(present, numpy.take_along_axis(weights, order, -1), 0.0).transpose(0, 2, 1)
    return {"bits": bits, "shape": list(codes.shape), "codes": codes, "weights": weights}


def encode_weights(weights: Any, bits: int) -> dict[str, Any]:
    """The weights of lists as square roots of ``bits`` bits; a weight above 0 never gets code 0.

    The error is at most √weight / (2^bits − 1) for codes above 1, and 1 / (2^bits − 1)² below.
    """
    largest_code = 2**bits - 1
    roots = numpy.round(numpy.sqrt(numpy.clip(weights, 0, 1)) * largest_code)
    codes = numpy.where(weights > 0, numpy.maximum(roots, 1), 0).astype(_integer_type(bits))
    scale = [1.0] * codes.shape[0]
    return {"bits": bits, "power": 2, "scale": scale, "shape": list(codes.shape), "codes": codes}


def list_bits_that_fit(lists: Sequence[dict[str, Any]], most_bytes: int) -> tuple[int, float]:
    """The finest of ``LIST_BITS`` with which lists take about ``most_bytes``, and the share of their rows that fits.

    The share is below 1 if even the coarsest weights take more. Sizes are estimated from some of the heads.

    - ``lists``: of ``encode_keys``, one per layer.
    """
    heads = [(layer, head) for layer in lists for head in range(layer["codes"].shape[0])]
    sampled = heads[:: -(-len(heads) // SAMPLED_HEADS) or 1]
    if not sampled:
        return LIST_BITS[0], 1.0
    keys = b"".join(_planes(layer["codes"][head]) for layer, head in sampled)
    key_bytes = len(zlib.compress(keys))
    size = 0.0
    bits = LIST_BITS[0]
    for bits in LIST_BITS:
        codes = [encode_weights(layer["weights"][head : head + 1], bits)["codes"] for layer, head in sampled]
        weight_bytes = len(zlib.compress(b"".join(map(_planes, codes))))
        size = WHOLE_OF_SAMPLE * (key_bytes + weight_bytes) * len(heads) / len(sampled)
        if size <= most_bytes:
            return bits, 1.0
    return bits, max(0.0, most_bytes / size)


class ArrayBlock:
    """The arrays of one page. Arrays of one name stand together, because similar bytes compress better."""

    def __init__(self) -> None:
        self.arrays: dict[str, list[tuple[dict[str, Any], bytes]]] = {}

    def add(self, name: str, encoded: dict[str, Any] | None) -> dict[str, Any] | None:
        """Store an array; returns its description, which gets its ``start`` in the block from ``compress``."""
        if encoded is None:
            return None
        described = {key: encoded[key] for key in encoded if key not in ("codes", "weights")}
        self.arrays.setdefault(name, []).append((described, _planes(encoded["codes"])))
        return described

    def copy(self) -> ArrayBlock:
        """A block with the same arrays and descriptions, to which others can be added."""
        block = ArrayBlock()
        block.arrays = {name: list(arrays) for name, arrays in self.arrays.items()}
        return block

    def compress(self) -> bytes:
        """The compressed block; sets ``start`` in all descriptions."""
        compressor = zlib.compressobj(9)
        parts = []
        start = 0
        for arrays in self.arrays.values():
            for described, data in arrays:
                described["start"] = start
                start += len(data)
                parts.append(compressor.compress(data))
        return b"".join([*parts, compressor.flush()])


def base91(data: bytes) -> str:
    """Bytes as printable text, 13 bits in two characters, the low bits first; the end is filled with zeros.

    >>> len(base91(bytes(13)))
    16
    """
    bits = numpy.unpackbits(numpy.frombuffer(data, "u1"), bitorder="little")
    groups = numpy.pad(bits, (0, -len(bits) % BITS_PER_PAIR)).reshape(-1, BITS_PER_PAIR)
    numbers = groups.astype("u2") @ (1 << numpy.arange(BITS_PER_PAIR, dtype="u2"))
    characters = numpy.frombuffer(ALPHABET.encode("ascii"), "u1")
    pairs = numpy.stack([characters[numbers % 91], characters[numbers // 91]], axis=-1)
    return pairs.tobytes().decode("ascii")


def _integer_type(bits: int) -> str:
    return f"<u{_byte_count(bits)}"


def _byte_count(bits: int) -> int:
    if bits <= 8:
        return 1
    return 2 if bits <= 16 else 4


def _planes(codes: Any) -> bytes:
    """The low bytes of an array, then its next bytes: the high bytes are mostly alike, and compress to little."""
    bytes_of_codes = numpy.ascontiguousarray(codes).view("u1").reshape(-1, codes.dtype.itemsize)
    return bytes_of_codes.T.tobytes()
