"""``from_torch``: the masks of ``nn.MultiheadAttention``, where True = ignore, as masks of this library."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import as_tensor, can_read_values, check_integer
from regard._errors import RegardError, RegardTypeError
from regard.masks._mask import Dense, Mask
from regard.masks._patterns import Padding


def from_torch(
    *, key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None, heads: int | None = None
) -> Mask | None:
    """The masks of ``nn.MultiheadAttention``, where **True = ignore**, as one mask where True = may attend.

    - ``key_padding_mask``: ``[B, m]`` or ``[m]``, bool, or floating point with 0 and −inf only.
    - ``attn_mask``: ``[n, m]``, or ``[B·heads, n, m]`` with ``heads`` given; bool, or 0 and −inf only.
    - ``heads``: the number of heads in the first dimension of ``attn_mask``.

    Returns None if both masks are None. The bool ``attn_mask`` of ``F.scaled_dot_product_attention`` already means
    True = may attend: use that one directly.

    >>> from_torch(key_padding_mask=torch.tensor([[False, False, True]])).dense(1, 3)
    tensor([[ True,  True, False]])
    """
    if heads is not None:
        check_integer("heads", heads, least=1)
    parts: list[Mask] = []
    if key_padding_mask is not None:
        hidden = _hidden("key_padding_mask", key_padding_mask)
        if hidden.ndim not in (1, 2):
            raise RegardError(
                f"key_padding_mask has shape {list(hidden.shape)}; it must be [B, m] or [m], True = ignore this key"
            )
        # True = ignore in torch, True = may attend here.
        parts.append(Padding(~hidden))
    if attn_mask is not None:
        hidden = _hidden("attn_mask", attn_mask)
        if hidden.ndim == 3:
            if heads is None or hidden.shape[0] % heads:
                raise RegardError(
                    f"attn_mask has shape {list(hidden.shape)} = [B·heads, n, m], True = hide; "
                    f"give heads= that divides {hidden.shape[0]}, got {heads}"
                )
            # torch puts batch and heads into one dimension.
            hidden = hidden.unflatten(0, (-1, heads))
        elif hidden.ndim != 2:
            raise RegardError(
                f"attn_mask has shape {list(hidden.shape)}; it must be [n, m] or [B·heads, n, m], True = hide"
            )
        parts.append(Dense(~hidden))
    if not parts:
        return None
    if len(parts) == 1:
        return parts[0]
    return parts[0] & parts[1]


def _hidden(name: str, x: Tensor) -> Tensor:
    """A mask of torch as bool, True = hidden."""
    x = as_tensor(name, x)
    if x.dtype == torch.bool:
        return x
    if not x.is_floating_point():
        raise RegardTypeError(f"{name} must be bool (True = ignore) or floating point (−inf = ignore), got {x.dtype}")
    hidden = x == float("-inf")
    if can_read_values(x) and not bool((hidden | (x == 0)).all()):
        raise RegardError(f"{name} must hold 0 and −inf only; other values are a bias, not a mask: pass them as bias=")
    return hidden
