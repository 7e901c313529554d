"""FLOPs of single torch operators that torch's own counter does not count, or counts by another convention.

The convention of every formula here:

- A multiply–add is 2 FLOPs, for complex numbers too. Only matrix products and convolutions count, masked pairs too.
- A backward pass counts what the mathematics needs: two products for each product of the forward pass. Attention has
  2·B·H·n·m·(d + e) forward, and twice as many backward (dV, dA, dQ, dK), for every kernel. The scores that a tiled
  kernel computes again do not count. (torch counts them: 2.5 times for fused kernels, 2 times for plain ones.)
- Fused kernels compute all of their gradients, and all of them count, whether they are needed or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import flop_counter
from torch.utils._pytree import tree_leaves

Formula = Callable[..., int]  # (what the operator returned, *its arguments) → FLOPs


# --- products --------------------------------------------------------------------------------------------------------


def _product(out: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    """``a [*, m, k] · b [*, k, n]``: 2·m·k·n for each batch entry; b may be one matrix or one vector."""
    columns = b.shape[-1] if b.ndim > 1 else 1
    return 2 * a.numel() * columns


def _added_product(out: Any, c: Tensor, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    return _product(out, a, b)


def _linear(out: Any, x: Tensor, weight: Tensor, *rest: Any, **more: Any) -> int:
    """``x [*, in] · W [out, in]ᵀ``."""
    return 2 * x.numel() * weight.shape[0]


def _linear_backward(out: Any, x: Tensor, grad: Tensor, weight: Tensor, mask: Any, *rest: Any, **more: Any) -> int:
    """FLOPs of the gradients that `mask` selects. It has three flags: for x, the weight and the bias."""
    return (bool(mask[0]) + bool(mask[1])) * _linear(None, x, weight)


def _packed_linear(out: Tensor, x: Tensor, *rest: Any, **more: Any) -> int:
    """A linear map with a packed weight: only the input and the output have a readable shape."""
    return 2 * out.numel() * x.shape[-1]


def _grouped(out: Any, a: Tensor, b: Tensor, *rest: Any, **more: Any) -> int:
    """Products of groups of different sizes. In a ``[G, m, k]`` · b ``[k, n]`` each group has its own columns of b."""
    if a.ndim == 3 and b.ndim == 2:
        return _product(out, a, b) // a.shape[0]
    return _product(out, a, b)


def _three_factors(
    out: Any, a: Tensor, b: Tensor, c: Tensor, no_a: Any, no_b: Any, no_c: Any, summed: Any, *rest: Any, **more: Any
) -> int:
    """``Σ a·b·c`` of nn.Bilinear, counted as two products: first a·b, then the result times c.

    `no_a`, `no_b` and `no_c` are the dimensions that a, b and c do not have.
    """
    rank = a.ndim + len(no_a)
    sizes = [1] * rank
    dimensions = []
    for x, missing in ((a, no_a), (b, no_b), (c, no_c)):
        dimensions.append([i for i in range(rank) if i not in missing])
        for i, size in zip(dimensions[-1], x.shape, strict=True):
            sizes[i] = max(sizes[i], size)

    # The first product can already sum over the dimensions that c does not have.
    first = {*dimensions[0], *dimensions[1]}
    second = {i for i in first if i not in summed or i in dimensions[2]} | set(dimensions[2])
    return 2 * sum(math.prod(sizes[i] for i in product) for product in (first, second))


# --- convolutions ----------------------------------------------------------------------------------------------------


def _filter_flops(x: Tensor, weight: Tensor, y: Tensor, transposed: bool) -> int:
    """2·B·(positions of the filter)·(numbers in the filter); the filter's shape already contains the groups."""
    positions = x.shape[2:] if transposed else y.shape[2:]
    return 2 * x.shape[0] * math.prod(positions) * weight.numel()


