"""Layers of the compiled module for decoding: linear layers of a few rows, norms, RoPE, and whole transformer blocks.

The compiled module checks devices, dtypes and shapes. Callers decide whether it applies at all
(``regard.kernels.linear_norm_rope``, ``regard.nn._decode_step``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels import native
from regard.kernels.native import compiled


def linear(x: Tensor, *matrices: tuple[Tensor, Tensor | None]) -> Tensor:
    """``x [W₁ᵀ W₂ᵀ …] + biases`` for x ``[*, in]`` with few rows; one dtype for all, rows of each W contiguous."""
    # All products go to one tensor, which the caller splits: one call reads all weights.
    outputs = 0
    for weight, _ in matrices:
        outputs += weight.shape[0]
    y = x.new_empty(*x.shape[:-1], outputs)
    compiled().linear(
        native.instruction_set(),
        x=_flat_rows(x),
        matrices=matrices,
        y=y.view(-1, outputs),
        threads=torch.get_num_threads(),
    )
    return y


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, kind: str) -> Tensor:
    """LayerNorm (``kind="layer"``) or RMSNorm (``kind="rms"``) of the last dimension; one dtype for all."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    compiled().norm(
        native.instruction_set(),
        kind=getattr(compiled().NormKind, kind),
        x=_flat_rows(x),
        weight=weight,
        bias=bias,
        eps=eps,
        y=y.view(-1, y.shape[-1]),
        threads=torch.get_num_threads(),
    )
    return y


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """x ``[B, H, n, d]`` with its first features rotated; cos and sin ``[n, width]`` or ``[B or 1, 1, n, width]``.

    ``layout`` is ``"halves"`` (features half the width apart form a pair) or ``"pairs"`` (neighbours do).
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    layout = getattr(compiled().RopeLayout, layout)
    compiled().rope(native.instruction_set(), layout=layout, x=x, cos=cos, sin=sin, y=y)
    return y


def build_decode_block(
    norms: dict[str, Any], linears: dict[str, Any], activation: str, rope_layout: str, **options: Any
) -> Any:
    """A transformer block in the compiled module's form, which keeps the parameters alive.

    - ``norms``: ``attention_norm``, ``feedforward_norm``, ``q_norm`` and ``k_norm``; the last two may be None.
    - ``linears``: ``q_proj``, ``k_proj``, ``v_proj``, ``out_proj``, ``gate`` (may be None), ``up`` and ``down``.
    - ``activation``: ``relu``, ``gelu``, ``gelu_tanh`` or ``silu``. ``rope_layout``: ``"halves"`` or ``"pairs"``.
    - further options: ``heads``, ``kv_heads``, ``scale``, ``softcap`` (0: none), ``sinks`` (float32 ``[heads]`` or
      None) and ``rope_width``, the number of rotated features.
    """
    # Parameters are passed by name, so that no two matrices of one shape can be swapped.
    module = compiled()
    parameters = {name: _norm_parameters(layer) for name, layer in norms.items()}
    for name, layer in linears.items():
        parameters[name] = None
        if layer is not None:
            parameters[name] = module.LinearParameters(weight=layer.weight, bias=layer.bias)
    return module.DecodeBlock(
        **parameters,
        activation=getattr(module.Activation, activation),
        rope_layout=getattr(module.RopeLayout, rope_layout),
        **options,
    )


def _norm_parameters(norm: Any) -> Any:
    """The parameters of a norm. Only LayerNorm, which subtracts the mean, has a bias attribute."""
    if norm is None:
        return None
    module = compiled()
    if hasattr(norm, "bias"):
        kind = module.NormKind.layer
        return module.NormParameters(kind=kind, weight=norm.weight, bias=norm.bias, eps=norm.eps)
    return module.NormParameters(kind=module.NormKind.rms, weight=norm.weight, eps=norm.eps)


def _flat_rows(x: Tensor) -> Tensor:
    """``[*, width]`` as ``[rows, width]`` with contiguous rows; a view if there is one."""
    # Most inputs are matrices already; a model calls this for every layer of every token.
    if x.ndim != 2:
        x = x.reshape(-1, x.shape[-1])
    return native.contiguous_rows(x)
