"""Multi-head attention with the theory's five free dimensions: N_h, D_in, D_hid, D_o and D_out."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.kernels.choose import BACKENDS
from regard.kernels.layers import turn
from regard.masks import Dense, Mask
from regard.nn.cache import KeyValueCache
from regard.nn.convert import attention_from_torch, attention_to_torch
from regard.nn.linear import Linear, several
from regard.nn.norm import NormFactory, make_norm
from regard.observables import Observation, Observe
from regard.positions import AddedToInput, Rotary
from regard.positions.common import check_bias_fits, check_dtype, check_mask, described, probability
from regard.scores import Bias
from regard.shapes import check_tensor, integer, number

__all__ = ["MultiHeadAttention", "Position"]

Position = Rotary | Bias


# What computes attention in place of the operator in layers that somebody looks on (regard.watching). It is not an
# attribute of the layer, so that copies of a layer are not looked on.
visits: weakref.WeakKeyDictionary[nn.Module, Callable[..., Any]] = weakref.WeakKeyDictionary()


class MultiHeadAttention(nn.Module):
    """``MHA(X) = [A¹V¹ … A^{N_h}V^{N_h}] W_out + b_out``,  ``A^h = softmax(β Q^h K^hᵀ + bias)`` over the allowed keys

        Q^h = X W_q^h      X [n, D_in]         W_q^h [D_in, D_hid]     N_h = heads, D_hid = d_key
        K^h = C W_k^h      C [m, D_context]    W_k^h [D_context, D_hid]
        V^h = C W_v^h                          W_v^h [D_context, D_o]  D_o = d_value
        W_out [N_h·D_o, D_out]      b_out [D_out]      β = scale, 1/√D_hid by default

    C is X itself (self-attention) or ``context`` (cross-attention). The heads' matrices lie side by side in ``q_proj``,
    ``k_proj`` and ``v_proj``: head h has rows ``h·D_hid … (h+1)·D_hid − 1`` of the weight. Parameters, with D_context =
    D_in: ``N_h·D_in·(2·D_hid + D_o) + N_h·D_o·D_out + D_out``.

    - ``d_key`` and ``d_value`` are D_in/N_h, ``d_out`` and ``d_context`` D_in, unless given.
    - ``kv_heads``: key and value heads, each shared by ``heads/kv_heads`` query heads.
    - ``qkv_bias``: biases b_q, b_k, b_v (initially 0); ``out_bias``: b_out.
    - ``position``: a ``Rotary``, applied to q and k, or a bias on scores (``ALiBi`` …). What is added to the *input*
      (``Sinusoidal``, ``Learned``) goes before the first layer, not in here. ``scale`` does not touch the scale that
      ``RelativeKeys`` and ``Grid`` have of their own: give it to both where they should agree.
    - ``sinks``: one learned extra logit a head in the softmax's denominator (initially 0).
    - ``mask``: a mask value for every call, beside the one a call may give, e.g. ``Window(4096)``.
    - ``qk_norm`` makes a norm from its width, e.g. ``RMSNorm``: each head's queries and keys are normed, with one norm
      for all queries and one for all keys, before a ``Rotary`` turns them.
    - ``dropout``: on the weights, in training only.

    >>> layer = MultiHeadAttention(512, heads=8, out_bias=False)
    >>> sum(p.numel() for p in layer.parameters())
    1048576
    >>> layer(torch.zeros(2, 5, 512)).shape
    torch.Size([2, 5, 512])
    """

    def __init__(
        self,
        d_in: int,
        heads: int,
        *,
        d_key: int | None = None,
        d_value: int | None = None,
        d_out: int | None = None,
        d_context: int | None = None,
        kv_heads: int | None = None,
        qkv_bias: bool = False,
        out_bias: bool = True,
        position: Position | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        backend: str = "auto",
        mask: Mask | None = None,
        qk_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        self.d_in, self.heads = integer("d_in", d_in, least=1), integer("heads", heads, least=1)
        if (d_key is None or d_value is None) and d_in % heads:
            raise ValueError(
                f"heads={heads} does not divide d_in={d_in}; give d_key and d_value, or heads that divide it"
            )
        self.d_key = integer("d_key", d_in // heads if d_key is None else d_key, least=1)
        self.d_value = integer("d_value", d_in // heads if d_value is None else d_value, least=1)
        self.d_out = integer("d_out", d_in if d_out is None else d_out, least=1)
        self.d_context = integer("d_context", d_in if d_context is None else d_context, least=1)
        self.kv_heads = integer("kv_heads", heads if kv_heads is None else kv_heads, least=1)
        if heads % self.kv_heads:
            raise ValueError(
                f"kv_heads={kv_heads} does not divide heads={heads}; each key head serves as many query heads"
            )
        self.position = _checked_position(position, self.heads, self.d_key)
        self.scale = None if scale is None else number("scale", scale, least=0.0)
        self.softcap = None if softcap is None else number("softcap", softcap)
        self.dropout, self.backend = probability("dropout", dropout), backend
        if mask is not None and not isinstance(mask, Mask):
            raise TypeError(f"mask must be a mask value, e.g. Window(4096), got {described(mask)}")
        self.mask = mask
        self._check_options(sinks)
        self.q_proj = Linear(self.d_in, self.heads * self.d_key, bias=qkv_bias)
        self.k_proj = Linear(self.d_context, self.kv_heads * self.d_key, bias=qkv_bias)
        self.v_proj = Linear(self.d_context, self.kv_heads * self.d_value, bias=qkv_bias)
        self.out_proj = Linear(self.heads * self.d_value, self.d_out, bias=out_bias)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if sinks else None
        self.q_norm, self.k_norm = (None if qk_norm is None else make_norm(qk_norm, self.d_key) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot's uniform law for the four matrices; biases and sinks 0."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: KeyValueCache | None = None,
        scale: float | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observation]:
        """``x [*B, n, D_in]``, perhaps ``context [*B, m, D_context]`` → ``[*B, n, D_out]``; with ``observe`` a pair

        - ``observe``: the result is then ``(out, Observation)``.
        - ``mask``: a mask value or bool broadcastable to ``[*B, N_h, n, m]``, True = may attend.
        - ``at``: the positions of x's rows for a ``Rotary``, whole numbers ``[n]`` or ``[*B, n]``, where they do not
          simply count on: left padding, packed documents. Biases on scores go by distances between rows and take none.
        - ``scale`` replaces the layer's for this call.
        - ``cache``: in self-attention x follows what the cache holds, and m counts both. In cross-attention the
          context's keys and values are computed at the first call and read from the cache after; a later context of
          the same shape is not looked at, so ``reset`` the cache before another one. A call that raises leaves the
          cache as it was.

        >>> layer, x = MultiHeadAttention(6, heads=3), torch.randn(2, 5, 6)
        >>> out, seen = layer(x, mask=Dense(torch.ones(5, 5).tril().bool()), observe=Observe())
        >>> out.shape, seen.entropy.shape, seen.mean("visible")
        (torch.Size([2, 5, 6]), torch.Size([2, 3, 5]), tensor([3., 3., 3.], dtype=torch.float64))
        """
        self._check(x, context)
        check_mask("mask", mask)
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise TypeError(f"cache must be a KeyValueCache, got {described(cache)}")
        if at is not None and not isinstance(self.position, Rotary):
            raise ValueError("at says where a Rotary turns q and k, but this layer has no Rotary; leave it out")
        if observe is not None and not isinstance(observe, Observe):
            raise TypeError(f"observe must be a regard.Observe, got {described(observe)}")
        with nullcontext() if cache is None else cache.all_or_nothing():
            q_BHND, k_BGMD, v_BGME = self._project(x, context, cache, at)
            if observe is not None:
                observe, k_BGMD = self._ready_to_observe(observe, x, context, k_BGMD, cache)
            call: dict[str, Any] = {
                "mask": self._with_own_mask(mask),
                "bias": self.position if isinstance(self.position, Bias) else None,
                "scale": self.scale if scale is None else scale,
                "softcap": self.softcap,
                "sinks": self.sinks,
                "dropout": self.dropout if self.training else 0.0,
                "observe": observe,
                "backend": self.backend,
            }
            visit = visits.get(self) if visits else None
            if visit is not None:
                result = visit(self, q_BHND, k_BGMD, v_BGME, cross=context is not None, **call)
            else:
                result = attention(q_BHND, k_BGMD, v_BGME, **call)
            if isinstance(result, Tensor):
                return self.out_proj(_join(result))
            heads_BHNE, observation = result
            return self.out_proj(_join(heads_BHNE)), observation

    def _project(
        self, x: Tensor, context: Tensor | None, cache: KeyValueCache | None, at: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v; k and v of all keys, those in the cache included."""
        start = 0 if cache is None or context is not None or at is not None else len(cache)
        if context is None:
            q, k, v = several(x, self.q_proj, self.k_proj, self.v_proj)
        else:
            q = self.q_proj(x)
            if cache is not None and cache.fixed:
                return self._ready(q, self.heads, self.q_norm, at, start), *self._held(cache, context)
            k, v = several(context, self.k_proj, self.v_proj)
        q_BHND = self._ready(q, self.heads, self.q_norm, at, start)
        k_BGMD, v_BGME = self._ready(k, self.kv_heads, self.k_norm, at, start), _split(v, self.kv_heads)
        if cache is None:
            return q_BHND, k_BGMD, v_BGME
        return q_BHND, *(cache.append(k_BGMD, v_BGME) if context is None else cache.fix(k_BGMD, v_BGME))

    def _ready(self, y: Tensor, heads: int, norm: nn.Module | None, at: Tensor | None, start: int) -> Tensor:
        """``[*B, n, heads·D_hid] → [*B, heads, n, D_hid]``, normed and turned where this layer does so."""
        x = _split(y, heads)
        x = x if norm is None else norm(x)
        return turn(self.position, x, at, start) if isinstance(self.position, Rotary) else x

    @staticmethod
    def _held(cache: KeyValueCache, context: Tensor) -> tuple[Tensor, Tensor]:
        """A context's keys and values from the cache; one of another shape is refused."""
        k_BGMD, v_BGME = cache.get()
        held = [*k_BGMD.shape[:-3], k_BGMD.shape[-2]]
        if held != list(context.shape[:-1]):
            raise ValueError(
                f"context has shape {list(context.shape)}, but the cache holds keys of another, {held}; reset it"
            )
        return k_BGMD, v_BGME

    def _with_own_mask(self, mask: Mask | Tensor | None) -> Mask | Tensor | None:
        if self.mask is None:
            return mask
        return self.mask if mask is None else self.mask & (Dense(mask) if isinstance(mask, Tensor) else mask)

    def _ready_to_observe(
        self, observe: Observe, x: Tensor, context: Tensor | None, k: Tensor, cache: KeyValueCache | None
    ) -> tuple[Observe, Tensor]:
        if context is None:
            # What is kept must outlive the cache's next step, which writes into the memory that k is a view of.
            return observe, k if cache is None or not observe.keep else k.clone()
        if observe.queries is None and x.shape[-2] == k.shape[-2]:
            # A context as long as x by chance: its Padding must not be read as saying which rows of x are real.
            observe = replace(observe, queries=(x.shape[-2],))
        return observe, k

    def _check_options(self, sinks: object) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be a finite number > 0, got {self.softcap}; None is no cap")
        if not isinstance(sinks, bool):
            raise TypeError(f"sinks must be True (one learned logit a head) or False, got {described(sinks)}")
        if self.scale == math.inf and (self.softcap is not None or sinks):
            what = "softcap" if self.softcap is not None else "sinks"
            raise ValueError(f"scale=inf (hard attention) has no meaning with {what}; leave {what} out")
        if self.backend not in BACKENDS:
            raise ValueError(f"backend is {self.backend!r}; known are {', '.join(map(repr, BACKENDS))}")

    def _check(self, x: Tensor, context: Tensor | None) -> None:
        check_tensor("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d_in:
            raise ValueError(f"x has shape {list(x.shape)}; this layer takes [*batch, n, {self.d_in}]")
        check_dtype("x", x, self.q_proj)
        if context is None:
            if self.d_context != self.d_in:
                raise ValueError(
                    f"this layer reads keys from a context, none was given: it takes [*batch, m, {self.d_context}]"
                )
            return
        check_tensor("context", context)
        if context.ndim < 2 or context.shape[-1] != self.d_context:
            raise ValueError(f"context has shape {list(context.shape)}; this layer takes [*batch, m, {self.d_context}]")
        check_dtype("context", context, self.k_proj)
        if isinstance(self.position, Rotary):
            raise ValueError(
                "Rotary counts positions of one sequence; x and context are two: cross-attention takes no Rotary"
            )

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same function with the weights of ``nn.MultiheadAttention`` (copies), in its dtype, on its device.

        Ours is always batch first: give ``[B, n, D]`` whatever ``layer.batch_first`` says. Its masks mean the opposite:
        ``regard.masks.from_torch`` converts them. ``add_bias_kv``, ``add_zero_attn`` and ``kdim ≠ vdim`` are refused.

        >>> theirs = nn.MultiheadAttention(6, 3, batch_first=True).double()
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0])
        True
        """
        return attention_from_torch(cls, layer)

    def to_torch(self) -> nn.MultiheadAttention:
        """``nn.MultiheadAttention(batch_first=True)`` with copies of these weights; what it cannot hold is refused.

        It has biases on all projections or on none: where this layer has only some, the others are zeros there.

        >>> ours, x = MultiHeadAttention(6, heads=3).double(), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> theirs = ours.to_torch()
        >>> torch.allclose(theirs(x, x, x)[0], ours(x))
        True
        """
        return attention_to_torch(self)

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in ("d_in", "heads", "d_key", "d_value", "d_out")]
        usual = {"d_context": self.d_in, "kv_heads": self.heads, "scale": None, "softcap": None, "dropout": 0.0}
        shown += [f"{name}={getattr(self, name)}" for name, value in usual.items() if getattr(self, name) != value]
        shown += ["sinks=True"] if self.sinks is not None else []
        shown += [f"backend={self.backend!r}"] if self.backend != "auto" else []
        shown += [f"mask={self.mask}"] if self.mask is not None else []
        if self.position is not None and not isinstance(self.position, nn.Module):
            shown.append(f"position={self.position}")
        return ", ".join(shown)


def _split(y: Tensor, heads: int) -> Tensor:
    """``[*B, n, H·D] → [*B, H, n, D]``"""
    return y.view(*y.shape[:-1], heads, y.shape[-1] // heads).transpose(-3, -2)


def _join(heads_BHNE: Tensor) -> Tensor:
    """``[*B, H, n, E] → [*B, n, H·E]``"""
    return heads_BHNE.transpose(-3, -2).flatten(-2)


def _checked_position(position: Position | None, heads: int, d_key: int) -> Position | None:
    if isinstance(position, AddedToInput):
        raise TypeError(
            f"{type(position).__name__} is added to the input: call it before the first layer, or give it to a stack"
        )
    if position is not None and not isinstance(position, Rotary | Bias):
        raise TypeError(
            f"position must be a Rotary or a bias on scores (ALiBi, T5Buckets …), got {described(position)}"
        )
    if isinstance(position, Bias):
        check_bias_fits(position, heads, d_key)
    if isinstance(position, Rotary) and position.d != d_key:
        raise ValueError(
            f"Rotary({position.d}) turns keys of width {position.d}, but d_key={d_key}; use Rotary({d_key})"
        )
    return position
