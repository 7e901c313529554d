"""One transformer block: attention, perhaps cross-attention, and a feed-forward network, with norms and residuals."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Literal, TypedDict, Unpack

from torch import Tensor, nn
from torch.nn import functional as F

from regard.masks import Mask
from regard.nn.cache import BlockCache
from regard.nn.convert import copy_linear
from regard.nn.feedforward import Activation, FeedForward
from regard.nn.multihead import MultiHeadAttention, Position
from regard.nn.norm import LayerNorm, NormFactory, make_norm, norm_from_torch
from regard.nn.step import step
from regard.observables import Observation, Observe
from regard.positions.common import check_kind, described, probability

__all__ = ["Block", "BlockOptions", "make_block"]

Order = Literal["pre", "post"]


class Block(nn.Module):
    """``x ← x + f(norm(x))`` (pre) or ``x ← norm(x + f(x))`` (post), for f = attention, cross, feedforward in turn

        x [*B, n, D] → [*B, n, D];      every f maps D to D, and each has a norm of its own

    ``cross`` is attention over a context (an encoder's output); without it the block has two sublayers. ``norm`` makes
    a norm from its width, e.g. ``LayerNorm`` or ``partial(RMSNorm, eps=1e-5)``. ``dropout`` falls on each f's output,
    in training.

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
            raise ValueError(f'order must be "pre" (x + f(norm(x))) or "post" (norm(x + f(x))), got {order!r}')
        check_kind("attention", attention, MultiHeadAttention)
        check_kind("feedforward", feedforward, FeedForward)
        if cross is not None:
            check_kind("cross", cross, MultiHeadAttention)
        d = attention.d_in
        sizes = {"attention": (attention.d_in, attention.d_out), "feedforward": (feedforward.d, feedforward.d_out)}
        if cross is not None:
            sizes["cross"] = (cross.d_in, cross.d_out)
        for name, (given, returned) in sizes.items():
            if (given, returned) != (d, d):
                raise ValueError(
                    f"{name} maps {given} to {returned}; residuals need {d} to {d} in every sublayer of a block"
                )
        self.d, self.order = d, order
        self.attention, self.attention_norm = attention, make_norm(norm, d)
        self.cross, self.cross_norm = cross, None if cross is None else make_norm(norm, d)
        self.feedforward, self.feedforward_norm = feedforward, make_norm(norm, d)
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: BlockCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, dict[str, Observation]]:
        """``x [*B, n, D] → [*B, n, D]``; with ``observe`` also ``{"attention": …, "cross": …}``.

        ``mask`` is for self-attention, ``context_mask`` for cross-attention; True = may attend. ``at`` are positions
        for a ``Rotary`` in self-attention. A call that raises leaves the cache as it was.
        """
        if (context is None) != (self.cross is None):
            wanted = (
                "has no cross-attention, but got a context"
                if self.cross is None
                else "has cross-attention and needs a context"
            )
            raise ValueError(f"this block {wanted}")
        if context_mask is not None and self.cross is None:
            raise ValueError("context_mask was given, but this block has no cross-attention")
        if cache is not None and not isinstance(cache, BlockCache):
            raise TypeError(f"cache must be a BlockCache, which holds a KeyValueCache or two, got {described(cache)}")
        own, other = (None, None) if cache is None else (cache.own, cache.cross)
        alone = mask is None and at is None and observe is None and context is None
        if own is not None and alone and type(self) is Block:
            stepped = step(self, x, own)
            if stepped is not None:
                return stepped
        seen: dict[str, Observation] = {}

        def look(name: str, result: Tensor | tuple[Tensor, Observation]) -> Tensor:
            if isinstance(result, Tensor):
                return result
            seen[name] = result[1]
            return result[0]

        def attend(y: Tensor) -> Tensor:
            return look("attention", self.attention(y, mask=mask, at=at, cache=own, observe=observe))

        def attend_context(y: Tensor) -> Tensor:
            assert self.cross is not None
            return look("cross", self.cross(y, context, mask=context_mask, cache=other, observe=observe))

        with nullcontext() if cache is None else cache.all_or_nothing():
            x = self._sublayer(x, self.attention_norm, attend)
            if self.cross_norm is not None:
                x = self._sublayer(x, self.cross_norm, attend_context)
            x = self._sublayer(x, self.feedforward_norm, self.feedforward)
        return x if observe is None else (x, seen)

    def _sublayer(self, x: Tensor, norm: nn.Module, f: Callable[[Tensor], Tensor]) -> Tensor:
        y = f(norm(x) if self.order == "pre" else x)
        y = x + (self.dropout(y) if self.training else y)  # a module costs more than nothing, which it does in use
        return y if self.order == "pre" else norm(y)

    @classmethod
    def from_torch(cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Block:
        """The same function with the weights of torch's encoder or decoder layer (copies); ours is always batch first.

        A decoder layer becomes a block with cross-attention. Torch's masks mean the opposite of ours:
        ``regard.masks.from_torch`` converts them; causality is ``Causal()``.

        >>> theirs = nn.TransformerEncoderLayer(6, 3, 11, batch_first=True).double().train(False)
        >>> ours, x = Block.from_torch(theirs), torch.randn(2, 5, 6, dtype=torch.float64)
        >>> torch.allclose(ours(x), theirs(x))
        True
        """
        check_kind("layer", layer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        first, second = layer.linear1, layer.linear2
        bias = first.bias is not None
        activation = _activation(layer.activation)
        feedforward = FeedForward(
            first.in_features, first.out_features, activation=activation, bias=bias, dropout=layer.dropout.p
        ).to(first.weight)
        copy_linear(feedforward.up, first.weight, first.bias)
        copy_linear(feedforward.down, second.weight, second.bias)
        decoder = layer if isinstance(layer, nn.TransformerDecoderLayer) else None
        ours = cls(
            MultiHeadAttention.from_torch(layer.self_attn),
            feedforward,
            order="pre" if layer.norm_first else "post",
            cross=None if decoder is None else MultiHeadAttention.from_torch(decoder.multihead_attn),
            dropout=layer.dropout1.p,
        )
        ours.attention_norm = norm_from_torch("norm1", layer.norm1)
        if decoder is None:
            ours.feedforward_norm = norm_from_torch("norm2", layer.norm2)
        else:
            ours.cross_norm = norm_from_torch("norm2", decoder.norm2)
            ours.feedforward_norm = norm_from_torch("norm3", decoder.norm3)
        return ours.train(layer.training)

    def extra_repr(self) -> str:
        return f"{self.order}-norm"


class BlockOptions(TypedDict, total=False):
    """What the sized constructors of stacks hand on to ``make_block``."""

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
    """A block from sizes: D, N_h and D_ff, with cross-attention over a context of width ``d_context`` if that is given.

    Options: ``d_key`` (each head's width, values too), ``kv_heads``, ``qkv_bias=False``, ``bias=True`` (of the output
    projections and the feed-forward network), ``norm=LayerNorm``, ``order="pre"``, ``activation="gelu"``, ``gated``,
    ``scale``, ``softcap``, ``sinks``, ``backend``. The position is for self-attention alone. ``dropout`` falls on
    attention weights, hidden vectors and sublayer outputs.

    >>> block = make_block(8, heads=4, hidden=20, kv_heads=1, gated=True, activation="silu", bias=False)
    >>> sum(p.numel() for p in block.attention.parameters()), block.feedforward.extra_repr()
    (160, '8 → 20 → 8, silu gated')
    """
    known = BlockOptions.__annotations__
    for name in options:
        if name not in known:
            raise TypeError(f"unknown option {name!r}; a block takes {', '.join(known)}")
    bias, width = options.get("bias", True), options.get("d_key")
    make_attention = partial(
        MultiHeadAttention,
        d,
        heads,
        d_key=width,
        d_value=width,
        kv_heads=options.get("kv_heads"),
        qkv_bias=options.get("qkv_bias", False),
        out_bias=bias,
        scale=options.get("scale"),
        softcap=options.get("softcap"),
        sinks=options.get("sinks", False),
        dropout=dropout,
        backend=options.get("backend", "auto"),
    )
    activation, gated = options.get("activation", "gelu"), options.get("gated", False)
    return Block(
        make_attention(position=position),
        FeedForward(d, hidden, activation=activation, gated=gated, bias=bias, dropout=dropout),
        norm=options.get("norm", LayerNorm),
        order=options.get("order", "pre"),
        cross=None if d_context is None else make_attention(d_context=d_context),
        dropout=dropout,
    )


def _activation(given: Activation) -> Activation:
    """Torch's function or module by our name where it has one; a module is copied, for it may learn."""
    if given is F.relu or isinstance(given, nn.ReLU):
        return "relu"
    if given is F.gelu:
        return "gelu"
    if isinstance(given, nn.GELU):
        return "gelu" if given.approximate == "none" else "gelu_tanh"
    return deepcopy(given) if isinstance(given, nn.Module) else given
