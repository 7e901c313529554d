"""Normalisation layers: LayerNorm and RMSNorm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard._checks import check_instance, check_integer, check_number, check_tensor, describe_value
from regard._errors import RegardError, RegardTypeError
from regard.kernels.linear_norm_rope import layer_norm, rms_norm

NormFactory = Callable[[int], nn.Module]


class LayerNorm(nn.Module):
    """``y = γ ⊙ (x − μ) / √(σ² + ε) + β``, where μ and σ² are the mean and the (biased) variance of x's D elements.

        x, y [*, D]      γ = weight [D]      β = bias [D]

    Each vector is normalised alone, so neither the batch nor its padding changes a result. The layer computes in at
    least float32 and returns x's dtype. A constant vector has σ² = 0 and gives β (NaN with ``eps=0``).

    - ``d``: D, the width of the vectors.
    - ``eps``: ε (default 1e-5).
    - ``bias``: False leaves β out (default True).

    >>> y = LayerNorm(4, eps=0.0)(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    >>> round(y.square().sum().item(), 5)  # ‖y‖² = D
    4.0
    """

    def __init__(self, d: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.d = check_integer("d", d, least=1)
        self.eps = check_number("eps", eps, least=0.0)
        self.weight = nn.Parameter(torch.ones(d))  # γ
        self.bias = nn.Parameter(torch.zeros(d)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → y [*, D]``, in x's dtype."""
        _check_vectors(x, self.d)
        return layer_norm(x, self.weight, self.bias, self.eps)

    @classmethod
    def from_torch(cls, layer: nn.LayerNorm) -> LayerNorm:
        """The same layer with a copy of the weights of ``nn.LayerNorm(D)``.

        >>> LayerNorm.from_torch(nn.LayerNorm(6, eps=1e-12))
        LayerNorm(6, eps=1e-12, bias=True)
        """
        check_instance("layer", layer, nn.LayerNorm)
        # .to(weight): the same dtype and device.
        ours = cls(_width_of(layer), layer.eps, bias=layer.bias is not None).to(layer.weight)
        ours.load_state_dict(layer.state_dict())
        return ours.train(layer.training)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}, bias={self.bias is not None}"


class RMSNorm(nn.Module):
    """``y = γ ⊙ x / √(mean(x²) + ε)``: LayerNorm without the mean and without β.

        x, y [*, D]      γ = weight [D]

    The layer computes in at least float32 and returns x's dtype. A vector of zeros gives zeros (NaN with ``eps=0``).

    - ``d``: D, the width of the vectors.
    - ``eps``: ε (default 1e-6).

    >>> RMSNorm(2, eps=0.0)(torch.tensor([3.0, -3.0]))
    tensor([ 1., -1.], grad_fn=<MulBackward0>)
    """

    def __init__(self, d: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.d = check_integer("d", d, least=1)
        self.eps = check_number("eps", eps, least=0.0)
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        """``x [*, D] → y [*, D]``, in x's dtype."""
        _check_vectors(x, self.d)
        return rms_norm(x, self.weight, self.eps)

    @classmethod
    def from_torch(cls, layer: nn.RMSNorm) -> RMSNorm:
        """The same layer with a copy of the weights of ``nn.RMSNorm(D)``; its ``eps=None`` is the machine epsilon."""
        check_instance("layer", layer, nn.RMSNorm)
        d = _width_of(layer)
        eps = layer.eps if layer.eps is not None else torch.finfo(layer.weight.dtype).eps  # as torch does
        ours = cls(d, eps).to(layer.weight)
        ours.load_state_dict(layer.state_dict())
        return ours.train(layer.training)

    def extra_repr(self) -> str:
        return f"{self.d}, eps={self.eps}"


def make_norm(factory: NormFactory, d: int) -> nn.Module:
    """Call ``factory(d)`` and check that it returns a module."""
    norm = None
    # A module is callable too, but calling it would normalise the number d.
    if callable(factory) and not isinstance(factory, nn.Module):
        norm = factory(d)
    if not isinstance(norm, nn.Module):
        raise RegardTypeError(f"norm must make a norm from its width, as LayerNorm does; got {describe_value(factory)}")
    return norm


def norm_from_torch(name: str, layer: nn.Module) -> LayerNorm | RMSNorm:
    """Convert a norm of a torch layer; ``name`` is its name there, for error messages."""
    check_instance(name, layer, nn.LayerNorm, nn.RMSNorm)
    if isinstance(layer, nn.RMSNorm):
        return RMSNorm.from_torch(layer)
    assert isinstance(layer, nn.LayerNorm)
    return LayerNorm.from_torch(layer)


def _width_of(layer: nn.LayerNorm | nn.RMSNorm) -> int:
    """D of a torch norm; several dimensions, or no weight, are refused."""
    name = type(layer).__name__
    if len(layer.normalized_shape) != 1:
        raise RegardError(f"{name} is over one dimension, got normalized_shape={tuple(layer.normalized_shape)}")
    if layer.weight is None:
        raise RegardError(f"nn.{name} with elementwise_affine=False has no weight to copy")
    return layer.normalized_shape[0]


def _check_vectors(x: Tensor, d: int) -> None:
    check_tensor("x", x)
    if not x.is_floating_point():
        raise RegardTypeError(f"x is {x.dtype}; this layer normalises vectors of floating-point numbers")
    if x.ndim == 0 or x.shape[-1] != d:
        raise RegardError(f"x has shape {list(x.shape)}; this layer normalises vectors of {d}: [*, {d}]")
