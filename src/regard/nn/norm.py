"""Normalisation of one vector at a time: LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.kernels.layers import layer_norm, rms_norm
from regard.positions.common import check_kind, described
from regard.shapes import check_tensor, integer, number

__all__ = ["LayerNorm", "RMSNorm"]

Norm = TypeVar("Norm", bound=nn.Module)
NormFactory = Callable[[int], nn.Module]


class LayerNorm(nn.Module):
    """``y = γ ⊙ (x − μ) / √(σ² + ε) + β``, with μ and σ² the mean and the (biased) variance of x's own D elements.

        x, y [*, D]      γ = weight [D]      β = bias [D], left out with ``bias=False``

    No vector looks at another one, so neither the batch nor its padding changes a result. Computed in at least float32
    and returned in x's dtype. A constant vector has σ² = 0 and gives β (NaN with ``eps=0``: it has no direction).

    >>> y = LayerNorm(4, eps=0.0)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> round(y.square().sum().item(), 5)  # ‖y‖² = D
    4.0
    """

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.d, self.eps = integer("d", d, least=1), number("eps", eps, least=0.0)
        self.weight = nn.Parameter(torch.ones(d))
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → y [*, D]``, in x's dtype."""
        _check(x, self.d)
        return layer_norm(x, self.weight, self.bias, self.eps)

    @classmethod
    def from_torch(cls, layer: nn.LayerNorm) -> LayerNorm:
        """The same layer with the weights of ``nn.LayerNorm(D)``; copies, not views.

        >>> LayerNorm.from_torch(nn.LayerNorm(6, eps=1e-12))
        LayerNorm(6, eps=1e-12, bias=True)
        """
        check_kind("layer", layer, nn.LayerNorm)
        if len(layer.normalized_shape) != 1:
            raise ValueError(f"LayerNorm is over one dimension, got normalized_shape={tuple(layer.normalized_shape)}")
        if layer.weight is None:
            raise ValueError("nn.LayerNorm with elementwise_affine=False has no weight to copy")
        ours = cls(layer.normalized_shape[0], layer.eps, bias=layer.bias is not None).to(layer.weight)
        return _copied(ours, layer)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """``y = γ ⊙ x / √(mean(x²) + ε)``: LayerNorm without the mean and without β.

        x, y [*, D]      γ = weight [D]

    Computed in at least float32 and returned in x's dtype. A vector of zeros gives zeros (NaN with ``eps=0``).

    >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, -3.0]))
    tensor([ 1., -1.], grad_fn=<MulBackward0>)
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.d, self.eps = integer("d", d, least=1), number("eps", eps, least=0.0)
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → y [*, D]``, in x's dtype."""
        _check(x, self.d)
        return rms_norm(x, self.weight, self.eps)

    @classmethod
    def from_torch(cls, layer: nn.RMSNorm) -> RMSNorm:
        """The same layer with the weights of ``nn.RMSNorm(D)``, whose ``eps=None`` is its dtype's machine epsilon."""
        check_kind("layer", layer, nn.RMSNorm)
        if len(layer.normalized_shape) != 1:
            raise ValueError(f"RMSNorm is over one dimension, got normalized_shape={tuple(layer.normalized_shape)}")
        if layer.weight is None:
            raise ValueError("nn.RMSNorm with elementwise_affine=False has no weight to copy")
        eps = torch.finfo(layer.weight.dtype).eps if layer.eps is None else layer.eps
        return _copied(cls(layer.normalized_shape[0], eps).to(layer.weight), layer)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}"


def make_norm(norm: NormFactory, d: int) -> nn.Module:
    """A norm of width d from what makes one."""
    made = norm(d) if callable(norm) and not isinstance(norm, nn.Module) else None
    if not isinstance(made, nn.Module):
        raise TypeError(
            "norm must make a norm from its width, as LayerNorm and partial(RMSNorm, eps=1e-5) do; "
            f"got {described(norm)}"
        )
    return made


def norm_from_torch(name: str, layer: nn.Module) -> LayerNorm | RMSNorm:
    """A norm of a torch layer or stack, by the name it has there."""
    check_kind(name, layer, nn.LayerNorm, nn.RMSNorm)
    return RMSNorm.from_torch(layer) if isinstance(layer, nn.RMSNorm) else LayerNorm.from_torch(layer)  # type: ignore[arg-type]


def _check(x: Tensor, d: int) -> None:
    check_tensor("x", x)
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}; this layer normalises vectors of floating numbers")
    if x.ndim == 0 or x.shape[-1] != d:
        raise ValueError(f"x has shape {list(x.shape)}; this layer normalises vectors of {d}: [*, {d}]")


def _copied(ours: Norm, theirs: nn.Module) -> Norm:
    ours.load_state_dict(theirs.state_dict())
    return ours.train(theirs.training)
