"""The matrices of every head, found in a recorded run and verified against it.

    q = x W_Q + b_Q,   k = x W_K + b_K,   v = x W_V + b_V,   head writes a v W_O,   x = γ ⊙ u + β

Which columns of which linear layer make a query is read off the numbers: each column of the recorded queries must be a
column of the output of a linear layer. So one rule finds separate projections, fused ones in any order (q, k, v of all
heads, or interleaved per head or per group), and keys that several heads share. The norm before the layer is folded in:
its γ and β go into W and b, and the subtraction of the mean (LayerNorm) becomes the subtraction of the mean of each
column of W. What is left is u, a vector of size √D whose scale no weight can know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._errors import RegardError
from regard.interp._circuits_norms import HALF_TOLERANCE, TOLERANCE, NormKind, fold_norm, normalise
from regard.interp._circuits_probe import LinearCall, NormCall, ProbedCall, torch_projection
from regard.interp._circuits_rotation import Rotation, find_rotation
from regard.interp._output_projection import _plain_weight

ROWS_PER_CALL = 4096


@dataclass(frozen=True, eq=False)
class Projection:
    """``y = u W + b`` of all heads: ``W [H, D, d]``, ``b [H, d]``, with the norm before it folded in.

    - ``kind``: what the norm does to x before γ. ``plain``: W without the norm. ``read [B, n, D]``: u in the run.
    - ``stream [B, n, D]``: what the norm read in the run.
    """

    weight: Tensor
    bias: Tensor
    kind: NormKind
    plain: Tensor
    read: Tensor
    stream: Tensor


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The circuits' matrices of one attention layer; G key heads are shared by H / G query heads each.

    - ``q``, ``k``, ``v``: the projections. ``out [H, E, D]``: W_O.
    - ``rotation``: the rotary positions. ``scale``: the factor of q·k. ``bias [H, n, n]``: see ``ProbedCall``.
    - ``notes``: what these matrices leave out.
    """

    path: str
    cross: bool
    q: Projection
    k: Projection
    v: Projection
    out: Tensor
    rotation: Rotation
    scale: float
    bias: Tensor | None
    notes: tuple[str, ...]

    @property
    def heads(self) -> int:
        return len(self.out)

    def key_head(self, head: int) -> int:
        """The key and value head that a query head reads."""
        return head * len(self.k.weight) // self.heads


def extract(call: ProbedCall) -> LayerWeights:
    """The matrices of a recorded layer. Raises ``RegardError`` that names the layer if they cannot be verified."""
    tolerance = TOLERANCE.get(call.q.dtype, HALF_TOLERANCE)
    notes: list[str] = []
    parts = {}
    rows = {}
    for name, heads in (("q", call.q), ("k", call.k), ("v", call.v)):
        found = _find_projection(call, name, heads, tolerance, notes)
        if found is None:
            raise _refused(call, f"no linear layer gives its {_NAMES[name]}")
        parts[name], rows[name] = found
    if not _close(rows["v"], call.v.double(), tolerance):
        raise _refused(call, "its values are not x W_V + b_V at every position")
    rotation = find_rotation([rows["q"], rows["k"]], [call.q.double(), call.k.double()], 4 * tolerance)
    if rotation is None:
        raise _refused(call, "its queries and keys are not x W + b, rotated by their positions")
    return LayerWeights(
        path=call.path,
        cross=call.cross,
        **parts,
        out=_output_weight(call, tolerance, notes),
        rotation=rotation,
        scale=call.scale,
        bias=call.bias,
        notes=tuple(dict.fromkeys(notes)),
    )


_NAMES = {"q": "queries", "k": "keys", "v": "values"}


def _refused(call: ProbedCall, reason: str) -> RegardError:
    return RegardError(
        f"the circuits of {call.path or 'the model itself'} are unknown: {reason}; the weights that a head uses must "
        "be those of linear layers (docs/circuits.md)"
    )


# --- projections -----------------------------------------------------------------------------------------------------


def _find_projection(
    call: ProbedCall, name: str, heads: Tensor, tolerance: float, notes: list[str]
) -> tuple[Projection, Tensor] | None:
    """The projection of q, k or v, and what it gives before positions ``[B, H, n, d]``; None if none is found."""
    B, H, n, d = heads.shape
    target = heads.transpose(1, 2).reshape(B, n, H * d).double()
    for linear in call.linears:
        y = _texts_first(linear.y, B, n)
        x = _texts_first(linear.x, B, n)
        if y is None or x is None:
            continue
        columns = _match(target[:, 0], y[:, 0], tolerance)
        if columns is not None:
            index, factor = columns
            return _projection(call, linear, name, x, index, factor.expand(len(index)), (H, d), tolerance)

    # Queries and keys may be normalised after their projection.
    for norm in call.norms:
        normed = _rows_of_heads(norm.y, B, n)
        before = _rows_of_heads(norm.x, B, n)
        if normed is None or before is None or name == "v":
            continue
        columns = _match(target[:, 0], normed[:, 0], tolerance)
        folded = fold_norm(norm)
        if columns is None or folded is None:
            continue
        for linear in call.linears:
            y = _texts_first(linear.y, B, n)
            x = _texts_first(linear.x, B, n)
            if x is None or y is None:
                continue
            inner = _match(before[:, 0], y[:, 0], tolerance)
            if inner is None:
                continue
            if not _close(y[..., inner[0]].double() * inner[1], before, tolerance):
                raise _refused(call, f"its {_NAMES[name]} are normalised after their rotation")
            return _normalised_projection(call, linear, name, x, norm, columns, inner, (H, d), tolerance, notes)
    return None


