"""Copies weights from ``nn.MultiheadAttention`` to our layer and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from regard._errors import RegardError, RegardTypeError

if TYPE_CHECKING:
    from regard.nn._multi_head_attention import MultiHeadAttention

Layer = TypeVar("Layer", bound="MultiHeadAttention")


def attention_from_torch(cls: type[Layer], layer: nn.MultiheadAttention) -> Layer:
    """Our layer with torch's ``W_q, W_k, W_v``: one packed ``in_proj_weight [3E, E]``, or three separate ``[E, …]``."""
    if not isinstance(layer, nn.MultiheadAttention):
        raise RegardTypeError(f"layer must be an nn.MultiheadAttention, got {type(layer).__name__}")
    # Options of torch that have no counterpart here must not be dropped silently.
    if layer.bias_k is not None:
        raise RegardError("nn.MultiheadAttention with add_bias_kv=True appends a learned key; this layer has none")
    if layer.add_zero_attn:
        raise RegardError("nn.MultiheadAttention with add_zero_attn=True appends a zero key; this layer has none")
    if layer.kdim != layer.vdim:
        raise RegardError(f"kdim={layer.kdim} and vdim={layer.vdim} differ; here keys and values come from one context")
    out = layer.out_proj
    ours = cls(
        layer.embed_dim,
        layer.num_heads,
        d_context=layer.kdim,
        qkv_bias=layer.in_proj_bias is not None,
        out_bias=out.bias is not None,
        dropout=layer.dropout,
    ).to(out.weight)  # dtype and device

    # Torch packs the three matrices into one if all have the same input width.
    if layer.in_proj_weight is not None:
        weights = layer.in_proj_weight.chunk(3)
    else:
        weights = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    biases = layer.in_proj_bias.chunk(3) if layer.in_proj_bias is not None else (None, None, None)
    for projection, weight, bias in zip((ours.q_proj, ours.k_proj, ours.v_proj), weights, biases, strict=True):
        copy_linear(projection, weight, bias)
    copy_linear(ours.out_proj, out.weight, out.bias)
    return ours.train(layer.training)


def attention_to_torch(layer: MultiHeadAttention) -> nn.MultiheadAttention:
    """An ``nn.MultiheadAttention`` with our weights: packed if D_context = D_in, else separate."""
    _refuse_what_torch_lacks(layer)  # before anything is built
    projections = (layer.q_proj, layer.k_proj, layer.v_proj)
    out = layer.out_proj
    theirs = nn.MultiheadAttention(
        layer.d_in,
        layer.heads,
        dropout=layer.dropout,
        bias=layer.q_proj.bias is not None or out.bias is not None,
        kdim=layer.d_context,
        vdim=layer.d_context,
        batch_first=True,
    ).to(out.weight)

    with torch.no_grad():
        if theirs.in_proj_weight is not None:
            theirs.in_proj_weight.copy_(torch.cat([p.weight for p in projections]))
        else:
            for name, projection in zip("qkv", projections, strict=True):
                getattr(theirs, f"{name}_proj_weight").copy_(projection.weight)
        if theirs.in_proj_bias is not None:
            theirs.in_proj_bias.copy_(torch.cat([_bias_or_zeros(p) for p in projections]))
            theirs.out_proj.bias.copy_(_bias_or_zeros(out))
        theirs.out_proj.weight.copy_(out.weight)
    return theirs.train(layer.training)


def copy_linear(linear: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
    """Copy ``weight [out, in]`` and ``bias [out]`` into a linear layer of the same shape."""
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    if linear.bias is None:
        return linear.weight.new_zeros(linear.out_features)
    return linear.bias


def _refuse_what_torch_lacks(layer: MultiHeadAttention) -> None:
    """Raise if the layer uses an option that ``nn.MultiheadAttention`` does not have."""
    width = layer.d_in // layer.heads
    # Option as it appears in the error message → whether the layer uses it.
    reasons = {
        f"kv_heads={layer.kv_heads} of heads={layer.heads}": layer.kv_heads != layer.heads,
        f"d_key={layer.d_key}, d_value={layer.d_value} (it needs d_in/heads = {layer.d_in}/{layer.heads} for both)": (
            layer.d_in % layer.heads != 0 or layer.d_key != width or layer.d_value != width
        ),
        f"d_out={layer.d_out} ≠ d_in={layer.d_in}": layer.d_out != layer.d_in,
        f"position={type(layer.position).__name__}": layer.position is not None,
        f"scale={layer.scale}": layer.scale is not None and layer.scale != layer.d_key**-0.5,
        f"softcap={layer.softcap}": layer.softcap is not None,
        "sinks": layer.sinks is not None,
        f"mask={layer.mask}": layer.mask is not None,
        "qk_norm": layer.q_norm is not None,
    }
    for reason, refused in reasons.items():
        if refused:
            raise RegardError(f"nn.MultiheadAttention cannot hold {reason}")
