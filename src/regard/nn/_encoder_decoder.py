"""The encoder–decoder: the encoder reads the source, the decoder writes the target and attends to the source."""

from __future__ import annotations

from copy import deepcopy
from typing import Unpack

from torch import Tensor, nn

from regard._checks import check_instance
from regard._errors import RegardError
from regard._observables import Observe
from regard.masks import Mask
from regard.nn._block import BlockOptions
from regard.nn._cache import DecoderCache
from regard.nn._decoder import Decoder
from regard.nn._encoder import Encoder
from regard.nn._multi_head_attention import Position
from regard.nn._stack import Observations, PaddingLike, TokenEmbedding, as_padding, head_kind
from regard.positions import AddedToInput


class EncoderDecoder(nn.Module):
    """``c = Encoder(source)``, ``y = Decoder(target, c)``;  logits = y Eᵀ with ``vocab``

        source [*B, m, D], target [*B, n, D] → [*B, n, D];  with ``vocab`` ids [*B, m], [*B, n] → logits [*B, n, V]

    The source's padding is hidden in encoder self-attention and in cross-attention; decoder self-attention is causal.

    Arguments, besides those of ``Decoder``:

    - ``layers``: number of blocks of each stack, unless ``decoder_layers`` gives another number for the decoder.
    - ``vocab``, ``target_vocab``: source and target share one embedding unless ``target_vocab`` is given.
    - ``position``, ``target_position``: ``position`` is for both stacks; its learned tables are copied, so that
      each stack has its own; ``target_position`` replaces it in the decoder.

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
            raise RegardError(f"target_vocab={target_vocab} needs vocab: the source needs a vocabulary too")
        # Without vocab both stacks take vectors; embeddings are added below.
        self.encoder = Encoder(d, heads, layers, hidden=hidden, position=position, dropout=dropout, **options)
        self.decoder = Decoder(
            d,
            heads,
            decoder_layers if decoder_layers is not None else layers,
            hidden=hidden,
            d_context=d,  # cross-attention over the encoder's output
            position=target_position if target_position is not None else deepcopy(position),
            dropout=dropout,
            **options,
        )
        if vocab is not None:
            self.decoder.tokens = TokenEmbedding(target_vocab or vocab, d, head=head_kind(tied), scale=token_scale)
            self.encoder.tokens = self.decoder.tokens  # one table for both, unless the vocabularies differ
            if target_vocab is not None:
                self.encoder.tokens = TokenEmbedding(vocab, d, head=None, scale=token_scale)

    @classmethod
    def from_stacks(cls, encoder: Encoder, decoder: Decoder) -> EncoderDecoder:
        """A model of two existing stacks; the decoder's blocks need cross-attention over the encoder's width.

        >>> encoder, decoder = Encoder(4, heads=2, layers=1), Decoder(6, heads=3, layers=2, d_context=4, vocab=11)
        >>> EncoderDecoder.from_stacks(encoder, decoder)(torch.zeros(1, 7, 4), torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 11])
        """
        check_instance("encoder", encoder, Encoder)
        check_instance("decoder", decoder, Decoder)
        for i, block in enumerate(decoder.blocks):
            width = getattr(block.cross, "d_context", None)
            if width != encoder.d:
                raise RegardError(
                    f"decoder blocks.{i} reads a context of width {width}, but the encoder gives {encoder.d}"
                )
        self = cls.__new__(cls)  # __init__ would build new stacks from sizes
        nn.Module.__init__(self)
        self.encoder = encoder
        self.decoder = decoder
        return self

    @classmethod
    def from_torch(cls, model: nn.Transformer) -> EncoderDecoder:
        """The same function, with copies of the weights of ``nn.Transformer``, for a causal ``tgt_mask``."""
        check_instance("model", model, nn.Transformer)
        ours = cls.from_stacks(Encoder.from_torch(model.encoder), Decoder.from_torch(model.decoder))
        return ours.train(model.training)

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache for the decoder."""
        return self.decoder.new_cache(capacity)

    def encode(
        self,
        source: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``source → c [*B, m, D]``; arguments as in ``Encoder.forward``."""
        return self.encoder(source, padding=padding, mask=mask, position_ids=position_ids, observe=observe)

    def decode(
        self,
        target: Tensor,
        context: Tensor,
        *,
        padding: PaddingLike | None = None,
        mask: Mask | Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``target, c → y``; ``padding`` is the source's, ``mask`` and ``position_ids`` are the target's.

        With ``cache`` only the first step computes the context's keys. Later steps do not look at ``context``; call
        ``cache.reset()`` before you use another one.

        >>> model = EncoderDecoder(6, heads=3, layers=1, vocab=11).eval()
        >>> with torch.no_grad():
        ...     context, cache = model.encode(torch.tensor([[1, 2, 3]])), model.new_cache()
        ...     steps = [model.decode(torch.tensor([[i]]), context, cache=cache) for i in (4, 5)]
        >>> torch.allclose(torch.cat(steps, 1), model(torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])), atol=1e-5)
        True
        """
        real = as_padding(padding, context)
        return self.decoder(
            target, context, mask=mask, context_mask=real, position_ids=position_ids, cache=cache, observe=observe
        )

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        padding: PaddingLike | None = None,
        source_mask: Mask | Tensor | None = None,
        target_mask: Mask | Tensor | None = None,
        source_position_ids: Tensor | None = None,
        target_position_ids: Tensor | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``source, target → y``

        - ``padding``: which source tokens are real, for encoder self-attention and cross-attention.
        - ``source_mask``, ``target_mask``: hide further keys in the two self-attentions.
        - ``source_position_ids``, ``target_position_ids``: positions, as in ``Encoder`` and ``Decoder``.
        - ``observe``: what to measure. The result is then ``(y, observations)``, by module name:
          ``encoder.blocks.0.attention``, ``decoder.blocks.0.cross`` …
        """
        if observe is None:
            context = self.encoder(source, padding=padding, mask=source_mask, position_ids=source_position_ids)
            return self.decode(target, context, padding=padding, mask=target_mask, position_ids=target_position_ids)
        if isinstance(observe, Observe) and observe.queries is not None:  # rows of which sequence?
            raise RegardError("queries=… names the rows of one sequence; observe encode(…) and decode(…) separately")
        # Both parts name their layers blocks.0 …, so each gets its own prefix.
        context, encoder_observations = self.encoder(
            source, padding=padding, mask=source_mask, position_ids=source_position_ids, observe=observe
        )
        y, decoder_observations = self.decode(
            target, context, padding=padding, mask=target_mask, position_ids=target_position_ids, observe=observe
        )
        observations = {f"encoder.{name}": value for name, value in encoder_observations.items()}
        return y, observations | {f"decoder.{name}": value for name, value in decoder_observations.items()}
