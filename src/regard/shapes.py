"""The alphabet of dimensions, and checks whose errors say what was given and what would fit.

    B  batch (all leading dimensions, flattened)    H  query heads
    G  key/value heads (G divides H)                R  queries' heads that share one key head, R = H / G
    N  queries (``n``)                              M  keys (``m``)
    D  width of a query or key (``d``)              E  width of a value (``e``)

Suffixed names (``q_BHND``) are used where a reshape happens.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

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
    def batches(self) -> int:
        """B: all leading dimensions as one."""
        return math.prod(self.batch)

    @property
    def scores(self) -> tuple[int, ...]:
        """The shape that masks and biases broadcast to: ``[*batch, H, n, m]``."""
        return (*self.batch, self.heads, self.n, self.m)


def tracing() -> bool:
    """True under ``torch.compile``/``torch.export``, where no value of a tensor may be looked at."""
    return torch.compiler.is_compiling()


def readable(*tensors: Tensor) -> bool:
    """Whether the tensors' values may be looked at: not while tracing, nor where there are only shapes (meta, fake)."""
    return not tracing() and not any(x.is_meta or is_fake(x) for x in tensors)


def check_tensor(name: str, x: object) -> None:
    """``x`` is an ordinary tensor; else refused by name."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided or x.is_nested:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise TypeError(f"{name} is a {kind} tensor; an ordinary (strided) one is needed")


def attention_shape(q: Tensor, k: Tensor, v: Tensor) -> Shape:
    """Check q, k, v against each other; batch dimensions broadcast.

    >>> attention_shape(torch.zeros(2, 6, 5, 4), torch.zeros(2, 3, 7, 4), torch.zeros(2, 3, 7, 8)).scores
    (2, 6, 5, 7)
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}; attention takes float64, float32, bfloat16 or float16")
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; it needs at least 3 dimensions, [*batch, heads, length, width]"
            )
    if not (q.dtype == k.dtype == v.dtype):
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not (q.device == k.device == v.device):
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    heads, n, d = q.shape[-3:]
    kv_heads, m, d_k = k.shape[-3:]
    if d_k != d:
        raise ValueError(f"q has width {d} and k has width {d_k}; they must be equal (only v's width is free)")
    if d == 0 or heads == 0 or kv_heads == 0:
        raise ValueError(f"q has {heads} heads of width {d} and k {kv_heads} heads; none of these may be 0")
    if tuple(v.shape[-3:-1]) != (kv_heads, m):
        raise ValueError(
            f"v has {v.shape[-3]} heads of {v.shape[-2]} rows; k has {kv_heads} heads of {m} keys: "
            "there must be one value a key"
        )
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads and k {kv_heads}; key heads must divide query heads")
    batch = tuple(q.shape[:-3])
    try:
        if not (batch == k.shape[:-3] == v.shape[:-3]):  # the usual case, and the check costs more than a small call
            batch = tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError:
        raise ValueError(
            f"batch dimensions {list(q.shape[:-3])}, {list(k.shape[:-3])} and {list(v.shape[:-3])} "
            "of q, k and v do not broadcast"
        ) from None
    return Shape(batch, heads, kv_heads, n, m, d, v.shape[-1])


def broadcasts(size: int, to: int) -> bool:
    """Does a dimension of ``size`` broadcast to ``to``? Spelled out: ``in`` does not see symbolic sizes as equal."""
    return size == 1 or size == to


def flatten_batch(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """``[*any, a, b, c] → [B, a, b, c]``: broadcast the leading dimensions to ``batch`` and join them.

    A view where strides allow it; a stride of 0 over the whole batch stays 0.
    """
    if len(batch) == 1 and x.ndim == 4 and x.shape[0] == batch[0]:
        return x
    tail = x.shape[-3:]
    return x.expand(*batch, *tail).reshape(math.prod(batch), *tail)


def flatten_scores_like(x: Tensor, shape: Shape, name: str) -> Tensor:
    """``x`` broadcastable to ``[*batch, H, n, m] → [B or 1, H or 1, n or 1, m or 1]``, broadcast sizes kept at 1."""
    full = shape.scores
    fits = x.ndim <= len(full) and all(
        broadcasts(a, b) for a, b in zip(reversed(x.shape), reversed(full), strict=False)
    )
    if not fits:
        raise ValueError(
            f"{name} has shape {list(x.shape)}, which does not broadcast to [*batch, heads, n, m] = {list(full)}"
        )
    x = x.reshape(*([1] * (len(full) - x.ndim)), *x.shape)
    batch = x.shape[:-3]
    if all(size == 1 for size in batch):
        return x.reshape(1, *x.shape[-3:])
    return flatten_batch(x, shape.batch)


def integer(name: str, value: object, *, least: int | None = 0, most: int | None = None) -> int:
    """``value`` as an int within ``least … most``; anything else is refused by name."""
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt | numbers.Integral):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    value = value if isinstance(value, int | torch.SymInt) else int(value)  # NumPy's whole numbers
    if least is not None and value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return value  # type: ignore[return-value]


def number(name: str, value: object, *, least: float | None = None) -> float:
    """``value`` as a float that is not NaN and ``≥ least``; anything else is refused by name."""
    if type(value) is float and value >= (-math.inf if least is None else least):  # a NaN is not
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt | numbers.Real):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if isinstance(value, int) and abs(value) > 1e308:
        raise ValueError(f"{name} is beyond any floating number")
    if value != value or (least is not None and value < least):  # isnan does not take symbolic numbers
        raise ValueError(
            f"{name} must be a number ≥ {least}, got {value}" if least is not None else f"{name} is {value}"
        )
    return float(value)


def offset_of(n: int, m: int, offset: int | None) -> int:
    """The one alignment rule: query i stands at key position i + offset; by default the last query at the last key."""
    return m - n if offset is None else offset


def as_tensor(name: str, x: object) -> Tensor:
    """``x`` as a tensor; what cannot be one is refused by name."""
    if isinstance(x, list | tuple) and len(x) == 0:
        return torch.zeros(0, dtype=torch.int64)  # torch would take it for floats
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name} must be a tensor or numbers, got {x!r}") from None


def lengths_tensor(name: str, lengths: Tensor | Sequence[int] | int) -> Tensor:
    """Lengths as an int64 tensor ``[B]`` (or ``[1]`` for one number), never negative."""
    if isinstance(lengths, bool):
        raise TypeError(f"{name} must be whole numbers, got {lengths!r}")
    x = as_tensor(name, lengths)
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise TypeError(f"{name} must be whole numbers, got {x.dtype}")
    x = x.long()
    if x.ndim == 0:
        x = x.reshape(1)
    if readable(x) and bool((x < 0).any()):
        raise ValueError(f"{name} must not be negative, got {x.tolist()}")
    return x
