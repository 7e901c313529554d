"""Hard selection by position: positions go into q and k, and an infinite scale picks the nearest key."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.shapes import readable


def hard_selection(query_xy: Tensor, key_xy: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``q̃_h = (1, 2(x_q + Δ_h))``, ``k̃ = (−‖x_k‖², x_k)``, so that ``q̃ · k̃ = ‖x_q + Δ‖² − ‖x_k − (x_q + Δ)‖²``.

    Places ``query_xy [n, p]`` and ``key_xy [m, p]`` (p = 1 on a line, 2 on a grid) and one shift a head, ``shift [H,
    p]``, give ``q̃ [H, n, 1 + p]`` and ``k̃ [1, m, 1 + p]``, one key head for all. With ``scale=math.inf`` attention
    then takes the value of the key nearest x_q + Δ_h, exactly; keys equally near share the weight.

    Where x_q + Δ_h lies off the keys, the nearest key is at the border: zero padding needs keys of its own there.
    Whole places count as the default dtype; float32 is exact for them while ‖x_k‖² and 2(x_q + Δ)·x_k stay below 2²⁴,
    and half precision is refused.

    >>> at = torch.arange(4).unsqueeze(-1)
    >>> q, k = hard_selection(at, at, torch.tensor([[-1], [2]]))  # one back, two on
    >>> (q @ k.mT).argmax(-1).tolist()
    [[0, 0, 1, 2], [2, 3, 3, 3]]
    """
    given = {"query_xy": query_xy, "key_xy": key_xy, "shift": shift}
    for name, x in given.items():
        if not isinstance(x, Tensor) or x.dtype in (torch.bool, torch.float16, torch.bfloat16) or x.is_complex():
            kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(f"{name} must be a tensor of whole numbers, float32 or float64, got {kind}")
        if x.ndim != 2 or x.shape[1] == 0:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; it must be [places or heads, p] with p ≥ 1 coordinates"
            )
        if readable(x) and not bool(x.isfinite().all()):
            raise ValueError(f"{name} holds inf or NaN; places and shifts must be finite")
    if not (query_xy.shape[1] == key_xy.shape[1] == shift.shape[1]):
        widths = ", ".join(f"{name} {x.shape[1]}" for name, x in given.items())
        raise ValueError(f"places and shifts must have one number of coordinates p, got {widths}")
    dtype = torch.promote_types(torch.promote_types(query_xy.dtype, key_xy.dtype), shift.dtype)
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    query_xy, key_xy, shift = (x.to(dtype) for x in given.values())
    target = query_xy + shift.unsqueeze(1)  # [H, n, p]
    q = torch.cat([torch.ones_like(target[..., :1]), 2 * target], dim=-1)
    k = torch.cat([-(key_xy * key_xy).sum(-1, keepdim=True), key_xy], dim=-1)
    return q, k.unsqueeze(0)
