"""Text-to-text models: an encoder reads, a decoder writes, as T5 does."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.config import Config
from regard.masks import Padding
from regard.models.generate import Given, Read, Writer
from regard.models.keys import Table
from regard.models.model import Model, named
from regard.nn import Encoder, EncoderDecoder
from regard.nn.stack import Observations, PaddingLike
from regard.observables import Observe

__all__ = ["TextReader", "TextToText"]


class TextToText(Writer, EncoderDecoder):
    """``logits = Decoder(target, Encoder(source))``: ids ``[B, m]`` and ``[B, n]`` → ``[B, n, V]``

    Without a head the decoder's last vectors. ``padding`` says which source tokens are real: lengths, or True = real.
    ``generate`` reads its prompt as the source and begins the target with ``decoder_start_token_id``.

    >>> sizes = {"vocab_size": 256, "d_model": 12, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 3}
    >>> names = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}
    >>> model = regard.models.create({**names, **sizes}).eval()
    >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 5]])).shape, model.generate([1, 2, 3], 4).shape
    (torch.Size([1, 2, 256]), torch.Size([1, 4]))
    """

    pads = "right"

    def __init__(self, config: Config, table: Table, both: EncoderDecoder) -> None:
        super().__init__(config, table)
        self.encoder, self.decoder = both.encoder, both.decoder

    def reader(self, given: Given, room: int, cached: bool) -> tuple[Read, Tensor]:
        tokens = self.words()
        with torch.inference_mode():
            context = self.encode(given.ids, padding=given.real)
        assert isinstance(context, Tensor)
        source = None if given.real is None else Padding(given.real)
        cache, before = (self.new_cache(room) if cached else None), given.ids[:, :0]

        def read(ids: Tensor) -> Tensor:
            nonlocal before
            if cache is None:
                ids = before = torch.cat([before, ids], dim=1)
            y = self.decoder.hidden(ids, context, context_mask=source, cache=cache)
            assert isinstance(y, Tensor)
            return tokens.logits(y[:, -1])

        return read, given.ids.new_full((given.ids.shape[0], 1), self.begins)

    @property
    def begins(self) -> int:
        """The token that every target begins with."""
        for place in (self.generation, self.config):
            for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
                if place.ids(name):
                    return place.ids(name)[0]
        raise ValueError("config.json has no decoder_start_token_id; a target must begin with some token")


class TextReader(Model):
    """``y = Encoder(ids)``: ids ``[B, n]`` → ``[B, n, D]``, the reading half of a text-to-text model.

    >>> sizes = {"vocab_size": 256, "d_model": 12, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 3}
    >>> model = regard.models.create({"model_type": "t5", "architectures": ["T5EncoderModel"], **sizes})
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 12])
    """

    def __init__(self, config: Config, table: Table, encoder: Encoder) -> None:
        super().__init__(config, table)
        self.encoder = encoder

    def forward(
        self, ids: Tensor, *, padding: PaddingLike | None = None, observe: Observe | None = None
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, n, D]``; with ``observe`` also observations by module name."""
        return named("encoder", self.encoder(ids, padding=padding, observe=observe))
