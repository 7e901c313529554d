"""The decoder: no position sees what comes after it; with a cache it reads token by token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Unpack

from torch import Tensor, nn

from regard.masks import Causal, Mask
from regard.nn.block import Block, BlockOptions, make_block
from regard.nn.cache import DecoderCache
from regard.nn.encoder import last_norm
from regard.nn.multihead import Position
from regard.nn.norm import norm_from_torch
from regard.nn.stack import Observations, Stack, Tokens, as_mask, both, split_position
from regard.observables import Observe
from regard.positions import AddedToInput
from regard.shapes import integer

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
        tied: bool = True,
        d_context: int | None = None,
        position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        added, inside = split_position(position)
        hidden = 4 * d if hidden is None else hidden
        super().__init__(
            [
                make_block(d, heads, hidden, d_context=d_context, position=inside, dropout=dropout, **options)
                for _ in range(integer("layers", layers, least=1))
            ],
            norm=last_norm(d, options),
            tokens=None if vocab is None else Tokens(vocab, d, head="tied" if tied else "own"),
            position=added,
            dropout=dropout,
        )

    @classmethod
    def of(
        cls,
        blocks: Iterable[Block],
        *,
        norm: nn.Module | None = None,
        tokens: Tokens | None = None,
        position: AddedToInput | None = None,
        dropout: float = 0.0,
    ) -> Decoder:
        """A decoder of blocks already made."""
        self = cls.__new__(cls)
        Stack.__init__(self, blocks, norm=norm, tokens=tokens, position=position, dropout=dropout)
        return self

    @classmethod
    def from_torch(cls, decoder: nn.TransformerDecoder) -> Decoder:
        """The same function with the weights of ``nn.TransformerDecoder`` (copies) under a causal ``tgt_mask``."""
        norm = norm_from_torch(decoder.norm)
        return cls.of([Block.from_torch(layer) for layer in decoder.layers], norm=norm).train(decoder.training)

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache for this decoder, with room for ``capacity`` tokens from the start."""
        return DecoderCache(len(self.blocks), capacity)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        context_mask: Mask | Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``x [*B, n, D]`` → ``[*B, n, D]``, or ids ``[*B, n]`` → logits ``[*B, n, V]``; observations with ``observe``.

        ``mask`` is over self-attention's m keys, those in the cache included (left padding: ``Padding(bool [B, m])``);
        ``context_mask`` over the context's. With ``cache`` x follows what was read before, in any number of pieces.
        """
        if cache is not None and len(cache.layers) != len(self.blocks):
            raise ValueError(
                f"the cache is for {len(cache.layers)} blocks, but this decoder has {len(self.blocks)}; use new_cache()"
            )
        y, seen = self.run(
            self.embed(x, start=0 if cache is None else cache.length),
            context,
            mask=both(Causal(), as_mask(mask)),
            context_mask=as_mask(context_mask),
            cache=cache,
            observe=observe,
        )
        y = y if self.tokens is None else self.tokens.logits(y)
        return y if observe is None else (y, seen)
