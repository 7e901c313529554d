"""Multi-head attention with five free dimensions: N_h, D_in, D_hid, D_o and D_out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard import _hooks as hooks
from regard._checks import check_dtype, check_integer, check_number, check_probability, check_tensor, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._lowered_scores import Bias, check_bias_fits
from regard._observables import Observation, Observe
from regard._operator import attention
from regard.kernels.choose_backend import BACKENDS
from regard.kernels.linear_norm_rope import apply_rope
from regard.masks import Dense, Mask
from regard.masks._mask import check_mask
from regard.nn._cache import KeyValueCache, rollback_on_error
from regard.nn._linear import Linear, apply_linears
from regard.nn._norm import NormFactory, make_norm
from regard.nn._torch_weights import attention_from_torch, attention_to_torch
from regard.positions import AddedToInput, Rotary

Position = Rotary | Bias


class MultiHeadAttention(nn.Module):
    """``MHA(X) = [A¹V¹ … A^{N_h}V^{N_h}] W_out + b_out``,  ``A^h = softmax(β Q^h K^hᵀ + bias)`` over the allowed keys

        Q^h = X W_q^h      X [n, D_in]         W_q^h [D_in, D_hid]     N_h = heads, D_hid = d_key
        K^h = C W_k^h      C [m, D_context]    W_k^h [D_context, D_hid]
        V^h = C W_v^h                          W_v^h [D_context, D_o]  D_o = d_value
        W_out [N_h·D_o, D_out]      b_out [D_out]      β = scale

    C is X itself (self-attention) or ``context`` (cross-attention). The matrices of all heads lie side by side in
    ``q_proj``, ``k_proj`` and ``v_proj``: head h has rows ``h·D_hid … (h+1)·D_hid − 1`` of the weight. With D_context =
    D_in the layer has ``N_h·D_in·(2·D_hid + D_o) + N_h·D_o·D_out + D_out`` parameters.

    - ``d_in``, ``heads``: D_in and N_h.
    - ``d_key``, ``d_value``: D_hid and D_o (default D_in/N_h). ``d_out``, ``d_context``: D_out and D_context
      (default D_in).
    - ``kv_heads``: number of key and value heads, each shared by ``heads/kv_heads`` query heads (default ``heads``).
    - ``qkv_bias``: add biases b_q, b_k, b_v, initially 0 (default False). ``out_bias``: add b_out (default True).
    - ``position``: a ``Rotary``, applied to q and k, or a bias on scores (``ALiBi`` …). A scheme that is added to the
      *input* (``Sinusoidal``, ``Learned``) belongs before the first layer.
    - ``scale``: β (default 1/√D_hid). ``RelativeKeys`` and ``Grid`` have their own scale, which this does not change.
    - ``softcap``: c in ``c·tanh(s/c)``, applied to the scores (default None).
    - ``sinks``: add one learned logit per head to the softmax's denominator, initially 0 (default False).
    - ``dropout``: probability, applied to the weights in training only (default 0).
    - ``backend``: ``"auto"`` (default), ``"native"``, ``"triton"`` or ``"reference"``.
    - ``mask``: a mask value used at every call, together with the mask of the call, e.g. ``Window(4096)``.
    - ``qk_norm``: makes a norm from its width, e.g. ``RMSNorm``. One norm for the queries and one for the keys, shared
      by all heads, are applied before a ``Rotary``.

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
        self.d_in = check_integer("d_in", d_in, least=1)
        self.heads = check_integer("heads", heads, least=1)
        if (d_key is None or d_value is None) and d_in % heads:
            raise RegardError(
                f"heads={heads} does not divide d_in={d_in}; give d_key and d_value, or heads that divide it"
            )
        # The default sizes, replaced by the arguments that were given.
        sizes = {"d_key": d_in // heads, "d_value": d_in // heads, "d_out": d_in, "d_context": d_in, "kv_heads": heads}
        chosen = {"d_key": d_key, "d_value": d_value, "d_out": d_out, "d_context": d_context, "kv_heads": kv_heads}
        sizes |= {name: size for name, size in chosen.items() if size is not None}
        self.d_key = check_integer("d_key", sizes["d_key"], least=1)
        self.d_value = check_integer("d_value", sizes["d_value"], least=1)
        self.d_out = check_integer("d_out", sizes["d_out"], least=1)
        self.d_context = check_integer("d_context", sizes["d_context"], least=1)
        self.kv_heads = check_integer("kv_heads", sizes["kv_heads"], least=1)
        if heads % self.kv_heads:
            raise RegardError(f"kv_heads={kv_heads} does not divide heads={heads}; key heads are shared equally")

        _check_position(position, self.heads, self.d_key)
        self.position = position
        self.scale = check_number("scale", scale, least=0.0) if scale is not None else None  # None is 1/√d_key
        self.softcap = check_number("softcap", softcap) if softcap is not None else None
        self.dropout = check_probability("dropout", dropout)
        self.backend = backend
        if mask is not None and not isinstance(mask, Mask):
            raise RegardTypeError(f"mask must be a mask value, e.g. Window(4096), got {describe_value(mask)}")
        self.mask = mask
        self._check_options(sinks)

        self.q_proj = Linear(self.d_in, self.heads * self.d_key, bias=qkv_bias)  # W_q of all heads
        self.k_proj = Linear(self.d_context, self.kv_heads * self.d_key, bias=qkv_bias)  # W_k
        self.v_proj = Linear(self.d_context, self.kv_heads * self.d_value, bias=qkv_bias)  # W_v
        self.out_proj = Linear(self.heads * self.d_value, self.d_out, bias=out_bias)  # W_out
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if sinks else None
        self.q_norm = self.k_norm = None
        if qk_norm is not None:  # two norms: queries and keys learn their own weights
            self.q_norm = make_norm(qk_norm, self.d_key)
            self.k_norm = make_norm(qk_norm, self.d_key)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot-uniform values for the four matrices; zeros for biases and sinks."""
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
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        scale: float | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observation]:
        """``x [*B, n, D_in]``, and ``context [*B, m, D_context]`` in cross-attention → ``[*B, n, D_out]``

        - ``mask``: a mask value or a bool tensor broadcastable to ``[*B, N_h, n, m]``, True = may attend.
        - ``position_ids``: integers ``[n]`` or ``[*B, n]``, the positions of x's rows for a ``Rotary``. Needed if
          they are not consecutive from the cache's length on: left padding, packed documents. A layer without a
          ``Rotary`` refuses them.
        - ``cache``: in self-attention x follows the keys in the cache, and m counts both. In cross-attention the first
          call stores the context's keys and values, and later calls read them without looking at ``context``; call
          ``cache.reset()`` before you use another context. If a call raises, the cache is unchanged.
        - ``scale``: replaces the layer's scale for this call.
        - ``observe``: what to measure. The result is then ``(out, Observation)``.

        >>> layer, x = MultiHeadAttention(6, heads=3), torch.randn(2, 5, 6)
        >>> out, observation = layer(x, mask=Dense(torch.ones(5, 5).tril().bool()), observe=Observe())
        >>> out.shape, observation.entropy.shape, observation.mean("visible")
        (torch.Size([2, 5, 6]), torch.Size([2, 3, 5]), tensor([3., 3., 3.], dtype=torch.float64))
        """
        self._check_inputs(x, context)
        check_mask("mask", mask)
        if cache is not None and not isinstance(cache, KeyValueCache):
            raise RegardTypeError(f"cache must be a KeyValueCache, got {describe_value(cache)}")
        if position_ids is not None and not isinstance(self.position, Rotary):
            raise RegardError("position_ids are for a Rotary, but this layer has no Rotary; leave them out")
        if observe is not None and not isinstance(observe, Observe):
            raise RegardTypeError(f"observe must be a regard.Observe, got {describe_value(observe)}")

        with rollback_on_error(cache):
            q_BHND, k_BGMD, v_BGME = self._project(x, context, cache, position_ids)
            if observe is not None:
                if context is not None:
                    observe = _observe_all_queries(observe, x, k_BGMD)
                elif cache is not None and observe.keep:
                    # The next decode step writes into the memory that k is a view of; the kept keys must not change.
                    k_BGMD = k_BGMD.clone()
            call: dict[str, Any] = {
                "mask": self._combined_mask(mask),
                "bias": self.position if isinstance(self.position, Bias) else None,
                "scale": scale if scale is not None else self.scale,
                "softcap": self.softcap,
                "sinks": self.sinks,
                "dropout": self.dropout if self.training else 0.0,
                "observe": observe,
                "backend": self.backend,
            }
            # An observed layer is run by the registry, which calls its observers.
            observed_attention = hooks.observed.get(self) if hooks.observed else None
            observation = None
            if observed_attention is not None:
                cross = context is not None
                heads_BHNE, observation = observed_attention(self, q_BHND, k_BGMD, v_BGME, cross=cross, **call)
            elif observe is not None:
                heads_BHNE, observation = attention(q_BHND, k_BGMD, v_BGME, **call)
            else:
                heads_BHNE = attention(q_BHND, k_BGMD, v_BGME, **call)
            if observe is None:
                return self.out_proj(_join_heads(heads_BHNE))
            assert observation is not None
            return self.out_proj(_join_heads(heads_BHNE)), observation

    def _project(
        self, x: Tensor, context: Tensor | None, cache: KeyValueCache | None, position_ids: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, and k and v of all keys, including the cached ones."""
        if context is not None:
            return self._project_cross(x, context, cache)

        start = 0
        if cache is not None and position_ids is None:  # x follows the keys in the cache
            start = len(cache)
        q, k, v = apply_linears(x, self.q_proj, self.k_proj, self.v_proj)  # [*B, n, heads·width]
        q_BHND = self._norm_and_rotate(_split_heads(q, self.heads), self.q_norm, position_ids, start)
        k_BGMD = self._norm_and_rotate(_split_heads(k, self.kv_heads), self.k_norm, position_ids, start)
        v_BGME = _split_heads(v, self.kv_heads)
        if cache is not None:
            k_BGMD, v_BGME = cache.append(k_BGMD, v_BGME)
        return q_BHND, k_BGMD, v_BGME

    def _project_cross(self, x: Tensor, context: Tensor, cache: KeyValueCache | None) -> tuple[Tensor, Tensor, Tensor]:
        """q of x, and k and v of the context: from the cache if it has them, else computed and stored there."""
        # Nothing is rotated: a Rotary is refused in cross-attention.
        q_BHND = self._norm_and_rotate(_split_heads(self.q_proj(x), self.heads), self.q_norm, None, 0)
        if cache is not None and cache.frozen:  # the context was read at an earlier step
            k_BGMD, v_BGME = cache.get()
            cached_shape = [*k_BGMD.shape[:-3], k_BGMD.shape[-2]]  # [*B, m]
            if cached_shape != list(context.shape[:-1]):
                raise RegardError(
                    f"context has shape {list(context.shape)}, but the cache holds keys of another context, "
                    f"{cached_shape}; reset the cache"
                )
            return q_BHND, k_BGMD, v_BGME

        k, v = apply_linears(context, self.k_proj, self.v_proj)
        k_BGMD = self._norm_and_rotate(_split_heads(k, self.kv_heads), self.k_norm, None, 0)
        v_BGME = _split_heads(v, self.kv_heads)
        if cache is not None:
            cache.freeze(k_BGMD, v_BGME)
        return q_BHND, k_BGMD, v_BGME

    def _norm_and_rotate(
        self, x_BHND: Tensor, norm: nn.Module | None, position_ids: Tensor | None, start: int
    ) -> Tensor:
        if norm is not None:  # over the width of one head
            x_BHND = norm(x_BHND)
        if isinstance(self.position, Rotary):
            x_BHND = apply_rope(self.position, x_BHND, position_ids, start)
        return x_BHND

    def _combined_mask(self, mask: Mask | Tensor | None) -> Mask | Tensor | None:
        """Combine the mask of the call with the layer's own mask."""
        if self.mask is None:
            return mask
        if mask is None:
            return self.mask
        if isinstance(mask, Tensor):
            mask = Dense(mask)
        return self.mask & mask

    def _check_options(self, sinks: object) -> None:
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise RegardError(f"softcap must be a finite number > 0, got {self.softcap}; None means no cap")
        if not isinstance(sinks, bool):
            raise RegardTypeError(f"sinks must be True (one logit per head) or False, got {describe_value(sinks)}")
        # Hard attention has no denominator for sinks, and no scores for a softcap.
        for option, used in (("softcap", self.softcap is not None), ("sinks", sinks)):
            if used and self.scale == math.inf:
                raise RegardError(f"scale=inf (hard attention) has no meaning with {option}; leave {option} out")
        if self.backend not in BACKENDS:
            raise RegardError(f"backend is {self.backend!r}; known are {', '.join(map(repr, BACKENDS))}")

    def _check_inputs(self, x: Tensor, context: Tensor | None) -> None:
        check_tensor("x", x)
        if x.ndim < 2 or x.shape[-1] != self.d_in:
            raise RegardError(f"x has shape {list(x.shape)}; this layer takes [*batch, n, {self.d_in}]")
        check_dtype("x", x, self.q_proj)
        if context is None:
            if self.d_context != self.d_in:
                raise RegardError(f"context is missing: this layer needs one, [*batch, m, {self.d_context}]")
            return
        check_tensor("context", context)
        if context.ndim < 2 or context.shape[-1] != self.d_context:
            raise RegardError(
                f"context has shape {list(context.shape)}; this layer takes [*batch, m, {self.d_context}]"
            )
        check_dtype("context", context, self.k_proj)
        if isinstance(self.position, Rotary):
            raise RegardError(
                "position is a Rotary, which is for one sequence; x and context are two: cross-attention takes none"
            )

    @classmethod
    def from_torch(cls, layer: nn.MultiheadAttention) -> MultiHeadAttention:
        """The same function, with copies of the weights of ``nn.MultiheadAttention``, in its dtype, on its device.

        The result is always batch first: give it ``[B, n, D]``, whatever ``layer.batch_first`` is. In torch's masks
        True means the opposite: ``regard.masks.from_torch`` converts them. ``add_bias_kv``, ``add_zero_attn`` and
        ``kdim ≠ vdim`` are refused.

        >>> theirs = nn.MultiheadAttention(6, 3, batch_first=True).double()
        >>> ours, x = MultiHeadAttention.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x, x, x)[0])
        True
        """
        return attention_from_torch(cls, layer)

    def to_torch(self) -> nn.MultiheadAttention:
        """``nn.MultiheadAttention(batch_first=True)`` with copies of these weights; options that it lacks are refused.

        Torch has biases on all projections or on none. If this layer has only some, the others become zeros.

        >>> ours, x = MultiHeadAttention(6, heads=3).double(), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> theirs = ours.to_torch()
        >>> torch.allclose(theirs(x, x, x)[0], ours(x))
        True
        """
        return attention_to_torch(self)

    def extra_repr(self) -> str:
        shown = [f"{name}={getattr(self, name)}" for name in ("d_in", "heads", "d_key", "d_value", "d_out")]
        # An option is shown only if it differs from its default.
        defaults = {"d_context": self.d_in, "kv_heads": self.heads, "scale": None, "softcap": None, "dropout": 0.0}
        for name, default in defaults.items():
            if getattr(self, name) != default:
                shown.append(f"{name}={getattr(self, name)}")
        if self.sinks is not None:
            shown.append("sinks=True")
        if self.backend != "auto":
            shown.append(f"backend={self.backend!r}")
        if self.mask is not None:
            shown.append(f"mask={self.mask}")
        if self.position is not None and not isinstance(self.position, nn.Module):
            shown.append(f"position={self.position}")
        return ", ".join(shown)


def _split_heads(y: Tensor, heads: int) -> Tensor:
    """``[*B, n, H·D] → [*B, H, n, D]``"""
    return y.view(*y.shape[:-1], heads, y.shape[-1] // heads).transpose(-3, -2)


def _join_heads(heads_BHNE: Tensor) -> Tensor:
    """``[*B, H, n, E] → [*B, n, H·E]``"""
    return heads_BHNE.transpose(-3, -2).flatten(-2)


def _observe_all_queries(observe: Observe, x: Tensor, k_BGMD: Tensor) -> Observe:
    """In cross-attention all rows of x are real. Without this, a Padding of the context would decide if n = m."""
    if observe.queries is None and x.shape[-2] == k_BGMD.shape[-2]:
        return replace(observe, queries=(x.shape[-2],))
    return observe


def _check_position(position: Position | None, heads: int, d_key: int) -> None:
    """Refuse a scheme that does not act inside attention, or that was made for other sizes."""
    if isinstance(position, AddedToInput):
        raise RegardTypeError(
            f"position {type(position).__name__} is added to the input: call it before the first layer, "
            "or give it to a stack"
        )
    if position is not None and not isinstance(position, Rotary | Bias):
        raise RegardTypeError(
            f"position must be a Rotary or a bias on scores (ALiBi …), got {describe_value(position)}"
        )
    if isinstance(position, Bias):
        check_bias_fits(position, heads, d_key)
    if isinstance(position, Rotary) and position.d != d_key:
        raise RegardError(f"position Rotary({position.d}) does not fit d_key={d_key}; use Rotary({d_key})")
