"""Text-to-text models such as T5: an encoder reads the source, a decoder writes the target."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._config_json import Config
from regard._errors import RegardError
from regard._observables import Observe
from regard.masks import Padding
from regard.models._checkpoint_keys import KeyTable
from regard.models._generate import ReadFunction, TextGenerator, TokenizedPrompt
from regard.models._model import Model, prefix_observations
from regard.nn import Encoder, EncoderDecoder
from regard.nn._stack import Observations, PaddingLike


class TextToText(TextGenerator, EncoderDecoder):
    """``logits = Decoder(target, Encoder(source))``: ids ``[B, m]`` and ``[B, n]`` → ``[B, n, V]``

    Without an output head the result is the decoder's last vectors ``[B, n, D]``. Arguments of a call are those of
    ``EncoderDecoder``. ``generate`` reads its prompt as the source and starts the target with ``decoder_start_id``.

    >>> sizes = {"vocab_size": 256, "d_model": 12, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 3}
    >>> names = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "decoder_start_token_id": 0}
    >>> model = regard.models.create({**names, **sizes}).eval()
    >>> model(torch.tensor([[1, 2, 3]]), torch.tensor([[0, 5]])).shape, model.generate([1, 2, 3], 4).shape
    (torch.Size([1, 2, 256]), torch.Size([1, 4]))
    """

    padding_side = "right"

    def __init__(self, config: Config, keys: KeyTable, stacks: EncoderDecoder) -> None:
        super().__init__(config, keys)
        self.encoder = stacks.encoder
        self.decoder = stacks.decoder

    def start_reading(self, prompt: TokenizedPrompt, capacity: int, cached: bool) -> tuple[ReadFunction, Tensor]:
        tokens = self.output_head()
        # The source is read once; every step attends to the same context.
        with torch.inference_mode():
            context = self.encode(prompt.ids, padding=prompt.real)
        assert isinstance(context, Tensor)
        source_padding = Padding(prompt.real) if prompt.real is not None else None
        cache = self.new_cache(capacity) if cached else None
        read_so_far = prompt.ids[:, :0]

        def read(ids: Tensor) -> Tensor:
            nonlocal read_so_far
            if cache is None:  # read the whole target again
                ids = read_so_far = torch.cat([read_so_far, ids], dim=1)
            y = self.decoder.hidden_states(ids, context, context_mask=source_padding, cache=cache)
            assert isinstance(y, Tensor)
            return tokens.logits(y[:, -1])

        return read, prompt.ids.new_full((prompt.ids.shape[0], 1), self.decoder_start_id)

    @property
    def decoder_start_id(self) -> int:
        """The token that every target starts with; ``generation_config.json`` comes before ``config.json``."""
        for config in (self.generation_config, self.config):
            for name in ("decoder_start_token_id", "bos_token_id", "pad_token_id"):
                ids = config.token_ids(name)
                if ids:
                    return ids[0]
        raise RegardError(
            "config.json has no decoder_start_token_id, bos_token_id or pad_token_id; one of them must start the target"
        )


class TextToTextEncoder(Model):
    """``y = Encoder(ids)``: ids ``[B, n]`` → ``[B, n, D]``, the encoder of a text-to-text model alone.

    >>> sizes = {"vocab_size": 256, "d_model": 12, "d_kv": 4, "d_ff": 24, "num_layers": 1, "num_heads": 3}
    >>> model = regard.models.create({"model_type": "t5", "architectures": ["T5EncoderModel"], **sizes})
    >>> model(torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 12])
    """

    def __init__(self, config: Config, keys: KeyTable, encoder: Encoder) -> None:
        super().__init__(config, keys)
        self.encoder = encoder

    def forward(
        self, ids: Tensor, *, padding: PaddingLike | None = None, observe: Observe | None = None
    ) -> Tensor | tuple[Tensor, Observations]:
        """y ``[B, n, D]``; ``padding`` and ``observe`` as in ``Encoder``, with observations by module name."""
        return prefix_observations("encoder", self.encoder(ids, padding=padding, observe=observe))
