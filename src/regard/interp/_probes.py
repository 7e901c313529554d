"""Probes: texts that reveal a type of head, control texts that must not, and how to run a model on them.

natural    ordinary English: the documentation of Python, which every machine has
repeated   a block of random tokens, several times: a head can look up which token followed the last time
random     the same number of tokens, all different: nothing can be looked up; the control of ``repeated``
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_integer
from regard._errors import RegardError
from regard.interp._default_probes import (
    BLOCK,
    CHARACTERS_PER_TOKEN,
    FEWEST_TOKENS,
    NOISE_IMAGES,
    TEXTS,
    TIMES,
    TOKENS,
    documentation_text,
)
from regard.interp.huggingface import is_pretrained
from regard.nn import EncoderDecoder


@dataclass(frozen=True)
class Probe:
    """Texts of one kind for a model to read.

    - ``name``: "natural", "repeated" or "random".
    - ``ids``: token ids ``[B, n]``, or the images of an image model.
    - ``special``: bool ``[n]``, the first token and the tokens that the tokenizer puts around every text.
    - ``block``: tokens per block of a repeated text, 0 in other texts.
    - ``start``: where the first block begins.
    """

    name: str
    ids: Tensor
    special: Tensor
    block: int = 0
    start: int = 0

    def later_rows(self) -> Tensor:
        """The rows from the second block on, bool ``[n]``."""
        position = torch.arange(self.ids.shape[1]) - self.start
        return (position >= self.block) & ~self._outside_blocks()

    def matching_keys(self, shift: int, queries: Tensor) -> Tensor:
        """Bool ``[queries, n]``: the keys that are ``shift`` tokens after an earlier copy of the query's token.

        ``shift=0`` gives the keys with the query's own token. ``shift=1`` gives the keys that followed those: the keys
        that an induction head attends to.
        """
        i = queries.unsqueeze(-1)
        j = torch.arange(self.ids.shape[1])
        distance = i - j + shift
        inside = ~self._outside_blocks()
        is_earlier = (distance > 0) & (distance % self.block == 0) & (j <= i)
        has_predecessor = j >= self.start + shift  # the first token of the first block followed no token
        return is_earlier & has_predecessor & inside & inside[queries].unsqueeze(-1)

    def _outside_blocks(self) -> Tensor:
        position = torch.arange(self.ids.shape[1]) - self.start
        end = self.ids.shape[1] // self.block * self.block
        return (position < 0) | (position >= end) | (self.special & (position != 0))


class ProbeTokenizer:
    """A tokenizer of regard, ``transformers`` or ``tokenizers``: ids of a text, and which ids are special tokens.

    ``prefix`` and ``suffix`` are the ids that the tokenizer puts around every text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        whole = self.ids("a")
        plain = self.plain_ids("a")
        if not plain:
            raise RegardError("the tokenizer has no token for 'a'; a text model needs one that reads English")
        # The prefix and the suffix are what stands around the tokens of a short text.
        start = 0
        for k in range(len(whole)):
            if whole[k : k + len(plain)] == plain:
                start = k
                break
        self.prefix = whole[:start]
        self.suffix = whole[start + len(plain) :]
        self.special = {*self.prefix, *self.suffix, *self._declared_special_ids()}

    def ids(self, text: str) -> list[int]:
        """The ids of a text, with the prefix and the suffix."""
        encoded = self.tokenizer.encode(text)
        return list(getattr(encoded, "ids", encoded))

    def plain_ids(self, text: str) -> list[int]:
        """The ids of a text alone."""
        try:
            encoded = self._inner().encode(text, add_special_tokens=False)
        except TypeError:  # a byte tokenizer has no special tokens, and no such option
            encoded = self.tokenizer.encode(text)
        return list(getattr(encoded, "ids", encoded))

    def __len__(self) -> int:
        if hasattr(self.tokenizer, "get_vocab_size"):
            return int(self.tokenizer.get_vocab_size())
        return len(self.tokenizer)

    def _inner(self) -> Any:
        """The tokenizer itself: regard's tokenizer holds one of ``tokenizers``."""
        return getattr(self.tokenizer, "_backend", self.tokenizer)

    def _declared_special_ids(self) -> set[int]:
        inner = self._inner()
        if hasattr(inner, "all_special_ids"):
            return set(inner.all_special_ids)
        if hasattr(inner, "get_added_tokens_decoder"):
            return {i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        return set()


@dataclass(frozen=True)
class ProbeSet:
    """The probes of one measurement, and what they are: a phrase that is shown with the head types."""

    probes: Sequence[Probe]
    description: str


def text_probes(
    model: nn.Module,
    tokenizer: Any,
    text: str | None = None,
    tokens: int | None = None,
    block: int | None = None,
) -> ProbeSet:
    """The text probes of the atlas and of the recorder, shortened to what the model and its vocabulary allow.

    - ``tokenizer``: of ``transformers``, ``tokenizers`` or regard.
    - ``text``: the natural text; Python's documentation by default. A tokenizer that does not read English gets random
      tokens instead.
    - ``tokens``: tokens per natural text; ``TOKENS`` by default, or what the model reads.
    - ``block``: tokens in the repeated block; ``BLOCK`` by default, or what fits.
    """
    probe_tokenizer = ProbeTokenizer(tokenizer)
    vocabulary = vocabulary_size(model, probe_tokenizer)
    if tokens is None:
        tokens = min(TOKENS, _most_tokens(model))
    if block is None:
        # The repeated text must fit between the special tokens, and needs that many different ordinary tokens.
        inside = tokens - len(probe_tokenizer.prefix) - len(probe_tokenizer.suffix)
        block = min(BLOCK, inside // TIMES, len(_ordinary_tokens(probe_tokenizer, vocabulary)) // TIMES)
    natural = natural_probe(probe_tokenizer, tokens, TEXTS, text)
    content = "Python's documentation" if text is None else "a text of the user"
    if text is None and _reads_no_english(natural):
        natural = _random_text(probe_tokenizer, tokens, vocabulary)
        content = "random tokens, because the tokenizer does not read English"
    probes = [natural, *repeated_probes(probe_tokenizer, block, TIMES, TEXTS, vocabulary)]
    return ProbeSet(probes, f"{content}, {tokens} tokens; {TIMES} × {block} repeated tokens")


def noise_probes(channels: int, height: int, width: int) -> ProbeSet:
    """Images of random noise: a head that attends to the same offsets in noise does not depend on the image."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(NOISE_IMAGES, channels, height, width, generator=generator) * 2 - 1
    return ProbeSet([image_probe(images)], f"{NOISE_IMAGES} images of random noise")


def image_probe(images: Tensor) -> Probe:
    """Images ``[B, C, height, width]`` as a probe; there are no other probes of an image model."""
    return Probe("natural", images, torch.zeros(0, dtype=torch.bool))


def _most_tokens(model: nn.Module) -> int:
    """How many tokens the model reads, if its config says so; otherwise ``TOKENS``."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    # Our configs are mappings; those of transformers are objects.
    settings = getattr(config, "__dict__", {})
    if isinstance(config, Mapping):
        settings = config
    limits = [TOKENS]
    for name in ("max_position_embeddings", "n_positions"):
        value = settings.get(name)
        if isinstance(value, int) and value > 0:
            limits.append(value)
    return min(limits)


def _reads_no_english(natural: Probe) -> bool:
    """Whether English text has almost no different tokens: a tokenizer of other words makes all of them unknown."""
    inside = natural.ids[:, ~natural.special]
    return len(inside.unique()) < min(FEWEST_TOKENS, inside.numel() // 4)


def _random_text(tokenizer: ProbeTokenizer, n: int, vocabulary: int) -> Probe:
    """Texts of n tokens, each drawn from all ordinary tokens, so that some tokens occur again."""
    ordinary = _ordinary_tokens(tokenizer, vocabulary)
    inside = n - len(tokenizer.prefix) - len(tokenizer.suffix)
    generator = torch.Generator().manual_seed(0)
    choice = torch.randint(len(ordinary), (TEXTS, inside), generator=generator)
    return _make_probe(tokenizer, "natural", ordinary[choice])


def _ordinary_tokens(tokenizer: ProbeTokenizer, vocabulary: int) -> Tensor:
    return torch.tensor([i for i in range(vocabulary) if i not in tokenizer.special])


def natural_probe(tokenizer: ProbeTokenizer, n: int, texts: int, text: str | None = None) -> Probe:
    """Up to ``texts`` consecutive pieces of ``text``, each of n tokens; Python's documentation by default."""
    around = len(tokenizer.prefix) + len(tokenizer.suffix)
    inside = n - around
    if inside < 2:
        raise RegardError(f"tokens must be at least {around + 2}, {around} of them around every text, got {n}")
    if text is None:
        text = documentation_text()
    ids = tokenizer.plain_ids(text[: CHARACTERS_PER_TOKEN * inside * texts])
    if len(ids) < inside:
        raise RegardError(f"text must have at least {inside} tokens, got {len(ids)}")
    count = min(texts, len(ids) // inside)
    pieces = torch.tensor(ids[: count * inside]).reshape(count, inside)
    return _make_probe(tokenizer, "natural", pieces)


def repeated_probes(
    tokenizer: ProbeTokenizer, block: int, times: int, texts: int, vocabulary: int
) -> tuple[Probe, Probe]:
    """Return a block of random tokens, repeated ``times`` times, and its control: same length, all tokens different."""
    check_integer("block", block, least=2)
    ordinary = _ordinary_tokens(tokenizer, vocabulary)
    needed = block * times
    if len(ordinary) < needed:
        raise RegardError(f"the vocabulary must have at least {needed} ordinary tokens, got {len(ordinary)}")
    # Always the same tokens, so that two runs give the same scores.
    generator = torch.Generator().manual_seed(0)
    rows = [ordinary[torch.randperm(len(ordinary), generator=generator)[:needed]] for _ in range(texts)]
    different = torch.stack(rows)
    repeated = different[:, :block].repeat(1, times)
    return _make_probe(tokenizer, "repeated", repeated, block), _make_probe(tokenizer, "random", different, block)


def _make_probe(tokenizer: ProbeTokenizer, name: str, ids: Tensor, block: int = 0) -> Probe:
    def for_each_text(tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)] * len(ids), dtype=torch.int64).reshape(len(ids), len(tokens))

    whole = torch.cat([for_each_text(tokenizer.prefix), ids, for_each_text(tokenizer.suffix)], 1)
    position = torch.arange(whole.shape[1])
    start = len(tokenizer.prefix)
    end = whole.shape[1] - len(tokenizer.suffix)
    special = (position == 0) | (position < start) | (position >= end)
    return Probe(name, whole, special, block, start)


def run_model(model: nn.Module, inputs: Tensor) -> Any:
    """Run a model on token ids or images; an encoder–decoder gets them as its source and as its target.

    >>> run_model(regard.nn.EncoderDecoder(6, heads=3, layers=1, vocab=11), torch.tensor([[1, 2, 3]])).shape
    torch.Size([1, 3, 11])
    """
    parameter = next(model.parameters(), inputs)
    inputs = inputs.to(parameter.device)
    if inputs.is_floating_point():
        inputs = inputs.to(parameter.dtype)
    if is_pretrained(model):
        config: Any = model.config
        named_inputs = {str(model.main_input_name): inputs}
        if config.is_encoder_decoder:
            named_inputs["decoder_input_ids"] = inputs
        return model(**named_inputs)
    if any(isinstance(module, EncoderDecoder) for module in model.modules()):
        return model(inputs, inputs)
    return model(inputs)


def vocabulary_size(model: nn.Module, tokenizer: ProbeTokenizer) -> int:
    """How many tokens both the model and the tokenizer know.

    >>> from regard.models._tokenizer import ByteTokenizer
    >>> vocabulary_size(regard.nn.Decoder(6, heads=3, layers=1, vocab=100), ProbeTokenizer(ByteTokenizer()))
    100
    """
    config: Any = getattr(model, "config", None)
    if hasattr(config, "get_text_config"):
        return min(len(tokenizer), int(config.get_text_config().vocab_size))
    tables = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return min(len(tokenizer), max(tables, default=len(tokenizer)))
