"""Masks of ``nn.MultiheadAttention``, which mean the opposite."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.masks.base import Dense, Mask
from regard.masks.kinds import Padding
from regard.shapes import as_tensor, integer, readable


def from_torch(
    *, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None, heads: int | None = None
) -> Mask | None:
    """The masks of ``nn.MultiheadAttention``, where **True = ignore**, as one of ours, where True = may attend.

    ``key_padding_mask [B, m]`` or ``[m]``; ``attn_mask [n, m]``, or ``[B·heads, n, m]`` with ``heads`` given. Float
    masks are taken if they hold only 0 and −inf; other values are a bias, not a mask. Note that the bool ``attn_mask``
    of ``F.scaled_dot_product_attention`` already means True = may attend: pass that one as it is.

    >>> from_torch(key_padding_mask=torch.tensor([[False, False, True]])).dense(1, 3)
    tensor([[ True,  True, False]])
    """
    if heads is not None:
        integer("heads", heads, least=1)
    parts: list[Mask] = []
    if key_padding_mask is not None:
        hidden = _hidden("key_padding_mask", key_padding_mask)
        if hidden.ndim not in (1, 2):
            raise ValueError(
                f"key_padding_mask has shape {list(hidden.shape)}; it must be [B, m] or [m], True = ignore this key"
            )
        parts.append(Padding(~hidden))
    if attn_mask is not None:
        hidden = _hidden("attn_mask", attn_mask)
        if hidden.ndim == 3:
            if heads is None or hidden.shape[0] % heads:
                raise ValueError(
                    f"attn_mask has shape {list(hidden.shape)} = [B·heads, n, m], True = hide; "
                    f"give heads= that divides {hidden.shape[0]}, got {heads}"
                )
            hidden = hidden.unflatten(0, (-1, heads))
        elif hidden.ndim != 2:
            raise ValueError(
                f"attn_mask has shape {list(hidden.shape)}; it must be [n, m] or [B·heads, n, m], True = hide"
            )
        parts.append(Dense(~hidden))
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _hidden(name: str, x: Tensor) -> Tensor:
    x = as_tensor(name, x)
    if x.dtype == torch.bool:
        return x
    if not x.is_floating_point():
        raise TypeError(
            f"{name} is {x.dtype}; nn.MultiheadAttention's masks are bool, True = ignore, or float, −inf = ignore"
        )
    hidden = x == float("-inf")
    if readable(x) and not bool((hidden | (x == 0)).all()):
        raise ValueError(f"{name} holds values other than 0 and −inf: that is a bias, not a mask; pass it as bias=")
    return hidden
