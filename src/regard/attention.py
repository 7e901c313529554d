"""The operator: attention(q, k, v) = softmax(scale·q kᵀ → softcap → + bias → mask) v, exact in every corner."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard.kept import KeptCall
from regard.kernels import ops, same_weights, some_heads
from regard.kernels.choose import choose
from regard.kernels.tiles import result_dtype, working_dtype
from regard.masks import Causal, Dense, Mask
from regard.observables import Observation, Observe
from regard.scores import Bias, RelativeTerm, Scores, row_bounds
from regard.shapes import (
    Shape,
    attention_shape,
    broadcasts,
    check_tensor,
    flatten_batch,
    flatten_scores_like,
    number,
    offset_of,
    tracing,
)

__all__ = ["attention", "scaled_dot_product_attention"]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    observe: None = ...,
    backend: str = ...,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    observe: Observe,
    backend: str = ...,
) -> tuple[Tensor, Observation]: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    sinks: Tensor | None = ...,
    dropout: float = ...,
    observe: Observe | None,
    backend: str = ...,
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
    """out_i = Σ_j A_ij v_j,   A_ij = exp(s_ij − lse_i),   s = softcap(scale·q_i·k_j) + bias_ij, −inf where masked.

    ``q [*batch, H, n, d]``, ``k [*batch, G, m, d]``, ``v [*batch, G, m, e]`` → ``[*batch, H, n, e]`` in q's dtype.
    G divides H: heads h·H/G … share key head h, which is never repeated in memory. Batch dimensions broadcast.
    float64, float32, bfloat16, float16; sums are kept in float32 at least. Memory grows with n + m, never n·m.

    Parameters
    ----------
    mask: a mask value, or bool broadcastable to ``[*batch, H, n, m]``; **True = may attend**.
    bias: a bias value, or float broadcastable to ``[*batch, H, n, m]``; −inf hides a key. Gradients reach it.
    scale: None is 1/√d. Any number ≥ 0 is the inverse temperature. 0 leaves the bias alone (the uniform mean without
        one; q·k is not looked at). ``math.inf`` is the exact limit of softmax(β·q·k + bias): only the visible keys
        with the largest q·k count, ties share by exp(bias), q and k get gradient 0, lse is over the tied keys' biases;
        with a softcap or sinks it is refused.
    softcap: c > 0 turns x = scale·q·k into c·tanh(x/c), before bias and mask.
    sinks: ``[H]``, one extra logit a head that takes part in the denominator only.
    dropout: the share of weights set to 0; the others are divided by 1 − dropout. Drawn from torch's generator.
    observe: what to measure on the way; the result is then ``(out, Observation)``.
    backend: ``"native"``, ``"reference"`` or ``"auto"``. What a backend cannot honour it refuses by name.

    Corners: a row that may attend to nothing gives 0 and sends no gradient. A hidden key contributes nothing even if
    its k or v is NaN or inf; a visible NaN reaches the rows that see it and no others. n = 0 and m = 0 are ordinary.
    There is no second derivative and no vmap: both are refused.

    >>> q = torch.eye(2).reshape(1, 2, 2)
    >>> attention(q, q, q, mask=Causal(), scale=math.inf)
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    q, k, v = autocast(q, k, v)
    if not tracing():
        refuse_transforms()
    shape = attention_shape(q, k, v)
    chosen = choose(backend, q)
    beta, cap, drop = numbers(shape, scale, softcap, sinks, dropout)
    q4, k4, v4 = flatten_batch(q, shape.batch), flatten_batch(k, shape.batch), flatten_batch(v, shape.batch)
    lo, hi, see = _lower_mask(mask, shape, q.device)
    # The reference computes in float64 on a CPU, and so do then the tables that a bias makes of q.
    added, terms = _lower_bias(bias, q4 if chosen == "native" else q4.to(working_dtype(q4)), shape)
    seed = torch.randint(2**63 - 1, (), dtype=torch.int64, device=q.device) if drop > 0 else None
    sinks = None if sinks is None else sinks.to(q.device)
    scores = Scores(beta, cap, lo, hi, see, added, terms, sinks, drop, seed)
    if observe is None:
        run = ops.run if tracing() else same_weights.run
        out = run(q4, k4, v4, scores, chosen)
        return out if len(shape.batch) == 1 else out.reshape(*shape.batch, shape.heads, shape.n, shape.e)
    if not isinstance(observe, Observe):
        raise TypeError(f"observe must be a regard.Observe, got {type(observe).__name__}")
    real = real_queries(observe, mask, shape, q.device)
    spec = ops.encode(observe, offset_of(shape.n, shape.m, observe.offset))
    if observe.heads is None:
        out, high, total, *values = ops.run_observed(q4, k4, v4, scores, chosen, real, spec)
    else:
        out, high, total, *values = some_heads.run(q4, k4, v4, scores, chosen, real, spec, observe)
    kept = (KeptCall(*some_heads.of(observe.heads, q4.detach(), k4.detach(), scores.detach())),) if observe.keep else ()
    seen = Observation(
        observe=replace(observe, queries=None),
        n=shape.n,
        m=shape.m,
        lse=(high + total.log()).detach().to(result_dtype(q.dtype)),
        **dict(zip(ops.measured_names(observe), (x.detach() for x in values), strict=True)),
        kept=kept,
    )
    return out.reshape(*shape.batch, shape.heads, shape.n, shape.e), seen


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
    """``torch.nn.functional.scaled_dot_product_attention``, argument for argument, by ``regard.attention``.

    A bool ``attn_mask`` means True = may attend, a float one is added. ``is_causal`` is torch's: top-left, query 0 sees
    key 0 alone. Heads broadcast as torch's do; grouped heads need ``enable_gqa``. A fully masked row is 0.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).shape
    torch.Size([1, 1, 3, 2])
    """
    if attn_mask is not None and is_causal:
        raise ValueError(
            "attn_mask and is_causal=True were both given; torch takes one of them (combine masks in regard.attention)"
        )
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", attn_mask)):
        if x is not None or name != "attn_mask":
            check_tensor(name, x)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        raise ValueError(f"query, key and value have {query.ndim}, {key.ndim} and {value.ndim} dimensions; 2 at least")
    scale = None if scale is None else number("scale", scale)
    lead = max(x.ndim for x in (query, key, value)) - 2
    query, key, value = (x if x.ndim >= 3 else x.unsqueeze(0) for x in (query, key, value))
    if not enable_gqa:
        counts = [x.shape[-3] for x in (query, key, value)]
        if len({c for c in counts if c != 1}) > 1:
            raise ValueError(f"query, key and value have {counts} heads; grouped heads need enable_gqa=True")
        heads = torch.broadcast_shapes(query.shape[-3:-2], key.shape[-3:-2], value.shape[-3:-2])
        query = query.expand(*query.shape[:-3], *heads, *query.shape[-2:])
        both = torch.broadcast_shapes(key.shape[-3:-2], value.shape[-3:-2])
        key, value = (x.expand(*x.shape[:-3], *both, *x.shape[-2:]) for x in (key, value))
    mask = (
        Causal(offset=0)
        if is_causal
        else attn_mask
        if attn_mask is not None and attn_mask.dtype == torch.bool
        else None
    )
    bias = attn_mask if attn_mask is not None and attn_mask.dtype != torch.bool else None
    if scale is not None and scale < 0:  # torch allows it: −scale·q·k is scale·(−q)·k
        query, scale = -query, -scale
    out = attention(query, key, value, mask=mask, bias=bias, scale=scale, dropout=dropout_p)
    return out if lead else out.squeeze(0)


