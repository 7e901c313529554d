"""The attention operator: softmax(scale·q kᵀ → softcap → + bias → mask) v, and torch's signature of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard._attribution import AttributionRequest
from regard._checks import check_number, check_probability, check_tensor, is_tracing
from regard._devices import draw_seed, move_to
from regard._errors import RegardError, RegardTypeError
from regard._lowered_scores import Bias, RelativeTerm, Scores
from regard._observables import DIFFERENTIABLE, Observation, Observe
from regard._saved_call import SavedCall
from regard._shapes import Shape, attention_shape, broadcasts, flatten_batch, flatten_scores_like
from regard.kernels import observe_some_heads, ops, zero_scale
from regard.kernels.choose_backend import resolve_backend
from regard.kernels.score_tiles import result_dtype, working_dtype
from regard.masks import Causal, Dense, Mask
from regard.masks._row_mask import row_bounds


class _Options(TypedDict, total=False):
    """The options of ``attention`` except ``observe``, which decides what is returned."""

    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout: float
    backend: str


@overload
def attention(q: Tensor, k: Tensor, v: Tensor, *, observe: None = ..., **options: Unpack[_Options]) -> Tensor: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, observe: Observe, **options: Unpack[_Options]
) -> tuple[Tensor, Observation]: ...


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, observe: Observe | None, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Observation]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    observe: Observe | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Observation]:
    """Exact multi-head attention in memory that grows with n + m, never with n·m.

        out_i = Σ_j A_ij v_j,    A_ij = exp(s_ij − lse_i),    lse_i = log Σ_j exp(s_ij)
        s_ij  = softcap(scale·q_i·k_j) + bias_ij,  −inf where the mask hides key j from query i

    Grouped heads: G divides H, and query heads h·H/G … (h+1)·H/G − 1 share key head h, which is never repeated in
    memory. Batch dimensions broadcast. Sums are kept in float32 or better.

    Parameters
    ----------
    q: queries ``[*batch, H, n, d]`` in float64, float32, bfloat16 or float16.
    k: keys ``[*batch, G, m, d]`` in q's dtype.
    v: values ``[*batch, G, m, e]`` in q's dtype.
    mask: a mask value, or a bool tensor broadcastable to ``[*batch, H, n, m]``; **True = may attend**. Default: none.
    bias: a bias value, or a floating-point tensor broadcastable to ``[*batch, H, n, m]``; −inf hides a key.
    scale: the inverse temperature, a number ≥ 0; None means 1/√d. For 0 and ``math.inf`` see below.
    softcap: c > 0 turns x = scale·q·k into c·tanh(x/c), before bias and mask. None disables it.
    sinks: ``[H]``, one extra logit per head that is only in the denominator.
    dropout: the probability that a weight is set to 0; the others are divided by 1 − dropout. Uses torch's generator.
    observe: what to measure during the computation; None measures nothing.
    backend: ``"native"`` (CPU), ``"triton"`` (CUDA and ROCm), ``"reference"``, or ``"auto"``: native or triton where
        they can run the call, else the reference.

    Returns
    -------
    ``out [*batch, H, n, e]`` in q's dtype; with ``observe``, the pair ``(out, Observation)``.

    Raises
    ------
    RegardError: shapes, dtypes or options that do not fit, or that the backend does not support.
    RuntimeError: a second derivative, forward-mode derivatives, ``torch.func.grad`` or ``vmap``.

    Edge cases
    ----------
    - The last query is aligned with the last key, unless a mask or bias has its own ``offset``:

          Causal(), n=2, m=4:  ■ ■ ■ ·        Causal(), n=4, m=2:  · ·    ← sees nothing: out = 0
                               ■ ■ ■ ■                             · ·
                                                                   ■ ·
                                                                   ■ ■
    - A query that may attend to no key gives the output 0 and adds nothing to gradients. n = 0 and m = 0 are allowed.
    - A hidden key contributes nothing, even if its k or v is NaN or inf. A visible NaN reaches the rows that see it.
    - ``scale=0``: q·k is ignored, even if it is NaN. The bias alone decides; without one, out is the mean of v.
    - ``scale=math.inf`` is the limit of softmax(β·q·k + bias) for β → ∞: only the visible keys with the largest q·k
      count, and ties share the weight by exp(bias). q and k get gradient 0; lse is over the biases of the tied keys.
      It is refused together with softcap or sinks.

    >>> q = torch.eye(2).reshape(1, 2, 2)
    >>> attention(q, q, q, mask=Causal(), scale=math.inf)
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    q, k, v = apply_autocast(q, k, v)
    # The compiler cannot trace these checks.
    if not is_tracing():
        refuse_transforms()
    shape = attention_shape(q, k, v)
    kernel = resolve_backend(backend, q, v)
    scale, softcap, dropout = check_options(shape, scale, softcap, sinks, dropout)
    q = flatten_batch(q, shape.batch)
    k = flatten_batch(k, shape.batch)
    v = flatten_batch(v, shape.batch)

    # From here on there are no mask and bias values, only tensors and numbers: the lowered form of the call.
    lo, hi, visible = _lower_mask(mask, shape, q.device)
    # The reference computes in float64 on a CPU; tables that a bias computes from q need the same dtype.
    added, terms = _lower_bias(bias, q.to(working_dtype(q)) if kernel == "reference" else q, shape)
    seed = None
    if dropout > 0:
        # A tensor, so that compiled code draws a new one at every call.
        seed = draw_seed(q.device)
    if sinks is not None:
        sinks = move_to(sinks, q.device)
    scores = Scores(scale, softcap, lo, hi, visible, added, terms, sinks, dropout, seed)

    if observe is None:
        # Merging batch entries depends on sizes, which may be symbolic while tracing.
        if is_tracing():
            out = ops.attention_output(q, k, v, scores, kernel)
        else:
            out = zero_scale.attention_output(q, k, v, scores, kernel)
        if len(shape.batch) == 1:
            return out
        return out.reshape(*shape.batch, shape.heads, shape.n, shape.e)
    request: object = observe
    if isinstance(request, AttributionRequest):
        # Only ``regard._hooks`` passes one, for ``regard.interp.attribute``.
        out = ops.attributed_attention(q, k, v, scores, kernel, request)
        return out.reshape(*shape.batch, shape.heads, shape.n, shape.e)
    if not isinstance(observe, Observe):
        raise RegardTypeError(f"observe must be a regard.Observe, got {type(observe).__name__}")
    real_queries = find_real_queries(observe, mask, shape, q.device)
    out, observation = observe_lowered(q, k, v, scores, kernel, observe, real_queries)
    return out.reshape(*shape.batch, shape.heads, shape.n, shape.e), observation


