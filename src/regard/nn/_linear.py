"""``nn.Linear`` with a fast native path for decoding, where a few rows are multiplied by large weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from regard.kernels.linear_norm_rope import linear, linear_many


class Linear(nn.Linear):
    """``y = x Wᵀ + b``: x ``[*, D_in]``, W = weight ``[D_out, D_in]``, b = bias ``[D_out]``.

    It has the parameters, names and results of ``nn.Linear`` (up to the order of summation). A few rows without
    gradients go to the native kernel, which reads the weights at the speed of memory.
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def apply_linears(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """Apply several linear layers to the same x, in one kernel call if possible."""
    parameters = []  # (weight, bias) of each layer
    for layer in layers:
        # A subclass or a hook may do more than x Wᵀ + b, so it must be called.
        if type(layer) is not Linear or has_hooks(layer):
            return tuple(layer(x) for layer in layers)
        parameters.append((layer.weight, layer.bias))
    return linear_many(x, *parameters)


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module does more than its class's ``forward``; the same test as ``nn.Module.__call__``."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )
