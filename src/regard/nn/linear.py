"""``nn.Linear`` that reads its weights at the speed of memory when a model writes token by token."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from regard.kernels.layers import linear, linears

__all__ = ["Linear", "hooked", "several"]


class Linear(nn.Linear):
    """``y = x Wᵀ + b``: x ``[*, D_in]``, W = weight ``[D_out, D_in]``, b = bias ``[D_out]``.

    The same parameters, names and results as ``nn.Linear`` (up to the order of summation); a few rows without gradients
    take the native kernel.
    """

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def several(x: Tensor, *maps: nn.Module) -> tuple[Tensor, ...]:
    """Each map of the same x: in one go where all are plain ``Linear``s, else by calling them."""
    plain = [each for each in maps if type(each) is Linear and not hooked(each)]
    if len(plain) == len(maps):
        return linears(x, *((each.weight, each.bias) for each in plain))
    return tuple(each(x) for each in maps)


def hooked(module: nn.Module) -> bool:
    """Whether a call of this module is more than its class's forward; as ``nn.Module.__call__`` itself asks."""
    return bool(
        "forward" in module.__dict__
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or hooks._global_forward_hooks
        or hooks._global_forward_pre_hooks
        or hooks._global_backward_hooks
        or hooks._global_backward_pre_hooks
    )