def observe_lowered(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, kernel: str, observe: Observe, real_queries: Tensor | None
) -> tuple[Tensor, Observation]:
    """Compute the output ``[B, H, n, e]`` of a lowered call, and its observation."""
    # The GPU kernels have no gradients of row values.
    if observe.differentiable and kernel == "triton":
        kernel = "reference"
    run = ops.observed_attention if observe.heads is None else observe_some_heads.observed_attention
    request = observe
    if observe.groups is not None:
        request = replace(observe, groups=observe.groups.for_call(q.shape[0], k.shape[2], q.device))
    out, row_max, row_sum, *values = run(q, k, v, scores, kernel, request, real_queries)
    measured = {}
    for name, value in zip(ops.observable_names(observe), values, strict=True):
        kept = observe.differentiable and name in DIFFERENTIABLE
        measured[name] = value if kept else value.detach()
    saved_calls: tuple[SavedCall, ...] = ()
    if observe.keep:
        # Detached: an observation must not keep the graph of the model alive.
        selected = observe_some_heads.select_heads(observe.heads, q.detach(), k.detach(), scores.detach())
        saved_calls = (SavedCall(*selected),)
    observation = Observation(
        observe=replace(observe, queries=None),
        n=q.shape[2],
        m=k.shape[2],
        lse=(row_max + row_sum.log()).detach().to(result_dtype(q.dtype)),
        **measured,
        saved_calls=saved_calls,
    )
    return out, observation


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the same arguments, computed by ``regard.attention``.

    A bool ``attn_mask`` means True = may attend; a floating-point one is added to the scores. ``is_causal`` is torch's
    alignment: query 0 sees key 0 alone. Heads broadcast as in torch; grouped heads need ``enable_gqa``. A query that
    may attend to nothing gives 0.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 1, 3, 2])
    """
    check_tensor("query", query)
    check_tensor("key", key)
    check_tensor("value", value)
    if attn_mask is not None:
        check_tensor("attn_mask", attn_mask)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        sizes = f"{query.ndim}, {key.ndim} and {value.ndim}"
        raise RegardError(f"query, key and value must have at least 2 dimensions, got {sizes}")
    if scale is not None:
        scale = check_number("scale", scale)

    # Without a head dimension there is one head, and it is removed again at the end.
    has_heads = max(query.ndim, key.ndim, value.ndim) > 2
    query = _with_heads(query)
    key = _with_heads(key)
    value = _with_heads(value)
    if not enable_gqa:
        query, key, value = _broadcast_heads(query, key, value)
    query, options = torch_options(query, attn_mask, is_causal, scale)
    out = attention(query, key, value, **options, dropout=dropout_p)
    return out if has_heads else out.squeeze(0)


def torch_options(
    query: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> tuple[Tensor, dict[str, Any]]:
    """Convert torch's arguments: return the query, and ``mask``, ``bias`` and ``scale`` of ``attention``."""
    if attn_mask is not None and is_causal:
        raise RegardError(
            "attn_mask and is_causal=True were both given; torch takes one of them (combine masks in regard.attention)"
        )
    options: dict[str, Any] = {"mask": None, "bias": None, "scale": scale}
    if is_causal:
        options["mask"] = Causal(offset=0)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        options["mask"] = attn_mask
    else:
        options["bias"] = attn_mask
    # torch allows a negative scale: −scale·q·k is scale·(−q)·k.
    if scale is not None and scale < 0:
        query = -query
        options["scale"] = -scale
    return query, options