def refuse_transforms() -> None:
    if forward_ad._current_level >= 0:
        raise RuntimeError("regard.attention has no forward-mode derivative (jvp, dual tensors); use reverse mode")
    level = torch._C._functorch.peek_interpreter_stack()
    if level is not None and level.key() == torch._C._functorch.TransformType.Grad:
        raise RuntimeError(
            "regard.attention does not run under torch.func.grad and vjp; use torch.autograd.grad or backward()"
        )
    if level is not None and level.key() == torch._C._functorch.TransformType.Vmap:
        raise RuntimeError(
            "regard.attention does not run under vmap; give the batch as leading dimensions of q, k and v instead"
        )


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under ``torch.autocast``, what is not float64 takes autocast's dtype, as in torch's own attention."""
    kind = q.device.type if isinstance(q, Tensor) else "cpu"
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        if all(isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64 for x in (q, k, v)):
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def numbers(
    shape: Shape, scale: float | None, softcap: float | None, sinks: Tensor | None, dropout: float
) -> tuple[float, float, float]:
    """Scale, softcap (0 for none) and dropout, checked against each other and the sinks."""
    beta = 1 / math.sqrt(shape.d) if scale is None else number("scale", scale, least=0)
    cap = 0.0
    if softcap is not None:
        cap = number("softcap", softcap)
        if not 0 < cap < math.inf:
            raise ValueError(f"softcap must be a finite number > 0, got {softcap}; None is no cap")
    drop = number("dropout", dropout, least=0)
    if drop > 1:
        raise ValueError(f"dropout must be between 0 and 1, got {dropout}")
    if sinks is not None:
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point():
            raise TypeError(f"sinks must be a float tensor [{shape.heads}], one logit a head")
        if tuple(sinks.shape) != (shape.heads,):
            raise ValueError(f"sinks has shape {list(sinks.shape)}; it must be [{shape.heads}], one logit a head")
    if scale is not None and beta == math.inf and (softcap is not None or sinks is not None):
        what = "softcap" if softcap is not None else "sinks"
        raise ValueError(f"scale=inf (hard attention) has no meaning with {what}; leave {what} out")
    return beta, cap, drop


def _lower_mask(
    mask: Mask | Tensor | None, shape: Shape, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``lo``, ``hi`` and the dense mask of ``Scores``."""
    if mask is None:
        return None, None, None
    if isinstance(mask, Tensor):
        mask = Dense(mask)
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a mask value or a bool tensor with True = may attend, got {type(mask).__name__}")
    row_mask = mask.lower(shape.n, shape.m, device)
    lo, hi = row_bounds(row_mask, shape)
    dense = row_mask.dense
    return lo, hi, None if dense is None else flatten_scores_like(dense, shape, "mask")