def _projection(
    call: ProbedCall,
    linear: LinearCall,
    name: str,
    x: Tensor,
    index: Tensor,
    factor: Tensor,
    shape: tuple[int, int],
    tolerance: float,
) -> tuple[Projection, Tensor]:
    """The columns of a linear layer, times a factor, as W and b of all heads; verified on all rows of the run."""
    weight_DF, bias_F = _linear_map(call, linear, tolerance)
    H, d = shape
    scale = factor.to(weight_DF)
    plain_HDE = (weight_DF[:, index] * scale).unflatten(1, (H, d)).transpose(0, 1)
    bias = (bias_F[index] * scale).unflatten(0, (H, d))
    rows = torch.einsum("bnd,hde->bhne", x.double(), plain_HDE.double()) + bias.double().unsqueeze(1)
    kind: NormKind = None
    weight = plain_HDE
    stream = x
    read = x
    norm = _norm_before(call, linear)
    if norm is not None:
        folded = fold_norm(norm)
        before = _texts_first(norm.x, *x.shape[:2])
        if folded is not None and before is not None:
            kind, gamma, beta = folded
            bias = bias + torch.einsum("d,hde->he", beta.to(weight), weight)
            weight = gamma.to(weight).unsqueeze(-1) * weight
            stream = before
            read = normalise(stream.double(), kind)
    if kind == "layer":
        weight = weight - weight.mean(1, keepdim=True)
    return Projection(weight, bias, kind, plain_HDE, read.double(), stream.double()), rows


def _normalised_projection(
    call: ProbedCall,
    linear: LinearCall,
    name: str,
    x: Tensor,
    norm: NormCall,
    columns: tuple[Tensor, Tensor],
    inner: tuple[Tensor, Tensor],
    shape: tuple[int, int],
    tolerance: float,
    notes: list[str],
) -> tuple[Projection, Tensor]:
    """A projection with a norm behind it. Its scale is the mean one of the run, because each row has its own."""
    B, n = x.shape[:2]
    folded = fold_norm(norm)
    assert folded is not None
    kind, gamma, beta = folded
    group = norm.x.shape[-1]
    projection, _ = _projection(
        call, linear, name, x, inner[0], inner[1].expand(len(inner[0])), (1, len(inner[0])), tolerance
    )
    before = _rows_of_heads(norm.x, B, n)
    normed = _rows_of_heads(norm.y, B, n)
    assert before is not None and normed is not None
    groups = before.unflatten(-1, (-1, group))
    if kind == "layer":
        groups = groups - groups.mean(-1, keepdim=True)
    inverse_size = groups.square().mean(-1).clamp(min=1e-300).rsqrt().mean((0, 1))
    factor = (inverse_size.unsqueeze(-1) * gamma.double()).flatten()[columns[0]] * columns[1].double()
    H, d = shape

    def behind_norm(matrix: Tensor) -> Tensor:
        """Columns behind the norm, from those before it, ``[1, *, F]``."""
        columns_F = matrix[0]
        if kind == "layer":
            split = columns_F.unflatten(-1, (-1, group))
            columns_F = (split - split.mean(-1, keepdim=True)).flatten(-2)
        return (columns_F[..., columns[0]] * factor.to(columns_F)).unflatten(-1, (H, d))

    shift = beta.double().repeat(len(inverse_size))[columns[0]] * columns[1].double()
    bias = behind_norm(projection.bias.unsqueeze(1)).squeeze(0) + shift.unflatten(0, (H, d)).to(projection.bias)
    rows = (normed[..., columns[0]] * columns[1].double()).unflatten(-1, (H, d)).transpose(1, 2)
    notes.append("queries and keys are normalised: their matrices have the mean scale of the run")
    found = Projection(
        behind_norm(projection.weight).transpose(0, 1),
        bias,
        projection.kind,
        behind_norm(projection.plain).transpose(0, 1),
        projection.read,
        projection.stream,
    )
    return found, rows.double()


def _match(target: Tensor, y: Tensor, tolerance: float) -> tuple[Tensor, Tensor] | None:
    """For each column of ``target [R, C]`` the column of ``y [R, F]`` that is equal to it up to one common factor.

    Returns the indices ``[C]`` and the factor; None if a column has no equal.
    """
    target = target.double()
    y = y.double()
    for normalised in (False, True):
        a = target.T
        b = y.T
        if normalised:  # a layer may multiply its queries by 1/√d before the call
            a = a / a.norm(dim=1, keepdim=True).clamp(min=1e-300)
            b = b / b.norm(dim=1, keepdim=True).clamp(min=1e-300)
        index = torch.cat(
            [torch.cdist(part, b, compute_mode="donot_use_mm_for_euclid_dist").argmin(1) for part in a.split(512)]
        )
        found = y[:, index]
        factor = torch.ones((), dtype=torch.float64)
        if normalised:
            factor = (found * target).sum() / found.square().sum().clamp(min=1e-300)
        size = target.norm(dim=0)
        error = (factor * found - target).norm(dim=0)
        if bool((error <= tolerance * size + 1e-3 * tolerance * size.mean()).all()) and bool(size.any()):
            return index, factor
    return None


