"""What stands around attention, for models that write token by token: ``x Wᵀ + b`` of a few rows, and norms.

Without gradients these go to the native module where that is faster than torch: both are bound by memory, and torch's
own product of one row with a matrix reads it at half the speed of memory. Everything else is torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from regard.kernels import native, native_layers
from regard.kernels.ops import unwatched
from regard.positions import Rotary

__all__ = ["layer_norm", "linear", "linears", "rms_norm", "turn"]

SMALL = 2**16  # numbers; more are turned faster by torch's threads
FEW = 8  # rows; from 16 on torch's matrix product is as fast (benchmarks/decode.py)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``y = x Wᵀ + b``: x ``[*, in]``, W ``[out, in]``, b ``[out]`` → ``[*, out]``, summed in float32 at least."""
    if plain(x, weight, bias) and _few(x) and _fits(x, weight, bias):
        return native_layers.linear(x, (weight, bias))
    return F.linear(x, weight, bias)


def linears(x: Tensor, *maps: tuple[Tensor, Tensor | None]) -> tuple[Tensor, ...]:
    """``linear`` of the same x with several (W, b): a few rows read all of them in one go."""
    if all(plain(x, *each) and _fits(x, *each) for each in maps) and _few(x):
        return native_layers.linear(x, *maps).split([weight.shape[0] for weight, _ in maps], dim=-1)
    return tuple(F.linear(x, *each) for each in maps)


def _few(x: Tensor) -> bool:
    return x.ndim > 0 and x.numel() <= FEW * x.shape[-1]


def _fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """What F.linear would refuse must reach it; what lies in another order in memory is left to it."""
    shape = weight.shape
    if len(shape) != 2 or shape[1] != x.shape[-1] or weight.stride(1) != 1:
        return False
    return bias is None or (bias.shape == shape[:1] and bias.is_contiguous())


def turn(position: Rotary, x: Tensor, at: Tensor | None = None, start: int = 0) -> Tensor:
    """``position(x, at, start)``: queries or keys ``[*B, H, n, d]`` turned by where they stand."""
    if not plain(x, x) or x.numel() > SMALL or x.ndim != 4 or x.stride(-1) != 1:
        return position(x, at=at, start=start)
    cos, sin = position.waves(x, at, start)
    if not (cos.is_contiguous() and sin.is_contiguous()) or (cos.ndim > 2 and cos.shape[0] not in (1, x.shape[0])):
        return position(x, at=at, start=start)
    return native_layers.turn(x, cos, sin, position.width, position.layout == "halves")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``γ ⊙ x / √(mean(x²) + ε)`` of the last dimension, in float32 at least."""
    if plain(x, weight) and weight.shape == x.shape[-1:] and weight.is_contiguous():
        return native_layers.norm(x, weight, None, eps, centred=False)
    wide = _at_least_float32(x)
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """``γ ⊙ (x − μ) / √(σ² + ε) + β`` of the last dimension, in float32 at least."""
    shifts = bias is None or (bias.shape == weight.shape and bias.is_contiguous())
    if plain(x, weight, bias) and weight.shape == x.shape[-1:] and weight.is_contiguous() and shifts:
        return native_layers.norm(x, weight, bias, eps, centred=True)
    wide = _at_least_float32(x)
    centred = wide - wide.mean(-1, keepdim=True)
    # The mean itself is rounded: of a constant vector far from 0 only this second step leaves exactly nothing.
    centred = centred - centred.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight
    return (y if bias is None else y + bias).to(x.dtype)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether nobody looks on or wants gradients, and the native module takes these tensors.

    Written out, because a model asks this some hundred times for each token.
    """
    if torch._C._get_tracing_state() is not None:  # there even a size is more than a number
        return False
    dtype = x.dtype
    if dtype not in native.DTYPES or weight.dtype is not dtype or not (x.is_cpu and weight.is_cpu and native.built()):
        return False
    if bias is not None and (bias.dtype is not dtype or not bias.is_cpu):
        return False
    learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if learns and torch.is_grad_enabled():
        return False
    if torch._C._len_torch_function_stack() or torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return False
    return x.numel() > 0 and (unwatched(x, weight) if bias is None else unwatched(x, weight, bias))


def _at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()
