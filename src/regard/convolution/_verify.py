"""Compare a convolution with its attention layer: outputs, gradients, and time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.convolution._to_attention import AttentionConvolution

# The tolerance for rounding errors, relative to the largest value.
ALLOWED = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass(frozen=True)
class Verification:
    """How far the attention layer is from the convolution on one input.

    - ``outputs``, ``input_gradient``, ``kernel_gradient``: the largest difference, divided by the largest value if that
      is above 1. The gradients are those of Σ y·cos(index), so that each output has its own weight.
    - ``bound``: the largest difference of outputs that a finite α can cause, divided in the same way; 0 if α is inf.
    - ``allowed``: the tolerance for rounding, 1e-12 in float64 and 1e-5 in float32.
    """

    outputs: float
    input_gradient: float
    kernel_gradient: float
    bound: float
    allowed: float

    @property
    def holds(self) -> bool:
        """True if the outputs agree within the tolerance; for hard heads the gradients must agree too."""
        if self.bound:
            return self.outputs <= self.bound + self.allowed
        return max(self.outputs, self.input_gradient, self.kernel_gradient) <= self.allowed


def verify(conv: nn.Conv1d | nn.Conv2d, layer: AttentionConvolution, x: Tensor) -> Verification:
    """Compare the outputs and gradients of both layers on ``x``."""
    attention_results = _output_and_gradients(layer, x, layer.kernel)
    convolution_results = _output_and_gradients(conv, x, conv.weight)

    errors = []
    for actual, expected in zip(attention_results, convolution_results, strict=True):
        size = max(1.0, float(expected.abs().max()))
        errors.append(float((actual - expected).abs().max()) / size)

    bound = 0.0
    if layer.alpha < math.inf:
        size = max(1.0, float(convolution_results[0].abs().max()))
        bound = float(layer.error_bound(x).max()) / size
    outputs, input_gradient, kernel_gradient = errors
    return Verification(outputs, input_gradient, kernel_gradient, bound, ALLOWED[x.dtype])


def _output_and_gradients(layer: nn.Module, x: Tensor, kernel: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().clone().requires_grad_()
    y: Tensor = layer(x)
    weights = torch.arange(y.numel(), dtype=y.dtype).cos().view_as(y)
    return y.detach(), *torch.autograd.grad((y * weights).sum(), (x, kernel))


def best_time(call: Callable[[], object], repeat: int = 5) -> float:
    """Return the seconds that a call takes: the best of ``repeat`` calls, after one warm-up call."""
    best = math.inf
    with torch.inference_mode():
        call()
        for _ in range(repeat):
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    return best
