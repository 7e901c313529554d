"""What the schemes share: checks, the initial law of learned tables, and the dtype tables are handed over in."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard.shapes import integer, number, tracing

INITIAL_STD = 0.02  # learned tables start as N(0, 0.02²), the usual law for embeddings


def table_dtype(q: Tensor) -> torch.dtype:
    """float64 for float64 queries, else float32: in bfloat16 a distance of 1,001 does not exist, so no table uses it.

    >>> table_dtype(torch.zeros(1, dtype=torch.bfloat16))
    torch.float32
    """
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def learned(*sizes: int) -> nn.Parameter:
    """A learned table of that size; ``reset`` gives it its first values."""
    return nn.Parameter(torch.empty(*sizes))


def reset(*tables: Tensor) -> None:
    """First values of learned tables: N(0, 0.02²)."""
    for table in tables:
        nn.init.normal_(table, std=INITIAL_STD)


def check_offset(offset: int | None) -> int | None:
    """``offset`` as given: None (the last query stands at the last key) or any whole number."""
    return None if offset is None else integer("offset", offset, least=None)


def check_grid(name: str, grid: object) -> tuple[int, int]:
    """``(height, width)``, both at least 1."""
    if not isinstance(grid, tuple | list) or len(grid) != 2:
        raise TypeError(f"{name} must be (height, width), two whole numbers, got {grid!r}")
    return integer(f"{name} height", grid[0], least=1), integer(f"{name} width", grid[1], least=1)


def check_heads(scheme: object, heads: int, q: Tensor) -> None:
    """A scheme made for H heads serves queries ``q [B, H, n, d]`` of as many."""
    if q.shape[1] != heads:
        raise ValueError(
            f"{type(scheme).__name__} is made for {heads} heads, but q has {q.shape[1]}; they must be equal"
        )


def check_width(scheme: object, d: int, q: Tensor) -> None:
    """A scheme that multiplies queries serves queries of its own width."""
    if q.shape[-1] != d:
        raise ValueError(
            f"{type(scheme).__name__} is made for d={d}, but q has width {q.shape[-1]}; they must be equal"
        )


def check_scale(scale: float | None, d: int) -> float:
    """``scale`` as a finite number ≥ 0; None is 1/√d."""
    if scale is None:
        return float(d**-0.5)
    scale = number("scale", scale, least=0.0)
    if scale == float("inf"):
        raise ValueError("scale is inf; a term that is added to scores needs a finite number ≥ 0")
    return scale


def check_floating(name: str, x: object) -> None:
    """``x`` is a floating tensor; else refused by name."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a floating tensor, got {x.dtype if isinstance(x, Tensor) else repr(x)}")


def check_whole(name: str, x: object) -> None:
    """``x`` is a tensor of whole numbers; else refused by name."""
    if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        given = x.dtype if isinstance(x, Tensor) else repr(x)
        raise TypeError(f"{name} must be a tensor of whole numbers, got {given}")


def finite_tensor(name: str, values: Tensor | Sequence[float] | Sequence[Sequence[float]]) -> Tensor:
    """Numbers as a floating tensor (float64 unless a floating tensor was given), all finite; else refused by name."""
    if isinstance(values, str | bytes) or not isinstance(values, Tensor | Sequence):
        raise TypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}")
    try:
        x = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.float64)
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be a tensor or a sequence of numbers, got {values!r}") from None
    if x.dtype == torch.bool or x.is_complex():
        raise TypeError(f"{name} must be real numbers, got {x.dtype}")
    x = x if x.is_floating_point() else x.double()
    if not tracing() and not bool(x.isfinite().all()):
        raise ValueError(f"{name} must be finite numbers, got {x.tolist()}")
    return x
