"""Language models such as GPT-2 and Llama: a decoder over tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._checks import check_tensor
from regard._config_json import Config
from regard._observables import Observe
from regard.models._checkpoint_keys import KeyTable
from regard.models._generate import ReadFunction, TextGenerator, TokenizedPrompt
from regard.models._model import prefix_observations
from regard.nn import Decoder
from regard.nn._cache import DecoderCache
from regard.nn._stack import Observations, PaddingLike


class TextDecoder(TextGenerator):
    """``logits = Decoder(ids)``: ids ``[B, n]`` → ``[B, n, V]``, or the last vectors ``[B, n, D]`` without a head

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
    >>> logits = model(ids)
    >>> logits.shape, model.tokenizer.decode([int(logits[0, -1].argmax())])
    (torch.Size([1, 7, 1024]), 'p')
    """

    def __init__(
        self,
        config: Config,
        keys: KeyTable,
        decoder: Decoder,
        *,
        max_positions: int | None,
        trained_length: int | None,
        reread_length: int | None = None,
    ) -> None:
        super().__init__(config, keys)
        self.decoder = decoder
        self.max_positions = max_positions
        self.trained_length = trained_length
        # Generation reads the text again once it is longer than this, because older keys are rotated otherwise; None
        # if it never does.
        self.reread_length = reread_length

    def new_cache(self, capacity: int = 0) -> DecoderCache:
        """An empty cache with memory for ``capacity`` tokens."""
        return self.decoder.new_cache(capacity)

    def forward(
        self,
        ids: Tensor,
        *,
        padding: PaddingLike | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """``ids [B, n] → logits [B, n, V]``, or vectors without a head

        - ``padding``: over all m keys, including the cached ones: lengths, or bool ``[B, m]`` with True = real.
        - ``position_ids``: each token's position, needed with padding on the left (``generate`` does that itself).
        - ``cache``: the tokens read before (default None).
        - ``observe``: what to measure. The result is then ``(logits, observations by module name)``.
        """
        check_tensor("token ids", ids)
        self.warn_beyond_training(ids.shape[-1], cache)
        result = self.decoder(ids, padding=padding, position_ids=position_ids, cache=cache, observe=observe)
        return prefix_observations("decoder", result)

    def hidden_states(
        self,
        ids: Tensor,
        *,
        padding: PaddingLike | None = None,
        position_ids: Tensor | None = None,
        cache: DecoderCache | None = None,
        observe: Observe | None = None,
    ) -> Tensor | tuple[Tensor, Observations]:
        """The last vectors ``[B, n, D]``, after the last norm; arguments as in ``forward``."""
        out = self.decoder.hidden_states(ids, padding=padding, position_ids=position_ids, cache=cache, observe=observe)
        return prefix_observations("decoder", out)

    def start_reading(self, prompt: TokenizedPrompt, capacity: int, cached: bool) -> tuple[ReadFunction, Tensor]:
        tokens = self.output_head()
        cache = self.new_cache(capacity) if cached else None
        real = prompt.real
        read_so_far = prompt.ids[:, :0]

        def read(ids: Tensor) -> Tensor:
            nonlocal cache, real, read_so_far
            limit = self.reread_length
            if cache is None or limit is not None:
                read_so_far = torch.cat([read_so_far, ids], dim=1)
            if cache is None:  # read everything again
                ids = read_so_far
            elif limit is not None and 0 < cache.length <= limit < read_so_far.shape[1]:
                # Keys in the cache are rotated for short texts. Read everything again, once.
                ids = read_so_far
                cache = None  # free its memory before the new one takes some
                cache = self.new_cache(max(capacity, ids.shape[1]))
            self.warn_beyond_training(ids.shape[1], cache)
            position_ids = None
            if real is not None:
                # Tokens after the prompt are real; positions count the real tokens of each row.
                m = ids.shape[1]
                if cache is not None:
                    m += cache.length
                real = torch.cat([real, real.new_ones(real.shape[0], m - real.shape[1])], dim=1)
                position_ids = (real.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            y = self.decoder.hidden_states(ids, padding=real, position_ids=position_ids, cache=cache)
            assert isinstance(y, Tensor)
            return tokens.logits(y[:, -1])  # logits of the last token only

        return read, prompt.ids
