"""Writing token by token: prompts in, tokens or text out, for every model that reads its own words."""

from __future__ import annotations

import sys
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from regard.models.model import Model
from regard.models.sampling import Sampling
from regard.nn import Decoder
from regard.nn.stack import Tokens
from regard.positions.common import check_whole, described
from regard.shapes import integer

__all__ = ["Prompt", "Writer"]

LONGEST = 2**24  # tokens to write
ROOM = 1024  # tokens for which a cache has room from the start; it grows

Prompt = str | Sequence[str] | Tensor | Sequence[int] | Sequence[Sequence[int]]
End = int | Sequence[int] | None | Literal["model"]
Read = Callable[[Tensor], Tensor]  # new ids [B, t] → the logits after the last of them [B, V]


@dataclass(frozen=True)
class Given:
    """A prompt as ids ``[B, n]``, padded where texts differ in length; ``real`` is None where nothing is padded."""

    ids: Tensor
    real: Tensor | None
    text: Literal["one", "many", "none"]


class Writer(Model):
    """A model that continues a prompt: ``TextDecoder`` and ``TextToText``.

    A prompt is a text, several texts, ids ``[n]`` or ``[B, n]``, or lists of ids of any lengths. What is written ends
    at an end token (the model's own unless ``end`` says otherwise; None writes on) or after ``length`` tokens.
    """

    decoder: Decoder
    pads: Literal["left", "right"] = "left"
    longest: int | None = None  # learned positions end here
    trained: int | None = None  # positions go on, but the model was not trained beyond
    _warned = _warned_of_settings = False

    @abstractmethod
    def reader(self, given: Given, room: int, cached: bool) -> tuple[Read, Tensor]:
        """A function that reads new ids and gives logits, and the first ids for it to read."""

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
        """What follows the prompt: text for text, a list for a list of texts, else ids ``[B, t]`` with t ≤ ``length``.

        - ``temperature=0`` is greedy; above 0 tokens are drawn, among ``top_k`` and ``top_p`` (see ``Sampling``).
          The same ``seed`` draws the same tokens; None goes on with torch's own generator.
        - the end token is the last id of its row; rows that ended earlier are filled up with the padding id.
        - ``cache=False`` reads everything anew at each step: slow, and the same tokens, but for rotary positions that
          stretch as a text grows (``dynamic``, ``longrope``): kept keys stay turned as they were.
        - of ``generation_config.json`` the end and start tokens are taken. What else it asks for is an argument
          here, or is not done; one warning says so where it would change greedy text. No chat template is applied.

        >>> model = regard.models.load(regard.models.bundled())
        >>> model.generate("import os", 3)
        '.path'
        >>> model.generate([[386, 264, 577], [386]], 5, temperature=0.8, seed=1).shape  # ids, padded on the left
        torch.Size([2, 5])
        """
        given = self._given(prompt)
        steps = list(self._steps(given, length, Sampling(temperature, top_k, top_p), seed, end, cache))
        ids = torch.stack(steps, dim=1) if steps else given.ids[:, :0]
        if given.text == "none":
            return ids
        texts = [self.text.decode(_until(row, self._ends(end))) for row in ids.tolist()]
        return texts[0] if given.text == "one" else texts

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
        given = self._given(prompt)
        if given.text == "many":
            raise TypeError("stream writes one text at a time; give one, or ids for a whole batch")
        steps = self._steps(given, length, Sampling(temperature, top_k, top_p), seed, end, cache)
        if given.text == "none":
            return steps
        ends = self._ends(end)
        return self.text.pieces(i for i in (int(step) for step in steps) if i not in ends)

    def _steps(
        self, given: Given, length: int, sampling: Sampling, seed: int | None, end: End, cached: bool
    ) -> Iterator[Tensor]:
        """The checks, at once; then an iterator over new ids ``[B]``."""
        length, ends = integer("length", length, most=LONGEST), self._ends(end)
        if self.training:
            raise ValueError("this model is in training mode, with dropout on; call model.eval() before it writes")
        reach = self._within_reach(given, length)
        generator = (
            None if seed is None else torch.Generator(self.device).manual_seed(integer("seed", seed, most=2**63 - 1))
        )
        read, first = self.reader(given, given.ids.shape[1] + min(reach, ROOM), cached)
        self._warn_of_reach(given, length, reach)
        return self._written(read, first, reach, sampling, generator, ends)

    def _written(
        self,
        read: Read,
        new: Tensor,
        length: int,
        sampling: Sampling,
        generator: torch.Generator | None,
        ends: tuple[int, ...],
    ) -> Iterator[Tensor]:
        ended = torch.zeros(new.shape[0], dtype=torch.bool, device=new.device)
        filler = self.filler(ends)
        stops = torch.tensor(ends, device=new.device)
        for _ in range(length):
            with torch.inference_mode():  # not around the loop: it would stay on while the caller has the token
                ids = sampling(read(new), generator)
                if ends:
                    ids = ids.masked_fill(ended, filler)
                    ended = ended | torch.isin(ids, stops)
                new = ids.unsqueeze(1)
            yield ids.clone()  # outside inference mode: an ordinary tensor
            if ends and bool(ended.all()):
                return

    def _within_reach(self, given: Given, length: int) -> int:
        """``length``, or less where learned positions end."""
        n = given.ids.shape[1]
        if self.longest is None or self.pads == "right":
            return length
        if n > self.longest:
            raise ValueError(f"the prompt has {n} tokens; this model has learned positions for {self.longest}")
        return min(length, self.longest + 1 - n)  # the last token written is not read any more

    def _warn_of_reach(self, given: Given, length: int, reach: int) -> None:
        """After all that is refused: say that less is written than asked for, or that it is read untrained."""
        n = given.ids.shape[1] if self.pads == "left" else 0
        if reach < length:
            _warn(
                f"this model has learned positions for {self.longest} tokens: it writes {reach} after a prompt of {n}"
            )
        self._warn_of_settings()

    def _warn_of_settings(self) -> None:
        """Say once which rules of ``generation_config.json`` are not followed here and would change what is written."""
        usual = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1, "suppress_tokens": None}
        usual |= {
            "bad_words_ids": None,
            "forced_bos_token_id": None,
            "forced_eos_token_id": None,
            "min_new_tokens": None,
        }
        other = [f"{name}={self.generation[name]}" for name, x in usual.items() if self.generation.get(name, x) != x]
        if other and not self._warned_of_settings:
            self._warned_of_settings = True
            _warn(f"generation_config.json asks for {', '.join(other)}, which is not done here")

    def warn_beyond(self, tokens: int) -> None:
        """Say once that a model reads further than it was trained."""
        if self.trained is not None and tokens > self.trained and not self._warned:
            self._warned = True
            _warn(f"this model was trained on up to {self.trained} tokens and now reads {tokens}; expect worse")

    def words(self) -> Tokens:
        """The vocabulary with its head; a model without one is refused."""
        tokens = self.decoder.tokens
        if tokens is None or (tokens.head is None and not tokens.tied):
            raise ValueError(f"{self.config.architecture or 'this model'} has no head: it gives vectors, not tokens")
        return tokens

    def _ends(self, end: End) -> tuple[int, ...]:
        if end is None:
            return ()
        if isinstance(end, str):
            if end != "model":
                raise ValueError(f'end must be a token id, several, None or "model", got {end!r}')
            return self.ends
        return tuple(integer("end", x) for x in (end if isinstance(end, Sequence) else [end]))

    def filler(self, ends: tuple[int, ...] = ()) -> int:
        """What fills rows up: the padding id if the vocabulary has it (old configs say −1 for none), an end, or 0."""
        pad, tokens = self.config.get("pad_token_id"), self.decoder.tokens
        if isinstance(pad, int) and isinstance(tokens, Tokens) and 0 <= pad < tokens.vocab:
            return pad
        return ends[0] if ends else 0

    @property
    def ends(self) -> tuple[int, ...]:
        """The end tokens that the folder names."""
        return self.generation.ids("eos_token_id") or self.config.ids("eos_token_id")

    def _given(self, prompt: Prompt) -> Given:
        if isinstance(prompt, Tensor):
            check_whole("prompt", prompt)
            if prompt.ndim not in (1, 2) or not prompt.numel():
                raise ValueError(f"prompt has shape {list(prompt.shape)}; ids must be [n] or [B, n], at least one each")
            return Given(torch.atleast_2d(prompt).to(self.device, torch.int64), None, "none")
        if isinstance(prompt, str):
            return self._padded([self.text.encode(prompt)], "one")
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray) or not prompt:
            raise TypeError(f"prompt must be a text, texts, token ids or lists of them, got {described(prompt)}")
        if all(isinstance(x, str) for x in prompt):
            return self._padded([self.text.encode(x) for x in prompt if isinstance(x, str)], "many")
        rows: list[Any] = list(prompt) if all(isinstance(x, list | tuple) for x in prompt) else [prompt]
        if not all(isinstance(i, int) and not isinstance(i, bool) for row in rows for i in row):
            raise TypeError("prompt must be a text, texts, whole numbers (token ids) or lists of them, not a mixture")
        return self._padded([list(row) for row in rows], "none")

    def _padded(self, rows: list[list[int]], text: Literal["one", "many", "none"]) -> Given:
        """Rows of one length: filled up on the side where this model reads nothing."""
        if not all(rows):
            raise ValueError("a prompt is empty; give at least one token")
        least, most, vocab = min(map(min, rows)), max(map(max, rows)), self.config.whole("vocab_size")
        if not 0 <= least <= most < vocab:
            raise ValueError(f"token ids go from {least} to {most}; this vocabulary has 0 … {vocab - 1}")
        n = max(map(len, rows))
        filler = self.filler()
        ids = torch.full((len(rows), n), filler, device=self.device)
        real = torch.zeros(len(rows), n, dtype=torch.bool, device=self.device)
        for i, row in enumerate(rows):
            where = slice(n - len(row), n) if self.pads == "left" else slice(0, len(row))
            ids[i, where] = torch.tensor(row, device=self.device)
            real[i, where] = True
        return Given(ids, None if bool(real.all()) else real, text)


def _warn(message: str) -> None:
    """A warning at the line of whoever called us, however deep we are and whatever lies between (torch's modules)."""
    frame, level = sys._getframe(1), 2  # a level of 2 is our caller
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in ("regard", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def _until(ids: list[int], ends: tuple[int, ...]) -> list[int]:
    """The ids before the first end token."""
    return ids[: next((i for i, x in enumerate(ids) if x in ends), len(ids))]