def _with_heads(x: Tensor) -> Tensor:
    """``x [*batch, H, n, d]``, where ``[n, d]`` is one head."""
    return x if x.ndim > 2 else x.unsqueeze(0)


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Expand a single head to the number of heads of the others. Keys and values are expanded together."""
    counts = [query.shape[-3], key.shape[-3], value.shape[-3]]
    if len({count for count in counts if count != 1}) > 1:
        raise RegardError(f"query, key and value have {counts} heads; grouped heads need enable_gqa=True")
    heads = torch.broadcast_shapes(query.shape[-3:-2], key.shape[-3:-2], value.shape[-3:-2])
    kv_heads = torch.broadcast_shapes(key.shape[-3:-2], value.shape[-3:-2])
    query = query.expand(*query.shape[:-3], *heads, *query.shape[-2:])
    key = key.expand(*key.shape[:-3], *kv_heads, *key.shape[-2:])
    value = value.expand(*value.shape[:-3], *kv_heads, *value.shape[-2:])
    return query, key, value


def refuse_transforms() -> None:
    """Raise under the transforms of ``torch.func`` and under forward-mode differentiation."""
    if forward_ad._current_level >= 0:
        raise RuntimeError("regard.attention has no forward-mode derivative (jvp, dual tensors); use reverse mode")
    # torch has no public way to ask which transform is active.
    level = torch._C._functorch.peek_interpreter_stack()
    if level is None:
        return
    if level.key() == torch._C._functorch.TransformType.Grad:
        raise RuntimeError(
            "regard.attention does not run under torch.func.grad or vjp; use torch.autograd.grad or backward()"
        )
    if level.key() == torch._C._functorch.TransformType.Vmap:
        raise RuntimeError("regard.attention does not run under vmap; make the batch a dimension of q, k and v")


def apply_autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under ``torch.autocast``, q, k and v get autocast's dtype unless one is float64, as in torch's own attention."""
    device = q.device.type if isinstance(q, Tensor) else "cpu"
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return q, k, v
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)):
        return q, k, v
    dtype = torch.get_autocast_dtype(device)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check_options(
    shape: Shape, scale: float | None, softcap: float | None, sinks: Tensor | None, dropout: float
) -> tuple[float, float, float]:
    """Check scale, softcap, dropout and sinks. Returns scale (None: 1/√d), softcap (None: 0) and dropout as floats."""
    if scale is None:
        scale = 1 / math.sqrt(shape.d)
    else:
        scale = check_number("scale", scale, least=0)
        if scale == math.inf and (softcap is not None or sinks is not None):
            option = "softcap" if softcap is not None else "sinks"
            raise RegardError(f"scale=inf (hard attention) has no meaning with {option}; leave {option} out")
    if softcap is None:
        softcap = 0.0
    else:
        softcap = check_number("softcap", softcap)
        if not 0 < softcap < math.inf:
            raise RegardError(f"softcap must be a finite number > 0, got {softcap}; None disables it")
    dropout = check_probability("dropout", dropout)
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            raise RegardTypeError(f"sinks must be a float tensor [{shape.heads}], one logit per head")
        if tuple(sinks.shape) != (shape.heads,):
            raise RegardError(f"sinks has shape {list(sinks.shape)}; it must be [{shape.heads}], one logit per head")
    return scale, softcap, dropout


