"""One decode step of a block in one native call: a single new token per sequence, read through the cache.

Calling a block's layers one by one from Python takes as long as reading their weights from memory. ``decode_step`` does
the same computation in C++, if the block consists of this library's own layers without hooks, observers or masks.
Otherwise it does nothing and the caller runs the layers. Both ways give the same numbers up to rounding.

Everything that a step depends on (parameters, hooks, options) is read again at every token, so that every change of the
model takes effect.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard import _hooks as hooks
from regard._shapes import is_aligned
from regard.kernels import native, native_decode_layers
from regard.kernels.linear_norm_rope import MAX_DECODE_ROWS, can_run_natively
from regard.masks import Window
from regard.nn._feed_forward import ACTIVATIONS, FeedForward
from regard.nn._linear import Linear, has_hooks
from regard.nn._multi_head_attention import MultiHeadAttention
from regard.nn._norm import LayerNorm, RMSNorm
from regard.positions import Rotary

if TYPE_CHECKING:
    from regard.nn._block import Block
    from regard.nn._cache import KeyValueCache

NATIVE_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
_KNOWN_LAYERS = frozenset({Linear, LayerNorm, RMSNorm, nn.Dropout, MultiHeadAttention, FeedForward})


def decode_step(block: Block, x: Tensor, cache: KeyValueCache) -> Tensor | None:
    """``x [B, 1, D] → y [B, 1, D]``; the cache grows by one token.

    Returns None, and changes nothing, if the native kernel cannot compute this block.
    """
    if torch.is_grad_enabled() or not can_run_natively(x, x) or x.ndim != 3 or not x.is_contiguous():
        return None
    if x.shape[1] != 1 or x.shape[0] > MAX_DECODE_ROWS or x.shape[2] != block.d:
        return None
    state = block_state(block)
    if state is None:
        return None

    # The compiled form of a block stays valid as long as nothing that it depends on has changed.
    plan = _plans.get(block)
    if plan is None or plan.dtype is not x.dtype or plan.state != state:
        if not _is_supported(block, x):
            return None
        plan = Plan(block, x.dtype, state)
        _plans[block] = plan
    return plan.run(x, cache)


def block_state(block: Block) -> tuple[Any, ...] | None:
    """Everything that a decode step depends on: equal states give equal steps. None if a layer is not supported."""
    attention = block.attention
    feedforward = block.feedforward
    if type(attention) is not MultiHeadAttention or type(feedforward) is not FeedForward:
        return None
    if block.training or attention.training or feedforward.training or attention in hooks.observed:
        return None
    # Options first, then every submodule with its parameters.
    state: list[Any] = [block.order, attention.position, attention.mask, attention.scale, attention.softcap]
    state += [attention.backend, feedforward.activation_function, feedforward.activation, attention.sinks is None]
    for parent in (block, attention, feedforward):
        for name, module in parent._modules.items():
            if module is None:
                continue
            kind = type(module)
            if kind not in _KNOWN_LAYERS or has_hooks(module):
                return None
            state += (name, kind)
            if kind is LayerNorm or kind is RMSNorm:
                state.append(module.eps)
            for parameter in module._parameters.values():
                if parameter is None:
                    state.append(None)
                    continue
                # A subclass (a quantised or a sharded tensor) may not keep its numbers at data_ptr.
                if type(parameter) is not nn.Parameter:
                    return None
                # The numbers themselves may change in place: the kernel reads them at each step.
                state += (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
    return tuple(state)


def _is_supported(block: Block, x: Tensor) -> bool:
    """Whether the native kernel has all options of this block, and all parameters have x's dtype."""
    attention = block.attention
    feedforward = block.feedforward
    d = block.d
    if attention.backend not in ("auto", "native") or not native.built():
        return False
    if block.order != "pre" or block.cross is not None:
        return False
    if not (attention.position is None or isinstance(attention.position, Rotary)) or attention.scale == float("inf"):
        return False
    mask = attention.mask
    if not (mask is None or (isinstance(mask, Window) and mask.offset is None)):
        return False
    name = feedforward.activation
    if name not in NATIVE_ACTIVATIONS or feedforward.activation_function is not ACTIVATIONS[name]:
        return False

    heads = attention.heads
    kv_heads = attention.kv_heads
    hidden = feedforward.up.weight.shape[0]
    weight_shapes = {
        attention.q_proj: (heads * attention.d_key, d),
        attention.k_proj: (kv_heads * attention.d_key, d),
        attention.v_proj: (kv_heads * attention.d_value, d),
        attention.out_proj: (d, heads * attention.d_value),
        feedforward.up: (hidden, d),
        feedforward.gate: (hidden, d),
        feedforward.down: (d, hidden),
        block.attention_norm: (d,),
        block.feedforward_norm: (d,),
        attention.q_norm: (attention.d_key,),
        attention.k_norm: (attention.d_key,),
    }
    # The kernel reads raw memory, so shapes and layouts must be exactly these.
    for layer, shape in weight_shapes.items():
        if layer is not None and not _has_weight(layer, shape, x):
            return False
    sinks = attention.sinks
    if sinks is None:
        return True
    has_layout = sinks.dtype == torch.float32 and sinks.is_contiguous() and is_aligned(sinks)
    return has_layout and tuple(sinks.shape) == (heads,)


