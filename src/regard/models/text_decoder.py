"""Language models: a decoder over tokens, as GPT-2 and Llama are."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.config import Config
from regard.models.generate import Given, Read, Writer
from regard.models.keys import Table
from regard.models.model import named
from regard.nn import Decoder
from regard.nn.cache import DecoderCache
from regard.nn.stack import Observations, PaddingLike
from regard.observables import Observe
from regard.shapes import check_tensor

__all__ = ["TextDecoder"]


class TextDecoder(Writer):
    """``logits = Decoder(ids)``: ids ``[B, n]`` → ``[B, n, V]``, or the last vectors ``[B, n, D]`` without a head

    ``padding`` is over all m keys, those in the cache included: lengths, or bool ``[B, m]`` with True = real. With
    padding on the left give ``at``, each token's position; ``generate`` does both by itself.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.text.encode("import os.")])
    >>> logits = model(ids)
    >>> logits.shape, model.text.decode([int(logits[0, -1].argmax())])
    (torch.Size([1, 7, 1024]), 'p')
    """

    def __init__(self, config: Config, table: Table, decoder: Decoder, *, longest: int | None, trained: int | None):
        super().__init__(config, table)
        self.decoder, self.longest, self.trained = decoder, longest, trained

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache with room for ``capacity`` tokens."""
        return self.decoder.new_cache(capacity)

    def forward(
        self,
        ids: Tensor,
        *,
        padding: PaddingLike | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """Logits (or vectors, without a head); with ``observe`` also observations by module name."""
        check_tensor("token ids", ids)
        self.warn_beyond(ids.shape[-1] + (0 if cache is None else cache.length))
        return named("decoder", self.decoder(ids, padding=padding, at=at, cache=cache, observe=observe))

    def hidden(
        self,
        ids: Tensor,
        *,
        padding: PaddingLike | None = None,
        at: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """The last vectors ``[B, n, D]``, after the last norm."""
        return named("decoder", self.decoder.hidden(ids, padding=padding, at=at, cache=cache, observe=observe))

    def reader(self, given: Given, room: int, cached: bool) -> tuple[Read, Tensor]:
        tokens = self.words()
        cache = self.new_cache(room) if cached else None
        real, before = given.real, given.ids[:, :0]

        def read(ids: Tensor) -> Tensor:
            nonlocal real, before
            if cache is None:
                ids = before = torch.cat([before, ids], dim=1)
            at = None
            if real is not None:
                m = ids.shape[1] + (0 if cache is None else cache.length)
                real = torch.cat([real, real.new_ones(real.shape[0], m - real.shape[1])], dim=1)
                at = (real.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            self.warn_beyond(ids.shape[1] + (0 if cache is None else cache.length))
            y = self.decoder.hidden(ids, padding=real, at=at, cache=cache)
            assert isinstance(y, Tensor)
            return tokens.logits(y[:, -1])

        return read, given.ids
