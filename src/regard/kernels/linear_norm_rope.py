"""Layers around attention for models that decode token by token: ``x Wᵀ + b`` of a few rows, norms, and RoPE.

Without gradients they run in the native module where it is faster than torch; torch computes the rest. The speed of
memory limits linear layers and norms of a few rows, and torch's product of one row with a matrix reaches half of it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from regard._shapes import is_aligned
from regard.kernels import native, native_decode_layers
from regard.kernels.ops import can_skip_dispatcher
from regard.kernels.score_tiles import result_dtype
from regard.positions import Rotary

MAX_ROPE_ELEMENTS = 2**16  # torch's threads rotate larger tensors faster
MAX_DECODE_ROWS = 8  # from 16 rows on torch's matrix product is as fast (scripts/measure/decode.py)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y = x Wᵀ + b``: x ``[*, in]``, W ``[out, in]``, b ``[out]`` → ``[*, out]``, summed at least in float32."""
    if can_run_natively(x, weight, bias) and _has_few_rows(x) and _shapes_fit(x, weight, bias):
        return native_decode_layers.linear(x, (weight, bias))
    return F.linear(x, weight, bias)


def linear_many(x: Tensor, *matrices: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """``linear`` of the same x with several (W, b). For a few rows, one native call computes all of them."""
    if _has_few_rows(x) and all(can_run_natively(x, *pair) and _shapes_fit(x, *pair) for pair in matrices):
        return native_decode_layers.linear(x, *matrices).split([weight.shape[0] for weight, _ in matrices], dim=-1)
    return tuple(F.linear(x, *pair) for pair in matrices)


def _has_few_rows(x: Tensor) -> bool:
    return x.ndim > 0 and x.numel() <= MAX_DECODE_ROWS * x.shape[-1]


def _shapes_fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the native module takes these shapes and strides. F.linear gets all others, and refuses wrong ones."""
    shape = weight.shape
    if len(shape) != 2 or shape[1] != x.shape[-1] or weight.stride(1) != 1:
        return False
    return bias is None or (bias.shape == shape[:1] and bias.is_contiguous())


def apply_rope(position: Rotary, x: Tensor, position_ids: Tensor | None = None, start: int = 0) -> Tensor:
    """``position(x, position_ids, start)``: queries or keys ``[*B, H, n, d]`` rotated by their positions."""
    if not can_run_natively(x, x) or x.numel() > MAX_ROPE_ELEMENTS or x.ndim != 4 or x.stride(-1) != 1:
        return position(x, position_ids=position_ids, start=start)
    # Angles in another layout, or of another batch, are left to the position itself, which refuses wrong ones.
    cos, sin = position.cos_sin(x, position_ids, start)
    if not (cos.is_contiguous() and sin.is_contiguous()) or (cos.ndim > 2 and cos.shape[0] not in (1, x.shape[0])):
        return position(x, position_ids=position_ids, start=start)
    return native_decode_layers.apply_rope(x, cos, sin, position.layout)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``γ ⊙ x / √(mean(x²) + ε)`` of the last dimension, computed at least in float32."""
    if can_run_natively(x, weight) and weight.shape == x.shape[-1:] and weight.is_contiguous():
        return native_decode_layers.norm(x, weight, None, eps, "rms")
    wide = x.to(result_dtype(x.dtype))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``γ ⊙ (x − μ) / √(σ² + ε) + β`` of the last dimension, computed at least in float32."""
    bias_fits = bias is None or (bias.shape == weight.shape and bias.is_contiguous())
    if can_run_natively(x, weight, bias) and weight.shape == x.shape[-1:] and weight.is_contiguous() and bias_fits:
        return native_decode_layers.norm(x, weight, bias, eps, "layer")
    wide = x.to(result_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    # The mean itself is rounded: only this second subtraction leaves exactly 0 of a constant vector far from 0.
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype)


def can_run_natively(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether nothing observes these tensors or needs their gradients, and the native module takes their dtype.

    A model calls this some hundred times for each token, so the checks are written out.
    """
    # While torch.jit traces, a size is a traced value and not a number.
    if torch._C._get_tracing_state() is not None:
        return False
    # The native module takes one dtype on the CPU.
    dtype = x.dtype
    if dtype not in native.DTYPES or weight.dtype is not dtype or not (x.is_cpu and weight.is_cpu and native.built()):
        return False
    if bias is not None and (bias.dtype is not dtype or not bias.is_cpu):
        return False
    # It computes no gradients, and nothing that intercepts torch functions would see its calls.
    needs_grad = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if needs_grad and torch.is_grad_enabled():
        return False
    if torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return False
    if x.numel() == 0:
        return False
    # torch takes weights that are not aligned. x is copied if it is not.
    if bias is None:
        return can_skip_dispatcher(x, weight) and is_aligned(weight)
    return can_skip_dispatcher(x, weight, bias) and is_aligned(weight) and is_aligned(bias)
