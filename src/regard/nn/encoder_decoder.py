"""The encoder–decoder: the source is read once and whole, the target token by token with an eye on the source."""

from __future__ import annotations

from copy import deepcopy
from typing import Literal, Unpack

from torch import Tensor, nn

from regard.masks import Mask
from regard.nn.block import BlockOptions
from regard.nn.cache import DecoderCache
from regard.nn.decoder import Decoder
from regard.nn.encoder import Encoder
from regard.nn.multihead import MultiHeadAttention, Position
from regard.nn.stack import Observations, PaddingLike, Tokens, as_padding
from regard.observables import Observe
from regard.positions import AddedToInput
from regard.positions.common import check_kind

__all__ = ["EncoderDecoder"]


class EncoderDecoder(nn.Module):
    """``c = Encoder(source)``, ``y = Decoder(target, c)``;  logits = y Eᵀ with ``vocab``

        source [*B, m, D], target [*B, n, D] → [*B, n, D];  with ``vocab`` ids [*B, m], [*B, n] → logits [*B, n, V]

    Masks where they belong: the source's padding in encoder self-attention and in cross-attention, causality in decoder
    self-attention. ``layers`` each, unless ``decoder_layers`` says otherwise. Source and target share one embedding
    unless ``target_vocab`` is given. ``position`` serves both; learned tables are copied, so that each stack has its
    own, or give ``target_position``. Other options are those of ``make_block``.

    >>> import torch
    >>> model = EncoderDecoder(6, heads=3, layers=2, vocab=11)
    >>> model(torch.tensor([[1, 2, 3, 0]]), torch.tensor([[4, 5]]), padding=[3]).shape
    torch.Size([1, 2, 11])
    """

    def __init__(
        self,
        d: int,
        heads: int,
        layers: int,
        *,
        decoder_layers: int | None = None,
        hidden: int | None = None,
        vocab: int | None = None,
        target_vocab: int | None = None,
        token_scale: float | None = None,
        tied: bool = True,
        position: Position | AddedToInput | None = None,
        target_position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        if target_vocab is not None and vocab is None:
            raise ValueError(f"target_vocab={target_vocab} was given without vocab; the source needs a vocabulary too")
        self.encoder = Encoder(d, heads, layers, hidden=hidden, position=position, dropout=dropout, **options)
        self.decoder = Decoder(
            d,
            heads,
            layers if decoder_layers is None else decoder_layers,
            hidden=hidden,
            d_context=d,
            position=deepcopy(position) if target_position is None else target_position,
            dropout=dropout,
            **options,
        )
        if vocab is not None:
            head: Literal["tied", "own"] = "tied" if tied else "own"
            written = vocab if target_vocab is None else target_vocab
            self.decoder.tokens = Tokens(written, d, head=head, scale=token_scale)
            read = self.decoder.tokens if target_vocab is None else Tokens(vocab, d, head=None, scale=token_scale)
            self.encoder.tokens = read

    @classmethod
    def of(cls, encoder: Encoder, decoder: Decoder) -> EncoderDecoder:
        """One model of two stacks already made; the decoder's blocks have cross-attention over the encoder's width.

        >>> reads, writes = Encoder(4, heads=2, layers=1), Decoder(6, heads=3, layers=2, d_context=4, vocab=11)
        >>> EncoderDecoder.of(reads, writes)(torch.zeros(1, 7, 4), torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 11])
        """
        check_kind("encoder", encoder, Encoder)
        check_kind("decoder", decoder, Decoder)
        for i, block in enumerate(decoder.blocks):
            width = block.cross.d_context if isinstance(block.cross, MultiHeadAttention) else None
            if width != encoder.d:
                raise ValueError(
                    f"decoder blocks.{i} reads a context of width {width}, but the encoder gives {encoder.d}"
                )
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.encoder, self.decoder = encoder, decoder
        return self

    @classmethod
    def from_torch(cls, model: nn.Transformer) -> EncoderDecoder:
        """The same function with the weights of ``nn.Transformer`` (copies) under a causal ``tgt_mask``."""
        check_kind("model", model, nn.Transformer)
        return cls.of(Encoder.from_torch(model.encoder), Decoder.from_torch(model.decoder)).train(model.training)

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache for the decoder."""
        return self.decoder.new_cache(capacity)

    def encode(
        self,
        source: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``source → c [*B, m, D]``"""
        return self.encoder(source, padding=padding, mask=mask, at=at, observe=observe)

    def decode(
        self,
        target: Tensor,
        context: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``target, c → y``; ``padding`` is the source's, ``mask`` and ``at`` are the target's own.

        With ``cache`` the context's keys are computed at the first step alone; later steps do not look at ``context``
        again, so ``reset`` the cache before another one.

        >>> model = EncoderDecoder(6, heads=3, layers=1, vocab=11).eval()
        >>> with torch.no_grad():
        ...     context, cache = model.encode(torch.tensor([[1, 2, 3]])), model.new_cache()
        ...     steps = [model.decode(torch.tensor([[i]]), context, cache=cache) for i in (4, 5)]
        >>> torch.allclose(torch.cat(steps, 1), model(torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])), atol=1e-5)
        True
        """
        cross = as_padding(padding, context)
        return self.decoder(target, context, mask=mask, context_mask=cross, at=at, cache=cache, observe=observe)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        padding: PaddingLike | None = None,
        source_mask: Mask | Tensor | None = None,
        target_mask: Mask | Tensor | None = None,
        source_at: Tensor | None = None,
        target_at: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``source, target → y``; ``padding`` says which source tokens are real, in encoder and cross-attention alike.

        ``source_mask`` and ``target_mask`` hide more in the two self-attentions; ``source_at`` and ``target_at`` are
        positions, as in ``Encoder`` and ``Decoder``. With ``observe`` also observations by module name:
        ``encoder.blocks.0.attention``, ``decoder.blocks.0.cross`` …
        """
        if observe is None:
            context = self.encoder(source, padding=padding, mask=source_mask, at=source_at)
            return self.decode(target, context, padding=padding, mask=target_mask, at=target_at)
        if isinstance(observe, Observe) and observe.queries is not None:
            raise ValueError(
                "Observe(queries=…) names the rows of one sequence; observe encode(…) and decode(…) separately"
            )
        context, read = self.encoder(source, padding=padding, mask=source_mask, at=source_at, observe=observe)
        y, wrote = self.decode(target, context, padding=padding, mask=target_mask, at=target_at, observe=observe)
        seen = {f"encoder.{name}": part for name, part in read.items()}
        return y, seen | {f"decoder.{name}": part for name, part in wrote.items()}
