"""FLOPs of single operators, from the shapes that they ran on: what torch's own counter lacks, or counts otherwise.

The convention, for every formula here: a multiply–add is 2, of complex numbers too; only matrix products and
convolutions count; masks, causal or not, save nothing. A backward pass is what the mathematics needs: each product of
the forward pass gives two. So attention, 2·B·H·n·m·(d + e) forward, is twice that backward (dV, dA, dQ, dK), whichever
kernel runs: the scores that a tiled kernel computes once more are its own affair. (torch counts them: 2.5 times for
kernels, 2 times for plain ones.) Fused kernels compute all of their gradients, and all of them count, wanted or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

__all__ = ["FORMULAS", "could_hide_products", "formula_of", "name_of", "register"]

Formula = Callable[..., int]  # (what the operator returned, *its arguments) → FLOPs


# --- products --------------------------------------------------------------------------------------------------------


def _product(out: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    """``a [*, m, k] · b [*, k, n]``: 2·m·k·n for each of the batch; b may be one matrix or one vector."""
    return 2 * a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _added_product(out: Any, c: Tensor, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    return _product(out, a, b)


def _linear(out: Any, x: Tensor, weight: Tensor, *rest: Any, **more: Any) -> int:
    """``x [*, in] · W [out, in]ᵀ``."""
    return 2 * x.numel() * weight.shape[0]


def _linear_backward(out: Any, x: Tensor, grad: Tensor, weight: Tensor, mask: Any, *rest: Any, **more: Any) -> int:
    return (bool(mask[0]) + bool(mask[1])) * _linear(None, x, weight)


def _packed_linear(out: Tensor, x: Tensor, *rest: Any, **more: Any) -> int:
    """A linear map whose weight is packed: only what goes in and comes out has a readable shape."""
    return 2 * out.numel() * x.shape[-1]


def _grouped(out: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    """Products of ragged groups; of a ``[G, m, k]`` with the columns of b ``[k, n]`` shared out, each sees its own."""
    return _product(out, a, b) // (a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1)


def _three_factors(
    out: Any, a: Tensor, b: Tensor, c: Tensor, no_a: Any, no_b: Any, no_c: Any, summed: Any, *rest: Any, **more: Any
) -> int:
    """``Σ a·b·c`` of nn.Bilinear as two products: a with b over the dimensions that c lacks, then with c."""
    rank = a.ndim + len(no_a)
    sizes = [1] * rank
    spans = []
    for x, missing in ((a, no_a), (b, no_b), (c, no_c)):
        spans.append([i for i in range(rank) if i not in missing])
        for i, size in zip(spans[-1], x.shape, strict=True):
            sizes[i] = max(sizes[i], size)
    first = set(spans[0]) | set(spans[1])
    second = {i for i in first if i not in summed or i in spans[2]} | set(spans[2])
    return 2 * sum(math.prod(sizes[i] for i in span) for span in (first, second))


# --- convolutions ----------------------------------------------------------------------------------------------------


def _slides(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    """2·B·(places where the filter is laid)·(numbers in the filter); groups are in the filter's shape already."""
    return 2 * x.shape[0] * math.prod((x if transposed else y).shape[2:]) * weight.numel()


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """The rest is bias, stride, padding, dilation, transposed and what comes after."""
    return _slides(x, weight, out, rest[4])


