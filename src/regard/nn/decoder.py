"""The decoder: no position sees what comes after it; with a cache it reads token by token."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, Unpack

from torch import Tensor, nn

from regard.masks import Causal, Mask
from regard.nn.block import Block, BlockOptions
from regard.nn.cache import DecoderCache
from regard.nn.multihead import Position
from regard.nn.norm import norm_from_torch
from regard.nn.stack import Observations, PaddingLike, Stack, Tokens, as_mask, as_padding, both, sized
from regard.observables import Observe
from regard.positions import AddedToInput
from regard.positions.common import check_kind, described

__all__ = ["Decoder"]


class Decoder(Stack):
    """``x^{l+1} = Block_l(x^l, context)``, ``y = norm(x^L)``, ``logits = y Eᵀ``;  self-attention under the causal mask

        x [*B, n, D] → y [*B, n, D];  with ``vocab`` ids [*B, n] → logits [*B, n, V]

    As ``Encoder``, but ``Causal()`` is added to whatever mask is given, so that output i depends on inputs 0 … i alone;
    right padding needs no mask then. ``d_context`` gives every block cross-attention over a context of that width.
    ``tied``: the logits use the embedding matrix; otherwise a head of their own. (A prefix language model, which is not
    causal in its prefix, is an ``Encoder`` with ``mask=Causal() | Prefix(lengths)``.)

    >>> import torch
    >>> decoder = Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> ids, cache = torch.tensor([[3, 1, 4, 1, 5]]), decoder.new_cache()
    >>> with torch.no_grad():
    ...     steps = [decoder(ids[:, i : i + 1], cache=cache) for i in range(5)]
    >>> torch.testing.assert_close(torch.cat(steps, dim=1), decoder(ids).detach())
    """

    def __init__(
        self,
        d: int,
        heads: int,
        layers: int,
        *,
        hidden: int | None = None,
        vocab: int | None = None,
        token_scale: float | None = None,
        tied: bool = True,
        d_context: int | None = None,
        position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        head: Literal["tied", "own"] = "tied" if tied else "own"
        tokens = None if vocab is None else Tokens(vocab, d, head=head, scale=token_scale)
        super().__init__(**sized(d, heads, layers, hidden, tokens, position, dropout, options, d_context))

    @classmethod
    def from_torch(cls, decoder: nn.TransformerDecoder) -> Decoder:
        """The same function with the weights of ``nn.TransformerDecoder`` (copies) under a causal ``tgt_mask``."""
        check_kind("decoder", decoder, nn.TransformerDecoder)
        norm = None if decoder.norm is None else norm_from_torch("norm", decoder.norm)
        return cls.of([Block.from_torch(layer) for layer in decoder.layers], norm=norm).train(decoder.training)

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache for this decoder, with room for ``capacity`` tokens from the start.

        >>> Decoder(6, heads=3, layers=2).new_cache(100).length
        0
        """
        return DecoderCache(len(self.blocks), capacity)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``x [*B, n, D]`` → ``[*B, n, D]``, or ids ``[*B, n]`` → logits ``[*B, n, V]``; observations with ``observe``.

        - ``padding`` and ``mask`` are over self-attention's m keys, those in the cache included: real lengths ``[B]``
          or bool ``[B, m]`` with True = real (left padding needs it), and what else is hidden. ``context_mask`` is
          over the context's.
        - ``at``: the positions of x's tokens, whole numbers ``[n]`` or ``[*B, n]``, where they do not simply count on:
          left padding, packed documents. With a cache give it at every step, for the new tokens.
        - ``cache``: x follows what was read before, in any number of pieces. A call that raises leaves it as it was.
        """
        result = self.hidden(
            x,
            context,
            padding=padding,
            mask=mask,
            context_mask=context_mask,
            at=at,
            cache=cache,
            observe=observe,
        )
        if self.tokens is None:
            return result
        return self.tokens.logits(result) if isinstance(result, Tensor) else (self.tokens.logits(result[0]), result[1])

    def hidden(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[*B, n, D]``, what logits are made of; arguments as in a call."""
        self._check_cache(cache)
        with nullcontext() if cache is None else cache.all_or_nothing():
            x = self.embed(x, start=0 if cache is None or at is not None else cache.length, at=at)
            y, seen = self.run(
                x,
                context,
                # A single query is the last one, and sees every key.
                mask=both(both(None if x.shape[-2] == 1 else Causal(), as_padding(padding, x)), as_mask("mask", mask)),
                context_mask=as_mask("context_mask", context_mask),
                at=at,
                cache=cache,
                observe=observe,
            )
        return y if observe is None else (y, seen)

    def _check_cache(self, cache: DecoderCache | None) -> None:
        if cache is not None and not isinstance(cache, DecoderCache):
            raise TypeError(f"cache must be a DecoderCache, which new_cache() makes, got {described(cache)}")
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(
                f"the cache is for {len(cache.layers)} blocks, but this decoder has {len(self.blocks)}; use new_cache()"
            )