def _convolution(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """`rest` is bias, stride, padding, dilation, transposed, output padding and groups."""
    return _filter_flops(x, weight, out, rest[4])


def _convolution_backward(out: Any, grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> int:
    """Gradients of x and of the filter: each costs as much as forward. (torch ignores groups in the filter's gradient.)

    `rest` is as in the forward pass, with the bias sizes first and the computed gradients last.
    """
    mask = rest[-1]
    return (bool(mask[0]) + bool(mask[1])) * _filter_flops(x, weight, grad, rest[4])


# --- attention -------------------------------------------------------------------------------------------------------


def _attention(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    """``q [B, H, n, d]``, ``k [B, G, m, d]``, ``v [B, G, m, e]``: 2·B·H·n·m·(d + e), for every G."""
    return 2 * q.numel() // max(q.shape[-1], 1) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(out: Any, grad: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    return 2 * _attention(None, q, k, v)


def _flex_backward(out: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
    return 2 * _attention(None, q, k, v)


def _without_recomputation(torch_formula: Formula) -> Formula:
    """Subtract the recomputed scores from torch's count of a backward pass: 2·n·m·(3d + 2e) becomes 2·n·m·(2d + 2e)."""

    def formula(out: Any, grad: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **more: Any) -> int:
        d = q.shape[-1]
        e = v.shape[-1]
        return torch_formula(grad, q, k, v, *rest, out_val=out, **more) * (2 * d + 2 * e) // (3 * d + 2 * e)

    return formula


def _lengths(x: Tensor) -> list[int]:
    """The length of each sequence of ``[B, n, D]``, or of a nested tensor."""
    if x.is_nested:
        return [int(n) for n in x._nested_tensor_size()[:, 0]]
    return [x.shape[1]] * x.shape[0]


def _multihead(out: Any, query: Tensor, key: Tensor, value: Tensor, width: int, *rest: Any, **more: Any) -> int:
    """nn.MultiheadAttention in one call: four D × D maps, two of them on the keys, and attention with d = e = D/H."""
    flops = 0
    for n, m in zip(_lengths(query), _lengths(key), strict=True):
        flops += 4 * (n + m) * width**2 + 4 * n * m * width
    return flops


def _encoder_layer(out: Any, x: Tensor, width: int, *rest: Any, **more: Any) -> int:
    """nn.TransformerEncoderLayer in one call: attention, and two linear maps at every position."""
    up = rest[12]  # the weights of the two maps, by their place in the operator's schema
    down = rest[14]
    return _multihead(out, x, x, x, width) + 2 * sum(_lengths(x)) * (up.numel() + down.numel())


# --- recurrence ------------------------------------------------------------------------------------------------------


def _recurrent(out: Any, x: Tensor, *weights: Any, **more: Any) -> int:
    """RNN, LSTM, GRU: every matrix is applied at every position.

    A fused layer has two matrices as arguments, a fused stack a list of them.
    """
    matrices = weights[0] if isinstance(weights[0], list | tuple) else weights[:2]
    return 2 * (x.numel() // x.shape[-1]) * sum(w.numel() for w in matrices if w.ndim == 2)


def _recurrent_backward(out: Any, x: Tensor, *weights: Any, **more: Any) -> int:
    return 2 * _recurrent(out, x, *weights)


# --- the table -------------------------------------------------------------------------------------------------------

# Operators by the formula that counts them. torch itself counts mm, bmm, addmm and baddbmm.
_ATTENTION_KERNELS = (
    *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)
_OPERATORS: dict[Formula, tuple[str, ...]] = {
    _attention: (
        "regard::attention",
        "regard::observed_attention",  # the measurements are not part of the model, so they do not count
        *(f"aten::_scaled_dot_product_{kernel}" for kernel in _ATTENTION_KERNELS),
        "aten::_scaled_dot_product_attention_math_for_mps",
        "higher_order::flex_attention",
    ),
    _attention_backward: (
        "regard::attention_backward",
        *(f"aten::_scaled_dot_product_{kernel}_backward" for kernel in _ATTENTION_KERNELS),
    ),
    _flex_backward: ("higher_order::flex_attention_backward",),
    _multihead: ("aten::_native_multi_head_attention",),
    _encoder_layer: ("aten::_transformer_encoder_layer_fwd",),
    _product: ("aten::mv", "aten::dot", "aten::vdot", "aten::_int_mm"),
    _added_product: (
        *("aten::addmv", "aten::addmv_", "aten::addbmm", "aten::addbmm_", "aten::_addmm_activation"),
        *("aten::addmm_", "aten::baddbmm_"),
    ),
    _grouped: ("aten::_grouped_mm", "aten::_scaled_grouped_mm"),
    _linear: ("aten::linear", "aten::mkldnn_linear"),
    _linear_backward: ("aten::linear_backward",),
    _packed_linear: (
        *("aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::_weight_int4pack_mm_for_cpu"),
        "aten::_dyn_quant_matmul_4bit",
        *("quantized::linear", "quantized::linear_relu", "quantized::linear_dynamic", "quantized::linear_relu_dynamic"),
    ),
    _three_factors: ("aten::_trilinear",),
    _convolution: ("aten::convolution",),
    _convolution_backward: ("aten::convolution_backward",),
    _recurrent: ("aten::mkldnn_rnn_layer", "aten::_cudnn_rnn", "aten::miopen_rnn"),
    _recurrent_backward: (
        *("aten::mkldnn_rnn_layer_backward", "aten::_cudnn_rnn_backward", "aten::miopen_rnn_backward"),
    ),
}
FORMULAS: dict[str, Formula] = {}
for _formula, _names in _OPERATORS.items():
    FORMULAS |= dict.fromkeys(_names, _formula)


def operator_name(op: OpOverload | HigherOrderOperator) -> str:
    """``namespace::name``, without the overload.

    >>> operator_name(torch.ops.aten.add.Tensor)
    'aten::add'
    """
    if isinstance(op, HigherOrderOperator):
        return f"higher_order::{op.name()}"
    return op._schema.name


def find_formula(op: OpOverload | HigherOrderOperator) -> Formula | None:
    """Return our formula for an operator, or else torch's formula; None if there is none."""
    name = operator_name(op)
    if name in FORMULAS:
        return FORMULAS[name]
    packet = op if isinstance(op, HigherOrderOperator) else op._overloadpacket
    torch_formula = flop_counter.flop_registry.get(packet)
    if torch_formula is None:
        return None
    if re.search("att.*backward", name):
        return _without_recomputation(torch_formula)
    return lambda out, *args, **kwargs: torch_formula(*args, out_val=out, **kwargs)


def register_flop_formulas() -> None:
    """Give torch the formulas it lacks, so that its own ``FlopCounterMode`` counts these operators.

    A second call changes nothing. Formulas that torch already has are not replaced: other code may rely on them.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> register_flop_formulas()
    >>> x = torch.randn(1, 2, 100, 8)
    >>> with FlopCounterMode(display=False) as counter:
    ...     y = regard.attention(x, x, x)
    >>> counter.get_total_flops() == 2 * 4 * 100 * 100 * 8  # heads · 4·n·m·d
    True
    """
    for name, formula in FORMULAS.items():
        namespace, _, leaf = name.partition("::")
        packet = getattr(getattr(torch.ops, namespace), leaf, None)
        if packet is None or packet in flop_counter.flop_registry:
            continue

        # The default argument binds the formula now, because the loop variable changes.
        def torch_formula(*args: Any, out_val: Any = None, _formula: Formula = formula, **kwargs: Any) -> int:
            return _formula(out_val, *args, **kwargs)

        flop_counter.register_flop_formula(packet, get_raw=True)(torch_formula)


# --- operators without a formula -------------------------------------------------------------------------------------

# Parts of the names of torch operators that move, compare, normalize or add numbers, but have no tag that says so.
_HARMLESS_NAMES = re.compile(
    "norm|softmax|embedding|(?<!no_)dropout|pool|pad|loss|upsample|grid_|index|scatter|gather|cat|stack|copy|select|"
    "slice|diagonal|unfold|sort|topk|mask|where|foreach_(?!mm)|fused_(adam|sgd|adagrad)|thnn_fused|logsig|sigmoid|tanh|"
    "^_?(leaky_re|rre|pre|e|ce|se|g)lu|shrink|softplus|swish|cum|^std|^var|split|_like|new_|fill|set_|quantize_|"
    "complex|polar|im2col|col2im|bucketize|lerp|cross|addr|ger|resize|detach|alias|view|lift|multinomial|isin|histogram|"
    "roll|repeat|segment|^_nested|^(eq|ne|lt|le|gt|ge|floor_divide|heaviside|put|take|dist|block_diag|_add_relu)_?$"
)
_HARMLESS_TAGS = {
    getattr(torch.Tag, name) for name in ("pointwise", "reduction", "view_copy") if hasattr(torch.Tag, name)
}
# Namespaces without matrix products: sizes, single numbers, messages between machines.
_HARMLESS_NAMESPACES = {"prim", "prims", "profiler", "c10d", "_c10d_functional", "c10d_functional", "rngprims"}


def may_contain_products(op: OpOverload | HigherOrderOperator, args: Any) -> bool:
    """Whether an operator without a formula might compute a matrix product.

    An operator of torch might if at least two of its tensors hold numbers (not indices), and neither its tags nor its
    name rule it out. Any other operator might if it takes a tensor.
    """
    if isinstance(op, HigherOrderOperator):
        return True
    if _is_harmless(op):
        return False
    tensors = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    if op.namespace != "aten":
        return bool(tensors)
    numbers = [x for x in tensors if x.is_floating_point() or x.is_complex() or x.dtype in (torch.int8, torch.uint8)]
    return len(numbers) > 1


@cache  # a model calls few operators, and each of them many times
def _is_harmless(op: OpOverload) -> bool:
    """Whether the tags, the name or the namespace of an operator rule out matrix products."""
    if op.namespace != "aten":
        return op.namespace in _HARMLESS_NAMESPACES
    return not _HARMLESS_TAGS.isdisjoint(op.tags) or _HARMLESS_NAMES.search(op._opname) is not None
