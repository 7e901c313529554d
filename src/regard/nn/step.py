"""One new token through one block in one native call: what a model does hundreds of times when it writes.

A block's layers, called one by one from Python, cost as much time as reading their weights. ``step`` does the same in
C++ where the block is made of plain parts, nobody looks on and nothing is masked. Wherever that is not so it does
nothing, and the layers are called as always. Both ways give the same numbers up to rounding.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.kernels import native, native_layers
from regard.kernels.layers import FEW, plain
from regard.masks import Window
from regard.nn.feedforward import FeedForward
from regard.nn.linear import Linear, hooked
from regard.nn.multihead import MultiHeadAttention
from regard.nn.norm import LayerNorm, RMSNorm
from regard.positions import Rotary

if TYPE_CHECKING:
    from regard.nn.block import Block
    from regard.nn.cache import KeyValueCache

__all__ = ["step"]

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")  # in the order of Activation in csrc/call.h


def step(block: Block, x: Tensor, cache: KeyValueCache) -> Tensor | None:
    """``x [B, 1, D] → y [B, 1, D]``, the cache one token longer; None, and nothing done, where only the layers can."""
    if x.ndim != 3 or x.shape[1] != 1 or x.shape[0] > FEW or torch.is_grad_enabled():
        return None
    if not (x.is_contiguous() and plain(x, x)):
        return None
    plan = _plans.get(block)
    if plan is None or not plan.holds(block, x):
        plan = Plan.of(block, x)
        if plan is None:
            return None
        _plans[block] = plan
    return plan.run(x, cache)


class Plan:
    """Addresses and sizes of a block's parameters, and what must not change for them to be right."""

    def __init__(self, block: Block, dtype: torch.dtype) -> None:
        attention, feedforward = block.attention, block.feedforward
        self.attention, self.position, self.dtype = attention, attention.position, dtype
        self.modules = [
            (parent._modules, name, child)
            for parent in (block, attention, feedforward)
            for name, child in _parts(parent)
        ]
        self.tensors = [(p, p.data_ptr()) for p in block.parameters()]
        self.turns = isinstance(self.position, Rotary)
        self.window = attention.mask.before + 1 if isinstance(attention.mask, Window) else None
        norms = [block.attention_norm, block.feedforward_norm, attention.q_norm, attention.k_norm]
        maps = [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj, feedforward.down]
        ups = [feedforward.up] if feedforward.gate is None else [feedforward.gate, feedforward.up]
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
            self.position.width if isinstance(self.position, Rotary) else 0,
            not isinstance(self.position, Rotary) or self.position.layout == "halves",
        )

    @staticmethod
    def of(block: Block, x: Tensor) -> Plan | None:
        """A plan for a block of plain parts, all in x's dtype; None for any other."""
        attention, feedforward = block.attention, block.feedforward
        if type(attention) is not MultiHeadAttention or type(feedforward) is not FeedForward or block.training:
            return None
        if block.order != "pre" or block.cross is not None or attention.backend == "reference":
            return None
        if not (attention.position is None or isinstance(attention.position, Rotary)):
            return None
        if not (attention.mask is None or _looks_back(attention.mask)) or attention.scale == float("inf"):
            return None
        if feedforward.activation not in ACTIVATIONS or x.dtype not in native.DTYPES or not native.built():
            return None
        if attention.d_in != attention.d_context or feedforward.d_out != block.d:
            return None
        plain = (Linear, LayerNorm, RMSNorm, nn.Dropout)
        parts = [child for parent in (block, attention, feedforward) for _, child in _parts(parent)]
        inside = [child for child in parts if child is not attention and child is not feedforward]
        if any(type(child) not in plain for child in inside) or any(map(hooked, parts)):
            return None
        if any(not _lies_well(p, x) for p in block.parameters()):
            return None
        if attention.sinks is not None and attention.sinks.dtype != torch.float32:
            return None
        return Plan(block, x.dtype)

    def holds(self, block: Block, x: Tensor) -> bool:
        """Whether everything is where it was when the plan was made."""
        if x.dtype is not self.dtype or block.training or self.attention.position is not self.position:
            return False
        for siblings, name, child in self.modules:
            if siblings.get(name) is not child or hooked(child):
                return False
        return all(p.data_ptr() == address and p.dtype is self.dtype for p, address in self.tensors)

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
        if isinstance(self.position, Rotary):
            cos, sin = self.position.waves(x.new_empty(1, 1, 1, attention.d_key), None, m - 1)
        seen = m if self.window is None else min(m, self.window)
        y = torch.empty_like(x)
        if not native_layers.step(self.raw, x, y, cos, sin, k, v, m, seen):
            return None
        cache.grow(1)
        return y


def _parts(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in parent._modules.items() if child is not None]


def _looks_back(mask: object) -> bool:
    """A window that a last query sees as the last so many keys."""
    return isinstance(mask, Window) and mask.offset is None


def _lies_well(p: Tensor, x: Tensor) -> bool:
    if p.dtype != x.dtype or p.device != x.device or type(p) not in (Tensor, nn.Parameter) or p.is_neg():
        return False
    return p.stride(-1) == 1 or p.shape[-1] == 1


# By block, and gone with it. Not kept in the block: addresses must not be copied or saved with a model.
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
