"""``hard_selection``: positions as queries and keys, so that an infinite scale selects the nearest key."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import can_read_values, describe_value
from regard._errors import RegardError, RegardTypeError


def hard_selection(query_xy: Tensor, key_xy: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``q̃_h = (1, 2(x_q + Δ_h))``, ``k̃ = (−‖x_k‖², x_k)``, so that ``q̃ · k̃ = ‖x_q + Δ‖² − ‖x_k − (x_q + Δ)‖²``.

    With ``scale=math.inf`` attention then returns the value of the key nearest to x_q + Δ_h, exactly; keys at the same
    distance share the weight.

    - ``query_xy [n, p]``, ``key_xy [m, p]``: positions; p = 1 on a line, 2 on a grid.
    - ``shift [H, p]``: Δ, one per head.

    Returns ``q̃ [H, n, 1 + p]`` and ``k̃ [1, m, 1 + p]``, one key head for all query heads.

    Where x_q + Δ_h is outside the keys, the nearest key is at the border. For zero padding, as in a convolution,
    add keys outside the border whose values are 0.
    Integer positions become the default dtype. float32 is exact for them while ‖x_k‖² and 2(x_q + Δ)·x_k stay below
    2²⁴; half precision is refused.

    >>> positions = torch.arange(4).unsqueeze(-1)
    >>> q, k = hard_selection(positions, positions, torch.tensor([[-1], [2]]))  # one back, two ahead
    >>> (q @ k.mT).argmax(-1).tolist()
    [[0, 0, 1, 2], [2, 3, 3, 3]]
    """
    _check_points("query_xy", query_xy)
    _check_points("key_xy", key_xy)
    _check_points("shift", shift)
    widths = [query_xy.shape[1], key_xy.shape[1], shift.shape[1]]
    if len(set(widths)) > 1:
        raise RegardError(f"query_xy, key_xy and shift must have equal numbers of coordinates p, got {widths}")
    dtype = torch.promote_types(torch.promote_types(query_xy.dtype, key_xy.dtype), shift.dtype)
    if not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    key_xy = key_xy.to(dtype)
    target = query_xy.to(dtype) + shift.to(dtype).unsqueeze(1)  # [H, n, p]
    q = torch.cat([torch.ones_like(target[..., :1]), 2 * target], dim=-1)
    k = torch.cat([-(key_xy * key_xy).sum(-1, keepdim=True), key_xy], dim=-1)
    return q, k.unsqueeze(0)


def _check_points(name: str, x: Tensor) -> None:
    if not isinstance(x, Tensor) or x.dtype in (torch.bool, torch.float16, torch.bfloat16) or x.is_complex():
        raise RegardTypeError(f"{name} must be a tensor of integers, float32 or float64, got {describe_value(x)}")
    if x.ndim != 2 or x.shape[1] == 0:
        raise RegardError(f"{name} has shape {list(x.shape)}; it must be [positions or heads, p] with p ≥ 1")
    if can_read_values(x) and not bool(x.isfinite().all()):
        raise RegardError(f"{name} must be finite, got inf or NaN in it")
