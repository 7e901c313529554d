"""The transformer block: attention, optional cross-attention and a feed-forward network, with norms and residuals."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Literal, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_instance, check_probability, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._observables import Observation, Observe
from regard.masks import Mask
from regard.nn._cache import BlockCache, rollback_on_error
from regard.nn._decode_step import decode_step
from regard.nn._feed_forward import Activation, FeedForward
from regard.nn._multi_head_attention import MultiHeadAttention, Position
from regard.nn._norm import LayerNorm, NormFactory, make_norm, norm_from_torch
from regard.nn._torch_weights import copy_linear

Order = Literal["pre", "post"]


class Block(nn.Module):
    """``x ← x + f(norm(x))`` (pre) or ``x ← norm(x + f(x))`` (post), with f = attention, cross, feedforward in order

        x [*B, n, D] → [*B, n, D];      every f maps D to D, and each has its own norm

    - ``attention``: the self-attention layer.
    - ``feedforward``: the feed-forward network.
    - ``norm``: makes a norm from its width, e.g. ``LayerNorm`` (default) or ``partial(RMSNorm, eps=1e-5)``.
    - ``order``: ``"pre"`` (default) or ``"post"``.
    - ``cross``: attention over a context (an encoder's output); None (default) gives a block of two sublayers.
    - ``dropout``: probability, applied to the output of each f in training only (default 0).

    >>> import torch
    >>> block = Block(MultiHeadAttention(6, heads=3), FeedForward(6, 11))
    >>> block(torch.zeros(2, 5, 6)).shape
    torch.Size([2, 5, 6])
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        feedforward: FeedForward,
        *,
        norm: NormFactory = LayerNorm,
        order: Order = "pre",
        cross: MultiHeadAttention | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if order not in ("pre", "post"):
            raise RegardError(f'order must be "pre" (x + f(norm(x))) or "post" (norm(x + f(x))), got {order!r}')
        # Checked here, because a wrong part would fail only at the first call.
        check_instance("attention", attention, MultiHeadAttention)
        check_instance("feedforward", feedforward, FeedForward)
        if cross is not None:
            check_instance("cross", cross, MultiHeadAttention)
        d = attention.d_in
        sizes = {"attention": (d, attention.d_out), "feedforward": (feedforward.d, feedforward.d_out)}
        if cross is not None:
            sizes["cross"] = (cross.d_in, cross.d_out)
        for name, (width_in, width_out) in sizes.items():  # x + f(x) needs equal widths
            if (width_in, width_out) != (d, d):
                raise RegardError(f"{name} maps {width_in} to {width_out}; residuals need {d} to {d}")
        self.d = d
        self.order = order
        # Attributes are module paths, so their names and their order are part of the state dict.
        self.attention = attention
        self.attention_norm = make_norm(norm, d)
        self.cross = cross
        self.cross_norm = make_norm(norm, d) if cross is not None else None
        self.feedforward = feedforward
        self.feedforward_norm = make_norm(norm, d)
        self.dropout = nn.Dropout(check_probability("dropout", dropout))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: BlockCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Observation]]:
        """``x [*B, n, D] → [*B, n, D]``

        - ``context``: ``[*B, m, D_context]``, required if and only if the block has cross-attention.
        - ``mask``, ``context_mask``: masks of self-attention and of cross-attention; True = may attend.
        - ``position_ids``: positions for a ``Rotary`` in self-attention.
        - ``cache``: a ``BlockCache``. If a call raises, the cache is unchanged.
        - ``observe``: what to measure. The result is then ``(x, {"attention": Observation, "cross": Observation})``.
        """
        if context is None and self.cross is not None:
            raise RegardError("context is missing: this block has cross-attention")
        if context is not None and self.cross is None:
            raise RegardError("context was given, but this block has no cross-attention")
        if context_mask is not None and self.cross is None:
            raise RegardError("context_mask was given, but this block has no cross-attention")
        if cache is not None and not isinstance(cache, BlockCache):
            raise RegardTypeError(f"cache must be a BlockCache, got {describe_value(cache)}")

        # A single new token without options takes one native call instead of a dozen layers.
        no_options = mask is None and position_ids is None and observe is None and context is None
        if cache is not None and no_options and type(self) is Block:  # a subclass may compute something else
            y = decode_step(self, x, cache.attention)
            if y is not None:  # None: this block has a part that the native kernel lacks
                return y

        observations: dict[str, Observation] = {}
        self_cache = cross_cache = None
        if cache is not None:
            self_cache = cache.attention
            cross_cache = cache.cross

        def take_observation(name: str, result: Tensor | tuple[Tensor, Observation]) -> Tensor:
            if isinstance(result, Tensor):
                return result
            out, observations[name] = result  # (tensor, Observation) with ``observe``
            return out

        def attend(y: Tensor) -> Tensor:
            result = self.attention(y, mask=mask, position_ids=position_ids, cache=self_cache, observe=observe)
            return take_observation("attention", result)

        def attend_to_context(y: Tensor) -> Tensor:
            assert self.cross is not None
            result = self.cross(y, context, mask=context_mask, cache=cross_cache, observe=observe)
            return take_observation("cross", result)

        # If a later sublayer raises, the keys that self-attention has appended are removed again.
        with rollback_on_error(cache):
            x = self._sublayer(x, self.attention_norm, attend)
            if self.cross_norm is not None:
                x = self._sublayer(x, self.cross_norm, attend_to_context)
            x = self._sublayer(x, self.feedforward_norm, self.feedforward)
        if observe is None:
            return x
        return x, observations

    def _sublayer(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Tensor:
        """One residual step with f, in this block's order."""
        if self.order == "pre":
            return x + self._drop(f(norm(x)))
        return norm(x + self._drop(f(x)))

    def _drop(self, y: Tensor) -> Tensor:
        if self.training:  # in inference dropout does nothing, and the call of a module takes time
            return self.dropout(y)
        return y

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Block:
        """The same function, with copies of the weights of torch's encoder or decoder layer; always batch first.

        A decoder layer becomes a block with cross-attention. In torch's masks True means the opposite:
        ``regard.masks.from_torch`` converts them. The causal mask is ``Causal()``.

        >>> theirs = nn.TransformerEncoderLayer(6, 3, 11, batch_first=True).double().train(False)
        >>> ours, x = Block.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x))
        True
        """
        check_instance("layer", layer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        up = layer.linear1
        down = layer.linear2
        feedforward = FeedForward(
            up.in_features,
            up.out_features,
            activation=_activation_from_torch(layer.activation),
            bias=up.bias is not None,
            dropout=layer.dropout.p,
        ).to(up.weight)
        copy_linear(feedforward.up, up.weight, up.bias)
        copy_linear(feedforward.down, down.weight, down.bias)
        cross = None
        if isinstance(layer, nn.TransformerDecoderLayer):  # only a decoder layer has cross-attention
            cross = MultiHeadAttention.from_torch(layer.multihead_attn)
        ours = cls(
            MultiHeadAttention.from_torch(layer.self_attn),
            feedforward,
            order="pre" if layer.norm_first else "post",
            cross=cross,
            dropout=layer.dropout1.p,
        )

        # Torch numbers its norms in the order of the sublayers; a decoder layer has one sublayer more.
        ours.attention_norm = norm_from_torch("norm1", layer.norm1)
        if not isinstance(layer, nn.TransformerDecoderLayer):
            ours.feedforward_norm = norm_from_torch("norm2", layer.norm2)
        else:
            ours.cross_norm = norm_from_torch("norm2", layer.norm2)
            ours.feedforward_norm = norm_from_torch("norm3", layer.norm3)
        return ours.train(layer.training)

    def extra_repr(self) -> str:
        return f"{self.order}-norm"


class BlockOptions(TypedDict, total=False):
    """The options of ``make_block``, which the constructors of stacks pass on."""

    d_key: int | None
    kv_heads: int | None
    qkv_bias: bool
    bias: bool
    norm: NormFactory
    order: Order
    activation: Activation
    gated: bool
    scale: float | None
    softcap: float | None
    sinks: bool
    backend: str


def make_block(
    d: int,
    heads: int,
    hidden: int,
    *,
    d_context: int | None = None,
    position: Position | None = None,
    dropout: float = 0.0,
    **options: Unpack[BlockOptions],
) -> Block:
    """Build a block from its sizes D, N_h and D_ff.

    - ``d``, ``heads``, ``hidden``: D, N_h and D_ff.
    - ``d_context``: width of a context; it adds cross-attention (default None: no cross-attention).
    - ``position``: the position scheme of self-attention.
    - ``dropout``: probability, for attention weights, hidden vectors and sublayer outputs (default 0).
    - further options: ``d_key`` (the width of each head, for values too), ``kv_heads``, ``qkv_bias=False``,
      ``bias=True`` (of the output projections and the feed-forward network), ``norm=LayerNorm``, ``order="pre"``,
      ``activation="gelu"``, ``gated=False``, ``scale``, ``softcap``, ``sinks=False``, ``backend="auto"``.

    >>> block = make_block(8, heads=4, hidden=20, kv_heads=1, gated=True, activation="silu", bias=False)
    >>> sum(p.numel() for p in block.attention.parameters()), block.feedforward.extra_repr()
    (160, '8 → 20 → 8, silu gated')
    """
    # Unpack[BlockOptions] is checked by type checkers only.
    known = BlockOptions.__annotations__
    for name in options:
        if name not in known:
            raise RegardTypeError(f"unknown option {name!r}; a block takes {', '.join(known)}")
    bias = options.get("bias", True)
    attention_options: dict[str, Any] = {"d_value": options.get("d_key"), "out_bias": bias, "dropout": dropout}
    for name in ("d_key", "kv_heads", "qkv_bias", "scale", "softcap", "sinks", "backend"):
        if name in options:
            attention_options[name] = options[name]  # type: ignore[literal-required]
    make_attention = partial(MultiHeadAttention, d, heads, **attention_options)
    # The attention is built first: the order of construction decides which random weights each part gets for a seed.
    attention = make_attention(position=position)
    feedforward = FeedForward(
        d,
        hidden,
        activation=options.get("activation", "gelu"),
        gated=options.get("gated", False),
        bias=bias,
        dropout=dropout,
    )
    return Block(
        attention,
        feedforward,
        norm=options.get("norm", LayerNorm),
        order=options.get("order", "pre"),
        cross=make_attention(d_context=d_context) if d_context is not None else None,
        dropout=dropout,
    )


def _activation_from_torch(activation: Activation) -> Activation:
    """Our name of torch's function or module, if there is one; a module is copied, because it may have parameters."""
    if activation is F.relu or isinstance(activation, nn.ReLU):
        return "relu"
    if activation is F.gelu:
        return "gelu"
    if isinstance(activation, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}[activation.approximate]
    if isinstance(activation, nn.Module):
        return deepcopy(activation)
    return activation
