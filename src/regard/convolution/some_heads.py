"""A part of a layer's heads as a layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.nn import MultiHeadAttention
from regard.positions import Rotary
from regard.scores import Bias, RelativeTerm

__all__ = ["layer_of", "rows_of"]


def layer_of(layer: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """``Σ_{h ∈ heads} A^h V^h W_out^h + b_out``: copies of these heads' weights, and whatever else the layer does.

    Key heads that several query heads share stay shared where each keeps as many of them; else every query head gets a
    copy of its own.
    """
    heads = list(heads)
    groups = [h * layer.kv_heads // layer.heads for h in heads]
    own = sorted(set(groups))
    shared = len(heads) % len(own) == 0 and groups == [g for g in own for _ in range(len(heads) // len(own))]
    keys = own if shared else groups
    part = MultiHeadAttention(
        layer.d_in,
        len(heads),
        d_key=layer.d_key,
        d_value=layer.d_value,
        d_out=layer.d_out,
        d_context=layer.d_context,
        kv_heads=len(keys),
        out_bias=layer.out_proj.bias is not None,
        position=_position(layer.position, heads, layer.heads),
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks is not None,
        dropout=layer.dropout,
        backend=layer.backend,
        mask=layer.mask,
    )
    part.q_proj = rows_of(layer.q_proj, heads, layer.d_key)
    part.k_proj = rows_of(layer.k_proj, keys, layer.d_key)
    part.v_proj = rows_of(layer.v_proj, keys, layer.d_value)
    part.out_proj = columns_of(layer.out_proj, heads, layer.d_value, bias=True)
    if layer.sinks is not None:
        part.sinks = nn.Parameter(layer.sinks.detach()[heads].clone())
    part.q_norm, part.k_norm = deepcopy(layer.q_norm), deepcopy(layer.k_norm)
    return part.train(layer.training)


def rows_of(linear: nn.Linear, heads: Sequence[int], width: int) -> Any:
    """The features of some heads of a projection ``[…, H·width]``, as a projection to them alone."""
    part = type(linear)(linear.in_features, len(heads) * width, bias=linear.bias is not None).to(linear.weight)
    with torch.no_grad():
        part.weight.copy_(linear.weight.unflatten(0, (-1, width))[list(heads)].flatten(0, 1))
        if linear.bias is not None:
            part.bias.copy_(linear.bias.unflatten(0, (-1, width))[list(heads)].flatten())
    return part


def columns_of(linear: nn.Linear, heads: Sequence[int], width: int, *, bias: bool) -> Any:
    """What a projection from ``[…, H·width]`` makes of some heads; its bias is for one part alone."""
    bias = bias and linear.bias is not None
    part = type(linear)(len(heads) * width, linear.out_features, bias=bias).to(linear.weight)
    with torch.no_grad():
        part.weight.copy_(linear.weight.unflatten(1, (-1, width))[:, list(heads)].flatten(1))
        if bias:
            part.bias.copy_(linear.bias)
    return part


def _position(position: Any, heads: list[int], of: int) -> Any:
    return position if position is None or isinstance(position, Rotary) else _OfSomeHeads(position, heads, of)


class _OfSomeHeads(nn.Module, Bias):
    """``bias[h, i, j] = inner[heads[h], i, j]``"""

    def __init__(self, inner: Bias, chosen: list[int], of: int) -> None:
        super().__init__()
        self.inner, self.chosen, self.of = inner, chosen, of

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        # The bias is made for all heads: those that are not here ask with 0, and what they would get is left out.
        at = torch.tensor(self.chosen, device=q.device)
        whole = q.new_zeros(q.shape[0], self.of, *q.shape[2:]).index_copy(1, at, q)
        found = self.inner.terms(whole, m)
        return tuple(replace(t, table=t.table[:, at] if t.table.shape[1] > 1 else t.table) for t in found)