def _lower_bias(bias: Bias | Tensor | None, q: Tensor, shape: Shape) -> tuple[Tensor | None, tuple[RelativeTerm, ...]]:
    """The dense bias and the relative terms of ``Scores``."""
    if bias is None:
        return None, ()
    if isinstance(bias, Bias):
        terms = bias.terms(q, shape.m)
        for term in terms:
            if not all(map(broadcasts, term.table.shape[:3], q.shape[:3])):
                raise ValueError(
                    f"bias {type(bias).__name__} is made for batch, heads and queries {list(term.table.shape[:3])}, "
                    f"but q has {list(q.shape[:3])}"
                )
        return None, terms
    if not isinstance(bias, Tensor):
        raise TypeError(f"bias must be a bias value or a float tensor, got {type(bias).__name__}")
    if not bias.is_floating_point():
        hint = "; a bool tensor is a mask: pass it as mask= (True = may attend)" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias must be a float tensor, got {bias.dtype}{hint}")
    return flatten_scores_like(bias.to(q.device), shape, "bias"), ()


def real_queries(observe: Observe, mask: Mask | Tensor | None, shape: Shape, device: torch.device) -> Tensor | None:
    real = observe.real_queries(shape.n)
    if real is None and isinstance(mask, Mask):
        real = mask.real_queries(shape.n, shape.m)
    if real is None:
        return None
    lead, real = real.shape[:-1], real.to(device)
    if math.prod(lead) == 1 or tuple(lead) == (shape.batches,):
        return real.reshape(math.prod(lead), shape.n)
    try:
        return real.expand(*shape.batch, shape.n).reshape(shape.batches, shape.n)
    except RuntimeError:
        raise ValueError(
            f"queries are named for a batch of {list(lead)}, but q, k and v have {list(shape.batch)}"
        ) from None