def _has_weight(layer: nn.Module, shape: tuple[int, ...], x: Tensor) -> bool:
    """Whether the kernel can read a layer's weight, which must have this shape, and its bias if it has one."""
    for name, parameter in layer._parameters.items():
        if parameter is None:
            continue
        expected = shape if name == "weight" else shape[:1]
        if tuple(parameter.shape) != expected:
            return False
        if parameter.dtype is not x.dtype or not parameter.is_cpu or parameter.is_neg():
            return False
        if (parameter.stride(-1) != 1 and parameter.shape[-1] != 1) or not is_aligned(parameter):
            return False
    return layer._parameters.get("weight") is not None


class Plan:
    """A block in the form that the native module takes, with its parameters; valid while ``block_state`` is equal."""

    def __init__(self, block: Block, dtype: torch.dtype, state: tuple[Any, ...]) -> None:
        attention = block.attention
        feedforward = block.feedforward
        self.attention = attention
        self.dtype = dtype
        self.state = state  # compared at every step
        self.window = None
        if isinstance(attention.mask, Window):
            self.window = attention.mask.before + 1  # keys that a query sees, itself included
        self.rotary = attention.position if isinstance(attention.position, Rotary) else None

        self.native_block = native_decode_layers.build_decode_block(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            norms={
                "attention_norm": block.attention_norm,
                "feedforward_norm": block.feedforward_norm,
                "q_norm": attention.q_norm,
                "k_norm": attention.k_norm,
            },
            linears={
                "q_proj": attention.q_proj,
                "k_proj": attention.k_proj,
                "v_proj": attention.v_proj,
                "out_proj": attention.out_proj,
                "gate": feedforward.gate,
                "up": feedforward.up,
                "down": feedforward.down,
            },
            activation=feedforward.activation,
            scale=attention.scale if attention.scale is not None else attention.d_key**-0.5,
            softcap=attention.softcap if attention.softcap is not None else 0.0,
            sinks=attention.sinks,
            rope_width=self.rotary.width if self.rotary is not None else 0,
            rope_layout=self.rotary.layout if self.rotary is not None else "halves",
        )

    def run(self, x: Tensor, cache: KeyValueCache) -> Tensor | None:
        """The output of one step; None if the cache is empty or holds other shapes, or if a sum is not finite."""
        buffers = cache.reserve_row(x.shape[0], x.dtype)
        if buffers is None:  # the first tokens go through the layers
            return None
        k, v = buffers
        attention = self.attention
        m = len(cache) + 1  # keys, the new one included
        if k.shape[1] != attention.kv_heads or k.shape[3] != attention.d_key or v.shape[3] != attention.d_value:
            return None
        cos = sin = None
        if self.rotary is not None:
            # The new token stands at position m − 1.
            cos, sin = self.rotary.cos_sin(x.new_empty(1, 1, 1, attention.d_key), None, m - 1)
        visible = m
        if self.window is not None:
            visible = min(m, self.window)
        y = torch.empty_like(x)
        # It fills y, and writes the new key and value to row m − 1 of the buffers.
        finite = self.native_block.run(
            native.instruction_set(),
            x=x,
            y=y,
            cos=cos,
            sin=sin,
            k_cache=k,
            v_cache=v,
            length=m,
            visible=visible,
            threads=torch.get_num_threads(),
        )
        if not finite:
            return None  # the row is free again; the layers compute this step
        cache.advance(1)
        return y


# Keyed weakly by block. It is not an attribute of the block: addresses must not be copied or saved with a model.
_plans: weakref.WeakKeyDictionary[nn.Module, Plan] = weakref.WeakKeyDictionary()