def _linear_map(call: ProbedCall, linear: LinearCall, tolerance: float) -> tuple[Tensor, Tensor]:
    """The matrix ``[D_in, D_out]`` and the bias of a linear layer, which must give what the run recorded."""
    layer: Any = linear.layer
    if isinstance(layer, nn.MultiheadAttention):
        weight, bias = torch_projection(layer, linear.path[0])
        weight_DF = weight.T
    else:
        plain = _plain_weight(layer)
        bias = getattr(layer, "bias", None)
        if plain is not None:
            # The helper gives float32, which is too coarse for a layer in float64.
            weight_DF = plain.T
            if layer.weight.dtype == torch.float64:
                weight_DF = layer.weight.T
                if type(layer).__name__ == "Conv1D":
                    weight_DF = layer.weight
        else:
            device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
            zero = torch.zeros(1, linear.x.shape[-1], dtype=linear.x.dtype, device=device)
            bias = layer(zero)[0]
            identity = torch.eye(linear.x.shape[-1]).to(zero)
            weight_DF = torch.cat([layer(part) for part in identity.split(ROWS_PER_CALL)]) - bias
    weight_DF = weight_DF.detach().cpu()
    if weight_DF.dtype != torch.float64:
        weight_DF = weight_DF.float()
    bias_F = torch.zeros(weight_DF.shape[1]).to(weight_DF)
    if bias is not None:
        bias_F = bias.detach().to(weight_DF)
    if not _close(linear.x.double() @ weight_DF.double() + bias_F.double(), linear.y.double(), tolerance):
        raise _refused(call, f"{linear.path} is not the linear map of its weight")
    return weight_DF, bias_F


def _output_weight(call: ProbedCall, tolerance: float, notes: list[str]) -> Tensor:
    """W_O ``[H, E, D]``, with the γ of a norm that reads the output of the layer alone."""
    _, H, _, E = call.out.shape
    if not call.readers:
        raise _refused(call, "no linear layer reads the output of its heads")
    # A wrapper calls the layer that it wraps, and ends last.
    projection = call.readers[-1]
    for reader in call.readers[:-1]:
        if reader.path and not reader.path.startswith(f"{projection.path}."):
            raise _refused(call, f"{reader.path} and {projection.path} read the output of its heads")
    weight_DF, _ = _linear_map(call, projection, tolerance)
    for norm in call.out_norms:
        # A norm of this output, before it is added to the residual stream.
        if norm.x.shape == projection.y.shape and torch.equal(norm.x, projection.y):
            folded = fold_norm(norm)
            if folded is None:
                raise _refused(call, f"{norm.path or 'a norm'} changes its output in an unknown way")
            kind, gamma, _ = folded
            if kind == "layer":
                weight_DF = weight_DF - weight_DF.mean(1, keepdim=True)
            weight_DF = weight_DF * gamma.to(weight_DF)
            notes.append("the output of the layer is normalised: W_O has its γ and an unknown scale")
    return weight_DF.unflatten(0, (H, E))


def _norm_before(call: ProbedCall, linear: LinearCall) -> NormCall | None:
    """The norm whose output a linear layer read."""
    for norm in call.norms:
        if norm.y.numel() == linear.x.numel() and torch.equal(norm.y.reshape(-1), linear.x.reshape(-1)):
            return norm
    return None


# --- shapes ----------------------------------------------------------------------------------------------------------


def _texts_first(x: Tensor, texts: int, length: int) -> Tensor | None:
    """``[B, n, F]`` of what a layer read or wrote, in whichever order it holds the rows; None if it holds others."""
    if x.ndim == 3 and x.shape[:2] == (length, texts) and texts != length:
        return x.transpose(0, 1)
    if x.numel() and x.numel() == texts * length * x.shape[-1]:
        return x.reshape(texts, length, x.shape[-1])
    return None


def _rows_of_heads(x: Tensor, texts: int, length: int) -> Tensor | None:
    """``[B, n, H·d]`` of a norm of queries or keys, which has ``[B, n, H, d]``, ``[B, H, n, d]`` or joined heads."""
    if x.ndim == 4 and x.shape[0] == texts and x.shape[1] == length:
        return x.flatten(2).double()
    if x.ndim == 4 and x.shape[0] == texts and x.shape[2] == length:
        return x.transpose(1, 2).flatten(2).double()
    rows = _texts_first(x, texts, length)
    if rows is None or x.ndim != 3:
        return None
    return rows.double()


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    return bool((found - expected).norm() <= 2 * tolerance * expected.norm())
