"""The letters for dimensions, and the shapes of one attention call.

    B  batch (all leading dimensions, flattened)    H  query heads
    G  key/value heads (G divides H)                R  query heads that share one key head, R = H / G
    N  queries (``n``)                              M  keys (``m``)
    D  width of a query or key (``d``)              E  width of a value (``e``)

Suffixed names (``q_BHND``) are used where a reshape happens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._checks import check_tensor
from regard._errors import RegardError, RegardTypeError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Shape:
    """The sizes of one call: ``q [*batch, H, n, d]``, ``k [*batch, G, m, d]``, ``v [*batch, G, m, e]``."""

    batch: tuple[int, ...]
    heads: int
    kv_heads: int
    n: int
    m: int
    d: int
    e: int

    @property
    def batch_size(self) -> int:
        """B: the product of all batch dimensions."""
        return math.prod(self.batch)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape that masks and biases broadcast to: ``[*batch, H, n, m]``."""
        return (*self.batch, self.heads, self.n, self.m)


def attention_shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check that the shapes of q, k and v fit together, and return the sizes. Batch dimensions broadcast.

    >>> attention_shape(torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 8)).scores
    (2, 6, 5, 7)
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype not in DTYPES:
            raise RegardTypeError(f"{name} must be float64, float32, bfloat16 or float16, got {x.dtype}")
        if x.ndim < 3:
            shape = list(x.shape)
            raise RegardError(f"{name} has shape {shape}; it must be [*batch, heads, length, width]")
    if not (q.dtype == k.dtype == v.dtype):
        raise RegardTypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not (q.device == k.device == v.device):
        raise RegardError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    heads, n, d = q.shape[-3:]
    kv_heads, m, key_width = k.shape[-3:]
    if key_width != d:
        raise RegardError(f"q and k must have equal widths (only v's is free), got {d} and {key_width}")
    if d == 0 or heads == 0 or kv_heads == 0:
        raise RegardError(f"heads and widths must not be 0, got q with {heads} × {d} and k with {kv_heads} heads")
    if tuple(v.shape[-3:-1]) != (kv_heads, m):
        raise RegardError(f"v must have one value per key: {kv_heads} heads of {m}, got {v.shape[-3]} of {v.shape[-2]}")
    if heads % kv_heads:
        raise RegardError(f"the heads of k must divide those of q, got {kv_heads} and {heads}")
    batch = tuple(q.shape[:-3])
    # Equal batches are the usual case, and broadcast_shapes costs more than a small call.
    if not (batch == k.shape[:-3] == v.shape[:-3]):
        try:
            batch = tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
        except RuntimeError:
            shapes = f"{list(q.shape[:-3])}, {list(k.shape[:-3])} and {list(v.shape[:-3])}"
            raise RegardError(f"the batch dimensions of q, k and v do not broadcast: {shapes}") from None
    return Shape(batch, heads, kv_heads, n, m, d, v.shape[-1])


def is_aligned(x: Tensor) -> bool:
    """Whether the elements lie at multiples of their size in memory.

    Those of a file whose header has an odd length do not, and C++ does not define what reading them does.
    """
    return x.data_ptr() % x.element_size() == 0


def aligned(x: Tensor) -> Tensor:
    """``x`` if it is aligned, else a copy."""
    return x if is_aligned(x) else x.clone()


def broadcasts(size: int, to: int) -> bool:
    """Whether a dimension of ``size`` broadcasts to ``to``. (``size in (1, to)`` fails for symbolic sizes.)"""
    return size == 1 or size == to


def flatten_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """``[*any, a, b, c] → [B, a, b, c]``: broadcast the leading dimensions to ``batch`` and join them.

    The result is a view where strides allow it. A stride of 0 over the whole batch stays 0.
    """
    if len(batch) == 1 and x.ndim == 4 and x.shape[0] == batch[0]:
        return x
    tail = x.shape[-3:]
    return x.expand(*batch, *tail).reshape(math.prod(batch), *tail)


def flatten_scores_like(x: Tensor, shape: Shape, name: str) -> Tensor:
    """``x`` broadcastable to ``[*batch, H, n, m] → [B or 1, H or 1, n or 1, m or 1]``, broadcast sizes kept at 1."""
    full = shape.scores
    sizes = zip(reversed(x.shape), reversed(full), strict=False)
    if x.ndim > len(full) or not all(broadcasts(a, b) for a, b in sizes):
        raise RegardError(f"{name} has shape {list(x.shape)}, which does not broadcast to [*B, H, n, m] = {list(full)}")
    # A batch of ones is not expanded: the kernels broadcast it without copies.
    x = x.reshape(*([1] * (len(full) - x.ndim)), *x.shape)
    if all(size == 1 for size in x.shape[:-3]):
        return x.reshape(1, *x.shape[-3:])
    return flatten_batch(x, shape.batch)


def resolve_offset(n: int, m: int, offset: int | None) -> int:
    """Return the offset of the alignment rule: query i is at key position i + offset. None means m − n."""
    return m - n if offset is None else offset
