"""Text: a small Llama learns what comes next in English, in subwords learned from the same text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from regard.files import renamed, save_tensors
from regard.models import Model, create
from regard.models.text import Bytes, Text
from regard.training import corpus, ngrams
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks.common import (
    LONGEST,
    NOTHING,
    VOCABULARY,
    check_batch,
    check_sizes,
    in_parts,
    llama,
    own_path,
    share,
    summed,
    whole,
)
from regard.training.tasks.looking_back import begin_alike, begin_apart, said_again
from regard.watching.probes import Probe, Reader, natural, repeated

__all__ = ["END", "TextTask"]

END = "<|endoftext|>"  # between documents, and before every window and every prompt; id 0
BYTES = 256
TRAIN, AGAIN = 0, 1  # what is drawn
CHECKED = 16  # held-out windows at once
TEXTS, BLOCK, TIMES = 2, 48, 3  # of the probes, as an atlas asks
SHORTEST = 8  # a passage that is said again has an eighth of the window at least


@dataclass(frozen=True)
class _Data:
    """Both parts as ids: ``<|endoftext|> document <|endoftext|> … document <|endoftext|>``, or what an array holds."""

    train: Tensor
    held: Tensor
    size: float  # bytes of the held-out text
    vocabulary: int
    tokenizer: bytes | None


class TextTask(Task):
    """``id_1 … id_n → p(id_2) … p(id_{n+1})`` over windows of n tokens; the score is bits per byte:

        Σ_held-out −log₂ p(token) / bytes of the held-out text

    The text is Python's documentation (``corpus``), or ``data.path``: a text file, a folder of texts, a token array
    (``.npy``, ``.safetensors``). About ``data.held`` of the documents are held out, whole, by a hash of their names;
    the tokenizer (byte-level BPE of ``data.vocabulary`` tokens) is learned from the others alone. Held-out windows
    overlap by half: every token is counted once, after n/2 others at least where that many stand before it.

    Text that short runs can read brings no head to look up what followed before. So during the first ``data.opening``
    of the steps windows are half as long, twice as many, and each says a passage of its own again, anywhere
    (``looking_back``); after that ``data.quoted`` of the windows do. 0 and 0 leave the text as it is. And with
    ``model.alike`` heads begin with q and k, v and o alike.

    An array brings no tokenizer: its ids lie below ``data.vocabulary``, and each stands for ``data.bytes`` bytes, 1
    unless said, so that bits per byte are bits per token.
    """

    name: ClassVar[str] = "text"
    about: ClassVar[str] = "English (Python's documentation, or your own text): a small Llama over subwords"
    recipe: ClassVar[Recipe] = Recipe(
        task="text",
        steps=6000,
        batch=4,
        rate=2e-3,
        warmup=200,
        evaluate=500,
        save=500,
        model={
            "d": 128,
            "heads": 4,
            "layers": 3,
            "hidden": 352,
            "tied": True,
            "bias": True,
            "alike": True,
            "theta": 10000.0,
            "dropout": 0.0,
        },
        data={
            "path": "",
            "vocabulary": 1024,
            "window": 256,
            "opening": 0.25,
            "quoted": 0.5,
            "held": 0.1,
            "bytes": 1.0,
        },
    )
    score: ClassVar[str] = "bits per byte"
    higher: ClassVar[bool] = False

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.n = whole(recipe, "data.window", 8, LONGEST)
        vocabulary = whole(recipe, "data.vocabulary", 2, VOCABULARY)
        self.opening, self.quoted = (share(recipe, f"data.{name}") for name in ("opening", "quoted"))
        check_batch(recipe, self.n, "tokens")
        check_sizes(recipe, vocabulary * (1 if recipe.model["tied"] else 2), rotary=True)
        self._opened: _Data | None = None

    def prepare(self) -> None:
        if self.prepared is not None and not (self.prepared / "tokens.safetensors").exists():
            _write(_made(self.given), self.prepared)

    def open(self) -> None:
        data = _made(self.given) if self.prepared is None else _read(self.prepared)
        for name, ids in (("training", data.train), ("held-out", data.held)):
            if len(ids) <= self.n:
                raise ValueError(
                    f"the {name} part has {len(ids)} tokens, too few for a window of {self.n}; give more text, or a "
                    f"smaller data.window"
                )
        self._opened = data

    @property
    def data(self) -> _Data:
        """What ``open`` read."""
        if self._opened is None:
            raise RuntimeError("the task is not open; call prepare() and open() first")
        return self._opened

    @property
    def end(self) -> int | None:
        """The id of ``<|endoftext|>``; token arrays have none of ours."""
        return None if self.data.tokenizer is None else 0

    def model(self) -> Model:
        sizes, data = self.given.model, self.data
        ends = {} if self.end is None else {"bos_token_id": self.end, "eos_token_id": self.end}
        config = {
            **{k: v for k, v in llama(sizes, data.vocabulary, self.n).items() if not k.endswith("token_id")},
            **{"tie_word_embeddings": sizes["tied"], "attention_dropout": sizes["dropout"]},
            **{"attention_bias": sizes["bias"], "rope_theta": sizes["theta"]},
            **ends,
        }
        model = create(config, beside=_beside(data.tokenizer, self.n), std=0.05)
        (begin_alike if sizes["alike"] else begin_apart)(model)
        return model

    def batch(self, step: int) -> Batch:
        """Every window once an epoch, in an order and from a first token that are drawn anew for each.

        In the opening each is cut in two, and in every half a passage is said again.
        """
        last = len(self.data.train) - 1
        many = max(1, last // self.n - 1)
        wanted = torch.arange(step * self.given.batch, (step + 1) * self.given.batch)
        starts = []
        for epoch in range(int(wanted[0]) // many, int(wanted[-1]) // many + 1):
            draw = drawn(self.given.seed, TRAIN, epoch)
            order = torch.randperm(many, generator=draw)
            first = torch.randint(min(self.n, last - many * self.n + 1), (), generator=draw)
            starts.append(first + self.n * order[wanted[wanted // many == epoch] % many])
        return {"ids": self._said_again(step, torch.cat(starts))}

    def _said_again(self, step: int, starts: Tensor) -> Tensor:
        """The windows that begin there, some or all of them with a passage that is said again."""
        draw = drawn(self.given.seed, AGAIN, step)
        if step < self.opening * self.given.steps:
            n = self.n // 2
            found = self._windows(self.data.train, torch.cat([starts, starts + n]), n)
            chosen = torch.ones(len(found), dtype=torch.bool)
        else:
            n = self.n
            found = self._windows(self.data.train, starts, n)
            chosen = torch.rand(len(found), generator=draw) < self.quoted
        again, _ = said_again(found[:, 1:], max(1, n // SHORTEST), draw)
        found[:, 1:] = torch.where(chosen.unsqueeze(-1), again, found[:, 1:])
        return found

    def _windows(self, ids: Tensor, starts: Tensor, n: int) -> Tensor:
        """``[B, n + 1]``: the n tokens to predict stand at start + 1 …; before them stands ``<|endoftext|>``."""
        found = ids[starts.unsqueeze(-1) + torch.arange(n + 1)].long()
        if self.end is not None:
            found[:, 0] = self.end  # one token that every window begins with: heads come to rest on it
        return found

    def count(self, batch: Batch) -> int:
        return int(batch["ids"][:, 1:].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return summed(model(batch["ids"][:, :-1]), batch["ids"][:, 1:])

    def checks(self) -> Sequence[Batch]:
        last = len(self.data.held) - 1
        starts = torch.tensor([*range(0, last - self.n, self.n // 2), last - self.n])
        before = torch.cat([torch.zeros(1, dtype=torch.int64), starts[:-1] + self.n])  # what is counted already
        counted = starts.unsqueeze(-1) + torch.arange(self.n) >= before.unsqueeze(-1)
        return in_parts({"ids": self._windows(self.data.held, starts, self.n), "counted": counted}, CHECKED)

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        targets = batch["ids"][:, 1:].masked_fill(~batch["counted"], NOTHING)
        return {
            "loss": float(summed(model(batch["ids"][:, :-1]), targets)),
            "tokens": float(batch["counted"].sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        size = self.data.size * sums["tokens"] / (len(self.data.held) - 1)
        return {"loss": sums["loss"] / sums["tokens"], "bits per byte": sums["loss"] / math.log(2) / size}

    def baselines(self) -> dict[str, float]:
        """Bits per byte of 5-gram models, of the same tokens and the same split."""
        data = self.data
        return ngrams.bits_per_byte(data.train.numpy(), data.held.numpy(), data.vocabulary, data.size, self.end)

    def probes(self) -> Sequence[Probe]:
        """Held-out text, and blocks of random tokens said three times."""
        data, texts = self.data, min(TEXTS, len(self.data.held) // self.n)
        block = min(BLOCK, (data.vocabulary - 1) // TIMES, (self.n - 1) // TIMES)
        if data.tokenizer is None:
            ids = data.held[: texts * self.n].long().reshape(texts, self.n)
            first = Probe("natural", ids, torch.arange(self.n) == 0)
            return [first, *repeated(Reader(Bytes()), block, TIMES, TEXTS, data.vocabulary)]
        text = Text(data.tokenizer)
        reader = Reader(text)
        # Some more than is asked for: what is cut from the text may be read as other tokens than stand in it.
        said = text.decode(data.held[: (TEXTS + 1) * self.n].tolist())
        return [natural(reader, self.n, texts, said), *repeated(reader, block, TIMES, TEXTS, data.vocabulary)]


def _made(recipe: Recipe) -> _Data:
    told, held_out, vocabulary = recipe.data["path"], float(recipe.data["held"]), int(recipe.data["vocabulary"])
    path = own_path("data.path", told)
    if told and corpus.is_tokens(path):
        if not 0 < float(recipe.data["bytes"]) < math.inf:
            raise ValueError(
                f"data.bytes is {recipe.data['bytes']}; of a token array it is how many bytes an id stands for, above 0"
            )
        parts = corpus.split(corpus.own_tokens(path, vocabulary), held_out)
        train, held = (torch.from_numpy(np.concatenate([x.ids for x in part]).astype(np.int32)) for part in parts)
        return _Data(train, held, (len(held) - 1) * float(recipe.data["bytes"]), vocabulary, None)
    least = BYTES + 1
    if vocabulary < least:
        raise ValueError(f"data.vocabulary is {vocabulary}; it must be {least} or more: {BYTES} bytes and {END}")
    documents = corpus.own_documents(path) if told else corpus.python_documents()
    texts, kept = ([x.text for x in part] for part in corpus.split(documents, held_out))
    tokenizer = _learned(texts, vocabulary)
    size = float(sum(len(text.encode()) for text in kept))
    content = tokenizer.to_str().encode()
    # A text that says "<|endoftext|>" means these characters: they are read as such, and no document ends there.
    tokenizer.encode_special_tokens = True
    return _Data(_stream(tokenizer, texts), _stream(tokenizer, kept), size, tokenizer.get_vocab_size(), content)


def _learned(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte-level BPE: every text can be written with it. A text it reads begins with ``<|endoftext|>``."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def _stream(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    parts = [np.array(x.ids, dtype=np.int32) for x in tokenizer.encode_batch(list(texts))]  # each after an END
    return torch.from_numpy(np.concatenate([*parts, np.zeros(1, dtype=np.int32)]))


def _beside(tokenizer: bytes | None, longest: int) -> dict[str, bytes]:
    if tokenizer is None:
        return {}
    # Without it transformers reads the tokenizer of a Llama as Llama's own, which is another kind.
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": longest,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": (json.dumps(told, indent=2) + "\n").encode()}


def _write(data: _Data, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if data.tokenizer is not None:
        with renamed(folder / "tokenizer.json") as temporary:
            temporary.write_bytes(data.tokenizer)
    numbers = {"size": torch.tensor(data.size, dtype=torch.float64), "vocabulary": torch.tensor(data.vocabulary)}
    with renamed(folder / "tokens.safetensors") as temporary:  # last: where it stands all is there
        save_tensors({"train": data.train, "held": data.held, **numbers}, temporary)


def _read(folder: Path) -> _Data:
    file = folder / "tokens.safetensors"
    if not file.is_file():
        raise ValueError(f"{file} is not there; prepare() writes it")
    try:
        found = load_file(file)
        train, held = found["train"], found["held"]
        size, vocabulary = float(found["size"]), int(found["vocabulary"])
    except (SafetensorError, KeyError) as error:
        raise ValueError(f"{file} is truncated or was written by something else: {error}") from None
    tokenizer = folder / "tokenizer.json"
    return _Data(train, held, size, vocabulary, tokenizer.read_bytes() if tokenizer.is_file() else None)