def _convolution_backward(out: Any, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Of x and of the filter, each as much as forward. (torch's own formula forgets the groups of the second.)

    The rest is as forward's, with the biases' sizes first and which gradients are wanted last.
    """
    wanted = rest[-1]
    return (bool(wanted[0]) + bool(wanted[1])) * _slides(x, weight, grad, rest[4])


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    """``q [B, H, n, d]``, ``k [B, G, m, d]``, ``v [B, G, m, e]``: 2·B·H·n·m·(d + e), however keys are shared."""
    return 2 * q.numel() // max(q.shape[-1], 1) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(out: Any, grad: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    return 2 * _attention(None, q, k, v)


def _flex_backward(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    return 2 * _attention(None, q, k, v)


def _without_recomputing(theirs: Formula) -> Formula:
    """torch's count of attention backward, 2·n·m·(3d + 2e), without the scores computed once more: 2·n·m·(2d + 2e)."""

    def formula(out: Any, grad: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
        d, e = q.shape[-1], v.shape[-1]
        return theirs(grad, q, k, v, *rest, out_val=out, **more) * (2 * d + 2 * e) // (3 * d + 2 * e)

    return formula


def _lengths(x: Tensor) -> list[int]:
    """The length of each sequence of ``[B, n, D]``, or of a nested tensor."""
    return [int(n) for n in x._nested_tensor_size()[:, 0]] if x.is_nested else [x.shape[1]] * x.shape[0]


def _multihead(out: Any, query: Tensor, key: Tensor, value: Tensor, width: int, *rest: Any, **more: Any) -> int:
    """nn.MultiheadAttention in one call: four maps of D × D (two of keys' length), and attention, d = e = D / H."""
    pairs = zip(_lengths(query), _lengths(key), strict=True)
    return sum(4 * (n + m) * width**2 + 4 * n * m * width for n, m in pairs)


def _encoder_layer(out: Any, x: Tensor, width: int, *rest: Any, **more: Any) -> int:
    """nn.TransformerEncoderLayer in one call: attention, and two linear maps at every position."""
    up, down = rest[12], rest[14]
    return _multihead(out, x, x, x, width) + 2 * sum(_lengths(x)) * (up.numel() + down.numel())


# --- recurrence ------------------------------------------------------------------------------------------------------


def _recurrent(out: Any, x: Tensor, *weights: Any, **more: Any) -> int:
    """RNN, LSTM, GRU: every matrix meets every position. A fused layer names two matrices, a fused stack a list."""
    given = weights[0] if isinstance(weights[0], list | tuple) else weights[:2]
    return 2 * (x.numel() // x.shape[-1]) * sum(w.numel() for w in given if w.ndim == 2)


def _recurrent_backward(out: Any, x: Tensor, *weights: Any, **more: Any) -> int:
    return 2 * _recurrent(out, x, *weights)


# --- the table -------------------------------------------------------------------------------------------------------

_SDPA = "aten::_scaled_dot_product_"
FORMULAS: dict[str, Formula] = {
    "regard::attention": _attention,
    "regard::observed_attention": _attention,  # what is measured on the way is no part of the model
    "regard::attention_backward": _attention_backward,
    **{
        f"{_SDPA}{kind}": _attention
        for kind in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
            "attention_math_for_mps",
        )
    },
    **{
        f"{_SDPA}{kind}_backward": _attention_backward
        for kind in (
            "flash_attention_for_cpu",
            "flash_attention",
            "efficient_attention",
            "cudnn_attention",
            "fused_attention_overrideable",
        )
    },
    "higher_order::flex_attention": _attention,
    "higher_order::flex_attention_backward": _flex_backward,
    "aten::_native_multi_head_attention": _multihead,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    **{f"aten::{name}": _product for name in ("mv", "dot", "vdot", "_int_mm")},
    **{f"aten::{name}": _added_product for name in ("addmv", "addmv_", "addbmm", "addbmm_", "_addmm_activation")},
    **{f"aten::{name}": _added_product for name in ("addmm_", "baddbmm_")},  # torch knows those that write elsewhere
    **{f"aten::{name}": _grouped for name in ("_grouped_mm", "_scaled_grouped_mm")},
    **{f"aten::{name}": _linear for name in ("linear", "mkldnn_linear")},
    "aten::linear_backward": _linear_backward,
    **{
        f"aten::{name}": _packed_linear
        for name in (
            "_weight_int8pack_mm",
            "_weight_int4pack_mm",
            "_weight_int4pack_mm_for_cpu",
            "_dyn_quant_matmul_4bit",
        )
    },
    **{f"quantized::linear{kind}": _packed_linear for kind in ("", "_relu", "_dynamic", "_relu_dynamic")},
    "aten::_trilinear": _three_factors,
    "aten::convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::{name}": _recurrent for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")},
    **{f"aten::{name}_backward": _recurrent_backward for name in ("mkldnn_rnn_layer", "_cudnn_rnn", "miopen_rnn")},
}


def name_of(op: OpOverload | HigherOrderOperator) -> str:
    """``namespace::name``, without the overload.

    >>> name_of(torch.ops.aten.add.Tensor)
    'aten::add'
    """
    return f"higher_order::{op.name()}" if isinstance(op, HigherOrderOperator) else op._schema.name


def formula_of(op: OpOverload | HigherOrderOperator) -> Formula | None:
    """Ours, or else the one that torch, or whoever registered one with torch, has; None where nobody knows."""
    name = name_of(op)
    if name in FORMULAS:
        return FORMULAS[name]
    theirs = flop_counter.flop_registry.get(op if isinstance(op, HigherOrderOperator) else op._overloadpacket)
    if theirs is None:
        return None
    if re.search("att.*backward", name):
        return _without_recomputing(theirs)
    return lambda out, *args, **kwargs: theirs(*args, out_val=out, **kwargs)


def register() -> None:
    """Give torch the formulas it lacks, so that its own ``FlopCounterMode`` sees these operators; twice is as once.

    Formulas that torch has stay as they are: elsewhere someone may count on them.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> register()
    >>> x = torch.randn(1, 2, 100, 8)
    >>> with FlopCounterMode(display=False) as counter:
    ...     y = regard.attention(x, x, x)
    >>> counter.get_total_flops() == 2 * 4 * 100 * 100 * 8  # heads · 4·n·m·d
    True
    """
    for name, formula in FORMULAS.items():
        space, _, leaf = name.partition("::")
        packet = getattr(getattr(torch.ops, space), leaf, None)
        if packet is None or packet in flop_counter.flop_registry:
            continue

        def counted(*args: Any, out_val: Any = None, _formula: Formula = formula, **kwargs: Any) -> int:
            return _formula(out_val, *args, **kwargs)

        flop_counter.register_flop_formula(packet, get_raw=True)(counted)


# --- what nobody knows -----------------------------------------------------------------------------------------------

# Parts of the names of torch's operators that move, compare, normalise or add up numbers, and are not tagged as such.
_HARMLESS = re.compile(
    "norm|softmax|embedding|(?<!no_)dropout|pool|pad|loss|upsample|grid_|index|scatter|gather|cat|stack|copy|select|"
    "slice|diagonal|unfold|sort|topk|mask|where|foreach_(?!mm)|fused_(adam|sgd|adagrad)|thnn_fused|logsig|sigmoid|tanh|"
    "^_?(leaky_re|rre|pre|e|ce|se|g)lu|shrink|softplus|swish|cum|^std|^var|split|_like|new_|fill|set_|quantize_|"
    "complex|polar|im2col|col2im|bucketize|lerp|cross|addr|ger|resize|detach|alias|view|lift|multinomial|isin|histogram|"
    "roll|repeat|segment|^_nested|^(eq|ne|lt|le|gt|ge|floor_divide|heaviside|put|take|dist|block_diag|_add_relu)_?$"
)
_TAGS = {getattr(torch.Tag, name) for name in ("pointwise", "reduction", "view_copy") if hasattr(torch.Tag, name)}
# Of these namespaces an operator takes no product: sizes, single numbers, messages between machines.
_QUIET = {"prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "rngprims"}


def could_hide_products(op: OpOverload | HigherOrderOperator, args: Any) -> bool:
    """Whether an operator without a formula might be a matrix product.

    torch's own: if two of its tensors hold numbers (not indices) and neither its tags nor its name say what it does
    with them. Anybody else's: if it takes a tensor at all, since nothing is known about it.
    """
    if isinstance(op, HigherOrderOperator):
        return True
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if op.namespace != "aten":
        return op.namespace not in _QUIET and bool(tensors)
    numbers = [x for x in tensors if x.is_floating_point() or x.is_complex() or x.dtype in (torch.int8, torch.uint8)]
    return len(numbers) > 1 and _TAGS.isdisjoint(op.tags) and _HARMLESS.search(op._opname) is None