def _lower_mask(
    mask: Mask | Tensor | None, shape: Shape, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Convert a mask to ``lo``, ``hi`` and ``mask`` of ``Scores``."""
    if mask is None:
        return None, None, None
    if isinstance(mask, Tensor):
        mask = Dense(mask)
    if not isinstance(mask, Mask):
        raise RegardTypeError(f"mask must be a mask or a bool tensor (True = may attend), got {type(mask).__name__}")
    row_mask = mask.lower(shape.n, shape.m, device)
    lo, hi = row_bounds(row_mask, shape)
    if row_mask.dense is None:
        return lo, hi, None
    return lo, hi, flatten_scores_like(row_mask.dense, shape, "mask")


def _lower_bias(bias: Bias | Tensor | None, q: Tensor, shape: Shape) -> tuple[Tensor | None, tuple[RelativeTerm, ...]]:
    """Convert a bias to ``bias`` and ``terms`` of ``Scores``."""
    if bias is None:
        return None, ()
    if isinstance(bias, Bias):
        terms = bias.terms(q, shape.m)
        for term in terms:
            if not all(map(broadcasts, term.table.shape[:3], q.shape[:3])):
                made_for = f"{type(bias).__name__} is made for [B, H, n] = {list(term.table.shape[:3])}"
                raise RegardError(f"bias {made_for}, but q has {list(q.shape[:3])}")
        return None, terms
    if not isinstance(bias, Tensor):
        raise RegardTypeError(f"bias must be a bias value or a float tensor, got {type(bias).__name__}")
    if bias.dtype == torch.bool:
        raise RegardTypeError("bias must be a float tensor; pass a bool tensor as mask= (True = may attend)")
    if not bias.is_floating_point():
        raise RegardTypeError(f"bias must be a float tensor, got {bias.dtype}")
    return flatten_scores_like(move_to(bias, q.device), shape, "bias"), ()


def find_real_queries(
    observe: Observe, mask: Mask | Tensor | None, shape: Shape, device: torch.device
) -> Tensor | None:
    """Return the real query rows, bool ``[B or 1, n]``: from ``observe``, else from a padding mask, else None."""
    real = observe.real_queries(shape.n)
    if real is None and isinstance(mask, Mask):
        real = mask.real_queries(shape.n, shape.m)
    if real is None:
        return None
    # ``real`` may belong to one entry, to the flattened batch, or to dimensions that broadcast to the batch.
    lead = real.shape[:-1]
    real = real.to(device)
    if math.prod(lead) == 1 or tuple(lead) == (shape.batch_size,):
        return real.reshape(math.prod(lead), shape.n)
    try:
        return real.expand(*shape.batch, shape.n).reshape(shape.batch_size, shape.n)
    except RuntimeError:
        raise RegardError(f"queries are for a batch of {list(lead)}, but q, k and v have {list(shape.batch)}") from None
