"""The compiled module's layers: linear maps of a few rows, norms, rotary turns, and a block's whole step.

Callers have checked dtypes, shapes and devices (``regard.kernels.layers``, ``regard.nn.step``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.kernels import native
from regard.kernels.native import DTYPES, compiled

__all__ = ["linear", "new_step", "norm", "step", "turn"]


def linear(x: Tensor, *maps: tuple[Tensor, Tensor | None]) -> Tensor:
    """``x [W₁ᵀ W₂ᵀ …] + biases`` for x ``[*, in]`` with few rows; one dtype for all, rows of each W contiguous."""
    parts = [(w.data_ptr(), 0 if b is None else b.data_ptr(), w.shape[0], w.stride(0)) for w, b in maps]
    y = x.new_empty(*x.shape[:-1], parts[0][2] if len(parts) == 1 else sum(part[2] for part in parts))
    rows = x if x.ndim == 2 and x.stride(1) == 1 else _flat_rows(x)
    compiled().linear(
        native.instruction_set(),
        DTYPES[x.dtype],
        rows.data_ptr(),
        *rows.shape,
        rows.stride(0),
        parts,
        y.data_ptr(),
        torch.get_num_threads(),
    )
    return y


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centred: bool) -> Tensor:
    """LayerNorm (centred) or RMSNorm of the last dimension; one dtype for all."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows = _flat_rows(x)
    compiled().norm(
        native.instruction_set(),
        DTYPES[x.dtype],
        rows.data_ptr(),
        *rows.shape,
        rows.stride(0),
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        eps,
        centred,
        torch.get_num_threads(),
    )
    return y


def turn(x: Tensor, cos: Tensor, sin: Tensor, width: int, halves: bool) -> Tensor:
    """x ``[B, H, n, d]`` with its first ``width`` features turned; waves ``[n, width]`` or ``[B, 1, n, width]``."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    each = 0 if cos.ndim == 2 or cos.shape[0] == 1 else cos.stride(0)
    where = cos.data_ptr(), sin.data_ptr()
    compiled().turn(
        native.instruction_set(),
        DTYPES[x.dtype],
        x.data_ptr(),
        x.shape,
        x.stride(),
        y.data_ptr(),
        *where,
        width,
        each,
        halves,
    )
    return y


def new_step(
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    norms: Sequence[Any],
    maps: Sequence[Any],
    ups: int,
    activation: int,
    scale: float,
    softcap: float,
    sinks: Tensor | None,
    turned: int,
    halves: bool,
) -> Any:
    """A block in the compiled module's form (``regard.nn.step``): addresses, which the caller keeps right.

    Norms have ``weight``, ``eps`` and perhaps ``bias``, or are None; maps are q, k, v, out, down and one or two ups.
    """
    addresses = [
        (0, 0, 0) if x is None else (x.weight.data_ptr(), _address(x, "bias"), int(_centres(x))) for x in norms
    ]
    eps = [0.0 if x is None else x.eps for x in norms]
    parts = [(x.weight.data_ptr(), _address(x, "bias"), x.weight.shape[0], x.weight.stride(0)) for x in maps]
    last = 0 if sinks is None else sinks.data_ptr()
    return compiled().Step(
        DTYPES[dtype], sizes, addresses, eps, parts, ups, activation, scale, softcap, last, turned, halves
    )


def step(
    raw: Any, x: Tensor, y: Tensor, cos: Tensor | None, sin: Tensor | None, k: Tensor, v: Tensor, m: int, seen: int
) -> bool:
    """Fill y with x after the block; False where a weighted sum is not finite."""
    waves = (0, 0) if cos is None or sin is None else (cos.data_ptr(), sin.data_ptr())
    cache = (k.data_ptr(), k.stride(), v.data_ptr(), v.stride())
    return bool(
        raw.run(
            native.instruction_set(),
            x.data_ptr(),
            y.data_ptr(),
            x.shape[0],
            *waves,
            *cache,
            m,
            seen,
            torch.get_num_threads(),
        )
    )


def _address(x: Any, name: str) -> int:
    found = getattr(x, name, None)
    return 0 if found is None else int(found.data_ptr())


def _centres(norm: Any) -> bool:
    """LayerNorm takes the mean away, RMSNorm does not and has no bias to give it back."""
    return hasattr(norm, "bias")


def _flat_rows(x: Tensor) -> Tensor:
    """``[*, width]`` as ``[rows, width]`` with contiguous rows; a view where there is one."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] == 1 else flat.contiguous()
