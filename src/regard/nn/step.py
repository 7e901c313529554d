"""One new token through one block in one native call: what a model does hundreds of times when it writes.

A block's layers, called one by one from Python, cost as much time as reading their weights. ``step`` does the same in
C++ where the block is made of plain parts, nobody looks on and nothing is masked. Wherever that is not so it does
nothing, and the layers are called as always. Both ways give the same numbers up to rounding. Everything that a step
depends on (parameters, hooks, options) is looked up afresh at every token, so that no change goes unseen.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.kernels import native, native_layers
from regard.kernels.layers import FEW, plain
from regard.masks import Window
from regard.nn.feedforward import ACTIVATIONS as PHI
from regard.nn.feedforward import FeedForward
from regard.nn.linear import Linear, hooked
from regard.nn.multihead import MultiHeadAttention, visits
from regard.nn.norm import LayerNorm, RMSNorm
from regard.positions import Rotary

if TYPE_CHECKING:
    from regard.nn.block import Block
    from regard.nn.cache import KeyValueCache

__all__ = ["step"]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of Activation in csrc/call.h
_KNOWN = frozenset({Linear, LayerNorm, RMSNorm, nn.Dropout, MultiHeadAttention, FeedForward})


def step(block: Block, x: Tensor, cache: KeyValueCache) -> Tensor | None:
    """``x [B, 1, D] → y [B, 1, D]``, the cache one token longer; None, and nothing done, where only the layers can."""
    if torch.is_grad_enabled() or not plain(x, x) or x.ndim != 3 or not x.is_contiguous():
        return None
    if x.shape[1] != 1 or x.shape[0] > FEW or x.shape[2] != block.d:
        return None
    now = looks(block)
    if now is None:
        return None
    plan = _plans.get(block)
    if plan is None or plan.dtype is not x.dtype or plan.looks != now:
        if not _steps(block, x):
            return None
        plan = _plans[block] = Plan(block, x.dtype, now)
    return plan.run(x, cache)


def looks(block: Block) -> tuple[Any, ...] | None:
    """All that a step depends on, looked up afresh: equal looks, equal steps. None where a part is not a plain one."""
    attention, feedforward = block.attention, block.feedforward
    if type(attention) is not MultiHeadAttention or type(feedforward) is not FeedForward:
        return None
    if block.training or attention.training or feedforward.training or attention in visits:
        return None
    found: list[Any] = [block.order, attention.position, attention.mask, attention.scale, attention.softcap]
    found += [attention.backend, feedforward.phi, feedforward.activation, attention.sinks is None]
    for parent in (block, attention, feedforward):
        for name, module in parent._modules.items():
            if module is None:
                continue
            kind = type(module)
            if kind not in _KNOWN or hooked(module):
                return None
            found += (name, kind)
            if kind is LayerNorm or kind is RMSNorm:
                found.append(module.eps)
            for parameter in module._parameters.values():
                if parameter is None:
                    found.append(None)
                    continue
                if type(parameter) is not nn.Parameter:
                    return None
                found += (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
    return tuple(found)


def _steps(block: Block, x: Tensor) -> bool:
    """Whether a block of plain parts, all in x's dtype, is one that the kernel computes."""
    attention, feedforward, d = block.attention, block.feedforward, block.d
    if block.order != "pre" or block.cross is not None or attention.backend == "reference" or not native.built():
        return False
    if not (attention.position is None or isinstance(attention.position, Rotary)) or attention.scale == float("inf"):
        return False
    mask = attention.mask
    if not (mask is None or (isinstance(mask, Window) and mask.offset is None)):
        return False
    name = feedforward.activation
    if name not in ACTIVATIONS or feedforward.phi is not PHI[name]:
        return False
    H, G, key, value = attention.heads, attention.kv_heads, attention.d_key, attention.d_value
    hidden = feedforward.up.weight.shape[0]
    shapes = {
        attention.q_proj: (H * key, d),
        attention.k_proj: (G * key, d),
        attention.v_proj: (G * value, d),
        attention.out_proj: (d, H * value),
        feedforward.up: (hidden, d),
        feedforward.gate: (hidden, d),
        feedforward.down: (d, hidden),
        block.attention_norm: (d,),
        block.feedforward_norm: (d,),
        attention.q_norm: (key,),
        attention.k_norm: (key,),
    }
    for part, shape in shapes.items():
        if part is not None and not _fits(part, shape, x):
            return False
    sinks = attention.sinks
    return sinks is None or (tuple(sinks.shape) == (H,) and sinks.dtype == torch.float32 and sinks.is_contiguous())


def _fits(part: nn.Module, shape: tuple[int, ...], x: Tensor) -> bool:
    """Whether a part has the weight, and perhaps the bias, that the kernel reads for it."""
    for name, parameter in part._parameters.items():
        if parameter is None:
            continue
        if tuple(parameter.shape) != (shape if name == "weight" else shape[:1]):
            return False
        if parameter.dtype is not x.dtype or not parameter.is_cpu or parameter.is_neg():
            return False
        if parameter.stride(-1) != 1 and parameter.shape[-1] != 1:
            return False
    return part._parameters.get("weight") is not None


class Plan:
    """A block in the compiled module's form: addresses and sizes, right as long as the block looks as it did."""

    def __init__(self, block: Block, dtype: torch.dtype, looks: tuple[Any, ...]) -> None:
        attention, feedforward = block.attention, block.feedforward
        self.attention, self.dtype, self.looks = attention, dtype, looks
        self.window = attention.mask.before + 1 if isinstance(attention.mask, Window) else None
        norms = [block.attention_norm, block.feedforward_norm, attention.q_norm, attention.k_norm]
        maps = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, feedforward.down]
        ups = [feedforward.up] if feedforward.gate is None else [feedforward.gate, feedforward.up]
        rotary = attention.position if isinstance(attention.position, Rotary) else None
        self.rotary = rotary
        self.raw = native_layers.new_step(
            dtype,
            (block.d, attention.heads, attention.kv_heads, attention.d_key, attention.d_value),
            norms,
            [*maps, *ups],
            len(ups),
            ACTIVATIONS.index(feedforward.activation),
            attention.d_key**-0.5 if attention.scale is None else attention.scale,
            0.0 if attention.softcap is None else attention.softcap,
            attention.sinks,
            0 if rotary is None else rotary.width,
            rotary is None or rotary.layout == "halves",
        )

    def run(self, x: Tensor, cache: KeyValueCache) -> Tensor | None:
        """A step, if the cache has begun with rows like these."""
        held = cache.room(x.shape[0], x.dtype)
        if held is None:
            return None
        k, v = held
        attention, m = self.attention, len(cache) + 1
        if k.shape[1] != attention.kv_heads or k.shape[3] != attention.d_key or v.shape[3] != attention.d_value:
            return None
        cos = sin = None
        if self.rotary is not None:
            cos, sin = self.rotary.waves(x.new_empty(1, 1, 1, attention.d_key), None, m - 1)
        seen = m if self.window is None else min(m, self.window)
        y = torch.empty_like(x)
        if not native_layers.step(self.raw, x, y, cos, sin, k, v, m, seen):
            return None
        cache.grow(1)
        return y


# By block, and gone with it. Not kept in the block: addresses must not be copied or saved with a model.
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
