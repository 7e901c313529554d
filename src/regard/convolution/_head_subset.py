"""Copy some heads of an attention layer into a layer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard._lowered_scores import Bias, RelativeTerm
from regard.nn import MultiHeadAttention
from regard.positions import Rotary


def layer_of_heads(layer: MultiHeadAttention, heads: Sequence[int]) -> MultiHeadAttention:
    """Return a layer with copies of these heads and the same options: ``Σ_{h ∈ heads} A^h V^h W_out^h + b_out``

    Query heads that share a key head still share it if every key head keeps the same number of query heads. Otherwise
    every query head gets its own copy of its key head.
    """
    heads = list(heads)
    key_heads = [h * layer.kv_heads // layer.heads for h in heads]
    distinct = sorted(set(key_heads))
    repeats = len(heads) // len(distinct)
    if key_heads == [g for g in distinct for _ in range(repeats)]:
        key_heads = distinct

    position = layer.position
    if position is not None and not isinstance(position, Rotary):
        position = _BiasOfSomeHeads(position, heads, layer.heads)

    part = MultiHeadAttention(
        layer.d_in,
        len(heads),
        d_key=layer.d_key,
        d_value=layer.d_value,
        d_out=layer.d_out,
        d_context=layer.d_context,
        kv_heads=len(key_heads),
        out_bias=layer.out_proj.bias is not None,
        position=position,
        scale=layer.scale,
        softcap=layer.softcap,
        sinks=layer.sinks is not None,
        dropout=layer.dropout,
        backend=layer.backend,
        mask=layer.mask,
    )
    part.q_proj = input_rows(layer.q_proj, heads, layer.d_key)
    part.k_proj = input_rows(layer.k_proj, key_heads, layer.d_key)
    part.v_proj = input_rows(layer.v_proj, key_heads, layer.d_value)
    part.out_proj = output_columns(layer.out_proj, heads, layer.d_value, bias=True)
    if layer.sinks is not None:
        part.sinks = nn.Parameter(layer.sinks.detach()[heads].clone())
    part.q_norm = deepcopy(layer.q_norm)
    part.k_norm = deepcopy(layer.k_norm)
    return part.train(layer.training)


def input_rows(linear: nn.Linear, heads: Sequence[int], width: int) -> Any:
    """Return the part of an input projection ``[…, H·width]`` that computes some heads."""
    part = type(linear)(linear.in_features, len(heads) * width, bias=linear.bias is not None).to(linear.weight)
    with torch.no_grad():
        part.weight.copy_(linear.weight.unflatten(0, (-1, width))[list(heads)].flatten(0, 1))
        if linear.bias is not None:
            part.bias.copy_(linear.bias.unflatten(0, (-1, width))[list(heads)].flatten())
    return part


def output_columns(linear: nn.Linear, heads: Sequence[int], width: int, *, bias: bool) -> Any:
    """Return the part of an output projection from ``[…, H·width]`` that reads some heads.

    bias: whether this part has the bias. If the outputs of several parts are added, exactly one part must have it.
    """
    bias = bias and linear.bias is not None
    part = type(linear)(len(heads) * width, linear.out_features, bias=bias).to(linear.weight)
    with torch.no_grad():
        part.weight.copy_(linear.weight.unflatten(1, (-1, width))[:, list(heads)].flatten(1))
        if bias:
            part.bias.copy_(linear.bias)
    return part


class _BiasOfSomeHeads(nn.Module, Bias):
    """``bias[h, i, j] = inner[heads[h], i, j]``."""

    def __init__(self, inner: Bias, heads: list[int], total_heads: int) -> None:
        super().__init__()
        self.inner = inner
        self.heads = heads
        self.total_heads = total_heads

    def terms(self, q: Tensor, m: int) -> tuple[RelativeTerm, ...]:
        # The inner bias is defined for all heads, so the missing heads get queries of 0 and their rows are dropped.
        index = torch.tensor(self.heads, device=q.device)
        all_queries = q.new_zeros(q.shape[0], self.total_heads, *q.shape[2:]).index_copy(1, index, q)
        terms = []
        for term in self.inner.terms(all_queries, m):
            if term.table.shape[1] > 1:
                term = replace(term, table=term.table[:, index])
            terms.append(term)
        return tuple(terms)
