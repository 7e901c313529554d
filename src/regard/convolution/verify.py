"""A convolution held against its attention: outputs, gradients, where heads look, and how long both take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.convolution.to_attention import AttentionConvolution

__all__ = ["Verdict", "timed", "verify"]

ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Verdict:
    """How far attention is from the convolution on one input.

    ``outputs``, ``input_gradient`` and ``kernel_gradient`` are the largest differences, each divided by the largest
    value where that is above 1; the gradients are of Σ y cos(·), weights that differ from output to output. ``bound``
    is the most that finite α can do to outputs, divided likewise, and 0 for hard heads. ``allowed`` is for rounding:
    1e-12 in float64 and 1e-5 in float32.
    """

    outputs: float
    input_gradient: float
    kernel_gradient: float
    bound: float
    allowed: float

    @property
    def holds(self) -> bool:
        """Whether outputs are as near as they must be, and with hard heads gradients too."""
        if self.bound:
            return self.outputs <= self.bound + self.allowed
        return max(self.outputs, self.input_gradient, self.kernel_gradient) <= self.allowed


def verify(conv: nn.Conv1d | nn.Conv2d, layer: AttentionConvolution, x: Tensor) -> Verdict:
    """Outputs and gradients of both on ``x``."""
    ours, theirs = _answers(layer, x, layer.kernel), _answers(conv, x, conv.weight)
    scales = [max(1.0, float(b.abs().max())) for b in theirs]
    y, dx, dw = (float((a - b).abs().max()) / c for a, b, c in zip(ours, theirs, scales, strict=True))
    bound = float(layer.error_bound(x).max()) / scales[0] if layer.alpha < math.inf else 0.0
    return Verdict(y, dx, dw, bound, ALLOWED[x.dtype])


def _answers(layer: nn.Module, x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().clone().requires_grad_()
    y: Tensor = layer(x)
    weights = torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)
    return y.detach(), *torch.autograd.grad((y * weights).sum(), (x, kernel))


def timed(call: Callable[[], object], repeat: int = 5) -> float:
    """Seconds of a call, the best of several after one that warms up."""
    best = math.inf
    with torch.inference_mode():
        call()
        for _ in range(repeat):
            began = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - began)
    return best
