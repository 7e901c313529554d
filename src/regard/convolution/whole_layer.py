"""From a whole layer to the convolution that it is: one head a tap."""

from __future__ import annotations

from itertools import pairwise, product

import torch
from torch import nn

from regard.convolution.to_attention import AttentionConvolution
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

__all__ = ["convolution_of"]


def convolution_of(layer: AttentionConvolution | MultiHeadAttention) -> nn.Conv1d | nn.Conv2d:
    """``W_Δ = W_v^h W_out^h``, ``b = b_out + Σ_h b_v^h W_out^h``: the convolution with these taps, of copies

    An ``AttentionConvolution`` gives back the convolution that it was made of, as it is now. A layer whose heads go by
    a ``Quadratic`` alone (scale 0) gives that of its limit α → ∞, each head at the cell nearest its centre. There a
    head at the border takes the nearest pixel that is there, which is the padding "replicate". Heads must stand at all
    taps of one kernel, one each, evenly spaced; else the error says what is missing.
    """
    if isinstance(layer, AttentionConvolution):
        return _made_of(layer)
    position = layer.position
    if not isinstance(position, Quadratic) or layer.scale != 0 or layer.mask is not None or layer.sinks is not None:
        raise ValueError(
            "a layer is a convolution where its heads go by places alone: a Quadratic, scale=0, no mask and no sinks; "
            "of other layers observe the heads, and give the Observation"
        )
    rows, columns, heads = _taps(position)
    spaces = [_space(axis, at) for axis, at in (("rows", rows), ("columns", columns))]
    _check_same(rows, columns)
    conv = nn.Conv2d(
        layer.d_in,
        layer.d_out,
        (len(rows), len(columns)),
        padding="same",
        dilation=(spaces[0], spaces[1]),
        padding_mode="replicate",
        bias=layer.out_proj.bias is not None or layer.v_proj.bias is not None,
    ).to(layer.out_proj.weight)
    groups = [h * layer.kv_heads // layer.heads for h in heads]
    with torch.no_grad():
        v = layer.v_proj.weight.unflatten(0, (-1, layer.d_value))[groups]  # [T, D_o, D_in]
        out = layer.out_proj.weight.unflatten(1, (-1, layer.d_value))[:, heads]  # [D_out, T, D_o]
        conv.weight.copy_(torch.einsum("ote,tec->oct", out, v).unflatten(-1, (len(rows), len(columns))))
        if conv.bias is not None:
            conv.bias.zero_()
            if layer.out_proj.bias is not None:
                conv.bias += layer.out_proj.bias
            if layer.v_proj.bias is not None:
                conv.bias += torch.einsum("ote,te->o", out, layer.v_proj.bias.unflatten(0, (-1, layer.d_value))[groups])
    return conv


def _made_of(layer: AttentionConvolution) -> nn.Conv1d | nn.Conv2d:
    geometry, bias = layer.geometry, layer.attention.out_proj.bias
    same = geometry.before != geometry.after
    kind: type[nn.Conv1d] | type[nn.Conv2d] = nn.Conv1d if geometry.axes == 1 else nn.Conv2d
    conv = kind(
        geometry.channels,
        geometry.out,
        geometry.kernel,  # type: ignore[arg-type]
        stride=geometry.stride,  # type: ignore[arg-type]
        padding="same" if same else geometry.before,  # type: ignore[arg-type]
        dilation=geometry.dilation,  # type: ignore[arg-type]
        groups=geometry.groups,
        bias=bias is not None,
        padding_mode=geometry.mode,  # type: ignore[arg-type]
    ).to(layer.kernel)
    with torch.no_grad():
        conv.weight.copy_(layer.kernel)
        if bias is not None:
            conv.bias.copy_(bias)  # type: ignore[union-attr]
    return conv


def _taps(position: Quadratic) -> tuple[list[int], list[int], list[int]]:
    """Rows and columns of the kernel, and the head of each tap, row by row."""
    if not bool((position.alpha > 0).all()):
        raise ValueError("a head with alpha ≤ 0 looks at no one place; its layer is no convolution")
    at = [(int(y), int(x)) for y, x in position.centers.detach().round().tolist()]
    rows, columns = (sorted({one[axis] for one in at}) for axis in range(2))
    wanted = list(product(rows, columns))
    if len(at) != len(wanted) or set(at) != set(wanted):
        raise ValueError(
            f"{len(at)} heads stand at {len(set(at))} offsets of a {len(rows)} × {len(columns)} kernel; it has "
            f"{len(wanted)} taps, one head each"
        )
    return rows, columns, [at.index(one) for one in wanted]


def _space(axis: str, at: list[int]) -> int:
    """How far taps are apart on an axis, which must be the same for all."""
    spaces = {b - a for a, b in pairwise(at)} or {1}
    if len(spaces) > 1:
        raise ValueError(f"heads stand at the {axis} {at}, which are not evenly spaced; a convolution's taps are")
    return spaces.pop()


def _check_same(rows: list[int], columns: list[int]) -> None:
    for axis, at in (("rows", rows), ("columns", columns)):
        if at[0] != -((at[-1] - at[0]) // 2):
            raise ValueError(
                f"heads stand at the {axis} {at}, which are not around the query as those of a convolution with "
                "padding='same' are"
            )
