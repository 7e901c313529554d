"""Text generation token by token, for every model that reads its own output."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

import torch
from torch import Tensor

from regard._checks import check_integer, check_integer_tensor, describe_value
from regard._errors import RegardError, RegardTypeError
from regard.models._model import Model
from regard.models._sampling import Sampling
from regard.nn import Decoder
from regard.nn._cache import DecoderCache
from regard.nn._stack import TokenEmbedding

MAX_NEW_TOKENS = 2**24
INITIAL_CAPACITY = 1024  # the cache reserves memory for at most this many new tokens at first

Prompt = str | Sequence[str] | Tensor | Sequence[int] | Sequence[Sequence[int]]
End = int | Sequence[int] | None | Literal["model"]
ReadFunction = Callable[[Tensor], Tensor]  # new ids [B, t] → logits after the last of them [B, V]
PromptKind = Literal["text", "texts", "ids"]

# Entries of generation_config.json that change greedy text and are not supported, with their neutral values.
UNSUPPORTED_SETTINGS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "min_new_tokens": None,
}


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as ids ``[B, n]``; ``real [B, n]`` is False at padding, or None if nothing is padded."""

    ids: Tensor
    real: Tensor | None
    kind: PromptKind


class TextGenerator(Model):
    """A model that continues a prompt: ``TextDecoder`` and ``TextToText``.

    A prompt is a text, several texts, ids ``[n]`` or ``[B, n]``, or lists of ids of any lengths. Generation stops at an
    end token, or after ``length`` tokens.
    """

    decoder: Decoder
    padding_side: Literal["left", "right"] = "left"
    max_positions: int | None = None  # the number of learned positions; None if there is no limit
    trained_length: int | None = None  # longer texts can be read, but the model was not trained on them
    _warned_of_length = False
    _warned_of_settings = False

    @abstractmethod
    def start_reading(self, prompt: TokenizedPrompt, capacity: int, cached: bool) -> tuple[ReadFunction, Tensor]:
        """A function from new ids to logits, and the first ids for it to read."""

    def generate(
        self,
        prompt: Prompt,
        length: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        end: End = "model",
        cache: bool = True,
    ) -> str | list[str] | Tensor:
        """Continue a prompt: returns a text for a text, a list for a list of texts, else ids ``[B, t]``

        - ``length``: largest number of new tokens (default 64).
        - ``temperature``: 0 (default) takes the most likely token; above 0 tokens are drawn, restricted by ``top_k``
          and ``top_p`` (see ``Sampling``).
        - ``seed``: the same seed draws the same tokens; None (default) uses torch's global generator.
        - ``end``: a token id or several that stop a row, None for no end, or ``"model"`` (default): its end tokens.
          The end token is the last id of its row; the rest of the row is filled with the padding id.
        - ``cache``: False reads everything again at each step. That is slow and gives the same tokens, except with
          rotary positions that depend on the length (``dynamic``, ``longrope``): cached keys keep their rotation, as in
          ``transformers``. Phi-3 is the exception: it reads the text again once, where ``longrope`` changes.

        From ``generation_config.json`` only the end and start tokens are used; a warning names other settings that
        would change greedy text. No chat template is applied.

        >>> model = regard.models.load(regard.models.bundled())
        >>> model.generate("import os", 3)
        '.path'
        >>> model.generate([[386, 264, 577], [386]], 5, temperature=0.8, seed=1).shape  # ids, padded on the left
        torch.Size([2, 5])
        """
        tokenized = self._tokenize(prompt)
        steps = list(self._start(tokenized, length, Sampling(temperature, top_k, top_p), seed, end, cache))
        ids = tokenized.ids[:, :0]
        if steps:
            ids = torch.stack(steps, dim=1)
        if tokenized.kind == "ids":
            return ids
        end_ids = self._end_ids(end)
        texts = []
        for row in ids.tolist():
            before_end = takewhile(lambda token: token not in end_ids, row)
            texts.append(self.tokenizer.decode(list(before_end)))
        if tokenized.kind == "text":
            return texts[0]
        return texts

    def stream(
        self,
        prompt: Prompt,
        length: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        end: End = "model",
        cache: bool = True,
    ) -> Iterator[str] | Iterator[Tensor]:
        """As ``generate``, one token at a time: pieces of text for one text, else ids ``[B]``.

        >>> model = regard.models.load(regard.models.bundled())
        >>> list(model.stream("import os", 3))
        ['.', 'p', 'ath']
        """
        tokenized = self._tokenize(prompt)
        if tokenized.kind == "texts":
            raise RegardTypeError("prompt is a list of texts; stream takes one text, or ids for a whole batch")
        steps = self._start(tokenized, length, Sampling(temperature, top_k, top_p), seed, end, cache)
        if tokenized.kind == "ids":
            return steps
        end_ids = self._end_ids(end)
        return self.tokenizer.decode_stream(int(step) for step in steps if int(step) not in end_ids)

    def _start(
        self, prompt: TokenizedPrompt, length: int, sampling: Sampling, seed: int | None, end: End, cached: bool
    ) -> Iterator[Tensor]:
        """Check all arguments now, not at the first token; then return an iterator over new ids ``[B]``."""
        length = check_integer("length", length, most=MAX_NEW_TOKENS)
        end_ids = self._end_ids(end)
        if self.training:
            raise RegardError("this model is in training mode, with dropout on; call model.eval() before generating")
        reachable = self._reachable_length(prompt, length)
        generator = None
        if seed is not None:
            generator = torch.Generator(self.device).manual_seed(check_integer("seed", seed, most=2**63 - 1))
        capacity = prompt.ids.shape[1] + min(reachable, INITIAL_CAPACITY)
        read, first = self.start_reading(prompt, capacity, cached)

        # Warnings come last, so that a call that is refused does not warn.
        if reachable < length:
            _warn_caller(
                f"this model has learned positions for {self.max_positions} tokens: "
                f"it writes {reachable} after a prompt of {prompt.ids.shape[1]}"
            )
        self._warn_of_settings()
        return self._sample(read, first, reachable, sampling, generator, end_ids)

    def _sample(
        self,
        read: ReadFunction,
        new: Tensor,
        length: int,
        sampling: Sampling,
        generator: torch.Generator | None,
        end_ids: tuple[int, ...],
    ) -> Iterator[Tensor]:
        # Rows that have ended are filled with padding until all rows have ended.
        ended = torch.zeros(new.shape[0], dtype=torch.bool, device=new.device)
        padding_id = self.padding_id(end_ids)
        stops = torch.tensor(end_ids, device=new.device)
        for _ in range(length):
            # Not around the loop: inference mode would stay on while the caller handles the token.
            with torch.inference_mode():
                ids = sampling(read(new), generator)
                if end_ids:
                    ids = ids.masked_fill(ended, padding_id)
                    ended = ended | torch.isin(ids, stops)
                new = ids.unsqueeze(1)
            yield ids.clone()  # cloned outside inference mode, so that the caller gets an ordinary tensor
            if end_ids and bool(ended.all()):
                return

    def _reachable_length(self, prompt: TokenizedPrompt, length: int) -> int:
        """The number of new tokens that are possible: ``length``, or less if the learned positions end earlier."""
        n = prompt.ids.shape[1]
        # With padding on the right the prompt is the encoder's source and takes no positions of the target.
        if self.max_positions is None or self.padding_side == "right":
            return length
        if n > self.max_positions:
            raise RegardError(f"the prompt has {n} tokens; this model has learned positions for {self.max_positions}")
        return min(length, self.max_positions + 1 - n)  # the last new token is not read again

    def _warn_of_settings(self) -> None:
        """Warn once about settings in ``generation_config.json`` that are ignored and would change the text."""
        if self._warned_of_settings:
            return
        ignored = []
        for name, neutral in UNSUPPORTED_SETTINGS.items():
            value = self.generation_config.get(name, neutral)
            if value != neutral:
                ignored.append(f"{name}={value}")
        if ignored:
            self._warned_of_settings = True
            _warn_caller(f"generation_config.json sets {', '.join(ignored)}, which is not supported and ignored")

    def warn_beyond_training(self, tokens: int, cache: DecoderCache | None = None) -> None:
        """Warn once if new tokens, with those in the cache, are more than the model was trained on."""
        if cache is not None:
            tokens += cache.length
        if self.trained_length is not None and tokens > self.trained_length and not self._warned_of_length:
            self._warned_of_length = True
            _warn_caller(
                f"this model was trained on up to {self.trained_length} tokens and now reads {tokens}; expect errors"
            )

    def output_head(self) -> TokenEmbedding:
        """The embedding whose ``logits`` predict tokens; a model without a head is refused."""
        tokens = self.decoder.tokens
        if tokens is None or not tokens.has_head:
            raise RegardError(f"{self.config.architecture or 'this model'} has no head: it gives vectors, not tokens")
        return tokens

    def _end_ids(self, end: End) -> tuple[int, ...]:
        if end is None:
            return ()
        if end == "model":
            return self.end_ids
        if isinstance(end, str):
            raise RegardError(f'end must be a token id, several, None or "model", got {end!r}')
        if not isinstance(end, Sequence):
            end = [end]
        return tuple(check_integer("end", x) for x in end)

    def padding_id(self, end_ids: tuple[int, ...] = ()) -> int:
        """The id that fills rows: the padding id if the vocabulary has it (old configs have −1), an end id, or 0."""
        pad = self.config.get("pad_token_id")
        tokens = self.decoder.tokens
        if isinstance(pad, int) and isinstance(tokens, TokenEmbedding) and 0 <= pad < tokens.vocab:
            return pad
        return end_ids[0] if end_ids else 0

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The end tokens in the folder's configs."""
        return self.generation_config.token_ids("eos_token_id") or self.config.token_ids("eos_token_id")

    def _tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        if isinstance(prompt, Tensor):
            check_integer_tensor("prompt", prompt)
            if prompt.ndim not in (1, 2) or not prompt.numel():
                raise RegardError(f"prompt has shape {list(prompt.shape)}; ids must be [n] or [B, n] and not empty")
            return TokenizedPrompt(torch.atleast_2d(prompt).to(self.device, torch.int64), None, "ids")
        if isinstance(prompt, str):
            return self._pad([self.tokenizer.encode(prompt)], "text")
        accepted = "prompt must be a text, texts, token ids or lists of them"
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray) or not prompt:
            raise RegardTypeError(f"{accepted}, got {describe_value(prompt)}")
        if all(isinstance(x, str) for x in prompt):
            return self._pad([self.tokenizer.encode(str(x)) for x in prompt], "texts")

        # One list of ids, or a list of such lists.
        rows: list[Any] = [prompt]
        if all(isinstance(x, list | tuple) for x in prompt):
            rows = list(prompt)
        for row in rows:
            if not all(isinstance(i, int) and not isinstance(i, bool) for i in row):
                raise RegardTypeError(f"{accepted}, not a mixture")
        return self._pad([list(row) for row in rows], "ids")

    def _pad(self, rows: list[list[int]], kind: PromptKind) -> TokenizedPrompt:
        """Pad rows of ids to one length, on this model's padding side."""
        if not all(rows):
            raise RegardError("prompt is empty; give at least one token")
        least = min(map(min, rows))
        most = max(map(max, rows))
        vocab = self.config.integer("vocab_size")
        if not 0 <= least <= most < vocab:  # the embedding would find it later, after the padding
            raise RegardError(f"token ids go from {least} to {most}; this vocabulary has 0 … {vocab - 1}")

        n = max(map(len, rows))
        ids = torch.full((len(rows), n), self.padding_id(), device=self.device)
        real = torch.zeros(len(rows), n, dtype=torch.bool, device=self.device)
        for i, row in enumerate(rows):
            start = 0
            if self.padding_side == "left":
                start = n - len(row)
            ids[i, start : start + len(row)] = torch.tensor(row, device=self.device)
            real[i, start : start + len(row)] = True
        if bool(real.all()):  # without padding no mask is needed, and decoding is faster
            return TokenizedPrompt(ids, None, kind)
        return TokenizedPrompt(ids, real, kind)


def _warn_caller(message: str) -> None:
    """A warning that points at the first caller outside this library and torch."""
    frame = sys._getframe(1)
    level = 2  # our caller
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "torch"):
        frame = frame.f_back
        level += 1
    warnings.warn(message, stacklevel=level)
