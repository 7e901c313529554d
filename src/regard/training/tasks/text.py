"""Task "text": a small Llama predicts the next token of English text, with subwords learned from that text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import tokenizers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

from regard._errors import RegardError
from regard._files import atomic_write, save_tensors
from regard.interp._default_probes import BLOCK, TEXTS, TIMES
from regard.interp._probes import Probe, ProbeTokenizer, natural_probe, repeated_probes
from regard.models import Model, create
from regard.models._tokenizer import ByteTokenizer, Tokenizer
from regard.training import _corpus as corpus
from regard.training import _ngram_baselines as ngrams
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training.tasks import common
from regard.training.tasks.induction_aids import draw_initial_biases, repeat_passage, tie_initial_weights

END = "<|endoftext|>"  # between documents, and before every window and every prompt; id 0
BYTE_TOKENS = 256
HELD_OUT_BATCH = 16  # windows
MIN_PASSAGE = 8  # a repeated passage has at least 1/8 of the window

# Stream ids for seeded_generator: each purpose uses different random numbers.
TRAIN = 0
REPETITION = 1


@dataclass(frozen=True)
class _Data:
    """Token ids of both parts: ``END document END … document END``, or the ids of a token array."""

    train: Tensor
    held_out: Tensor
    size: float  # bytes of the held-out text
    vocabulary: int
    tokenizer: bytes | None


class TextTask(Task):
    """Predict the next token in windows of n tokens; the score is bits per byte.

        bits per byte = Σ_held-out −log₂ p(token) / bytes of the held-out text

    - ``data.path``: a text file, a folder of texts, or a token array (``.npy``, ``.safetensors``). If it is empty, the
      text is Python's documentation.
    - ``data.held``: the share of whole documents that are held out; a hash of the name decides.
    - ``data.vocabulary``: tokens of the byte-level BPE tokenizer, which is learned from the other documents only.
    - ``data.window``: n. Held-out windows overlap by half, but every token counts once. It is predicted from at least
      n/2 earlier tokens, or from all of them if there are fewer.
    - ``data.opening``: in this share of the steps, from the first on, windows are half as long and twice as many. Each
      repeats one of its passages at a random place, because short runs on plain text learn no induction heads.
    - ``data.quoted``: the share of the windows that repeat a passage in all later steps.
    - ``model.alike``: whether heads start with tied weights (``induction_aids.tie_initial_weights``).
    - ``data.bytes``: a token array has no tokenizer; each of its ids stands for this many bytes. With the default of 1,
      bits per byte are bits per token.
    """

    name: ClassVar[str] = "text"
    description: ClassVar[str] = "English (Python's documentation, or your own text): a small Llama over subwords"
    default_recipe: ClassVar[Recipe] = Recipe(
        task="text",
        steps=6000,
        batch=4,
        rate=2e-3,
        warmup=200,
        evaluate=500,
        save=500,
        model={
            **{"d": 128, "heads": 4, "layers": 3, "hidden": 352, "tied": True, "bias": True},
            **{"alike": True, "theta": 10000.0, "dropout": 0.0},
        },
        data={
            **{"path": "", "vocabulary": 1024, "window": 256, "opening": 0.25, "quoted": 0.5},
            **{"held": 0.1, "bytes": 1.0},
        },
    )
    score: ClassVar[str] = "bits per byte"
    higher_is_better: ClassVar[bool] = False

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.n = common.integer_setting(recipe, "data.window", 8, common.MAX_TOKENS)
        vocabulary = common.integer_setting(recipe, "data.vocabulary", 2, common.MAX_VOCABULARY)
        self.opening = common.share_setting(recipe, "data.opening")
        self.quoted = common.share_setting(recipe, "data.quoted")
        common.check_batch(recipe, self.n, "tokens")
        # Tied embeddings use one table for input and output.
        tables = 2 - bool(recipe.model["tied"])
        common.check_model_size(recipe, vocabulary * tables, rotary=True)
        self._data: _Data | None = None

    def prepare(self) -> None:
        if self.prepared is not None and not (self.prepared / "tokens.safetensors").exists():
            _write_data(_make_data(self.recipe), self.prepared)

    def open(self) -> None:
        data = _make_data(self.recipe) if self.prepared is None else _read_data(self.prepared)
        for name, ids in (("training", data.train), ("held-out", data.held_out)):
            if len(ids) <= self.n:
                raise RegardError(f"data.window is {self.n}; it must be below the {len(ids)} tokens of the {name} part")
        self._data = data

    @property
    def data(self) -> _Data:
        """The data that ``open`` read."""
        if self._data is None:
            raise RuntimeError("the task is not open; call prepare() and open() first")
        return self._data

    @property
    def end(self) -> int | None:
        """The id of ``<|endoftext|>``; None for a token array, which has no such token."""
        return None if self.data.tokenizer is None else 0

    def model(self) -> Model:
        sizes = self.recipe.model
        config = common.llama_config(sizes, self.data.vocabulary, self.n)
        # The special tokens of the other tasks do not exist here.
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            del config[name]
        config |= {"tie_word_embeddings": sizes["tied"], "attention_dropout": sizes["dropout"]}
        config |= {"attention_bias": sizes["bias"], "rope_theta": sizes["theta"]}
        if self.end is not None:
            config |= {"bos_token_id": self.end, "eos_token_id": self.end}
        model = create(config, extra_files=_tokenizer_files(self.data.tokenizer, self.n), std=0.05)
        if sizes["alike"]:
            tie_initial_weights(model)
        else:
            draw_initial_biases(model)
        return model

    def batch(self, step: int) -> Batch:
        """Return the windows of a step: every window once per epoch, in a new order and from a new first token.

        In the first steps (``data.opening``) each window is cut in two, and each half repeats a passage.
        """
        last = len(self.data.train) - 1
        window_count = max(1, last // self.n - 1)
        starts = []
        for windows, generator in common.examples_by_epoch(self.recipe, TRAIN, step, window_count):
            first = torch.randint(min(self.n, last - window_count * self.n + 1), (), generator=generator)
            starts.append(first + self.n * windows)
        return {"ids": self._repeat_passages(step, torch.cat(starts))}

    def _repeat_passages(self, step: int, starts: Tensor) -> Tensor:
        """Return the windows with these starts, some or all of them with a repeated passage."""
        generator = seeded_generator(self.recipe.seed, REPETITION, step)
        if step < self.opening * self.recipe.steps:
            n = self.n // 2
            windows = self._windows(self.data.train, torch.cat([starts, starts + n]), n)
            chosen = torch.ones(len(windows), dtype=torch.bool)
        else:
            n = self.n
            windows = self._windows(self.data.train, starts, n)
            chosen = torch.rand(len(windows), generator=generator) < self.quoted
        repeated, _ = repeat_passage(windows[:, 1:], max(1, n // MIN_PASSAGE), generator)
        windows[:, 1:] = torch.where(chosen.unsqueeze(-1), repeated, windows[:, 1:])
        return windows

    def _windows(self, ids: Tensor, starts: Tensor, n: int) -> Tensor:
        """Return ``[B, n + 1]``: ``<|endoftext|>``, then the n tokens to predict, which begin at start + 1."""
        windows = ids[starts.unsqueeze(-1) + torch.arange(n + 1)].long()
        if self.end is not None:
            windows[:, 0] = self.end  # one common first token, which heads use as an attention sink
        return windows

    def count_predictions(self, batch: Batch) -> int:
        return int(batch["ids"][:, 1:].numel())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return common.summed_cross_entropy(model(batch["ids"][:, :-1]), batch["ids"][:, 1:])

    def held_out_batches(self) -> Sequence[Batch]:
        last = len(self.data.held_out) - 1
        # The last window ends with the text; it overlaps the one before it by more than half.
        starts = torch.tensor([*range(0, last - self.n, self.n // 2), last - self.n])
        # Tokens before the end of the previous window are counted there.
        already_counted = torch.cat([torch.zeros(1, dtype=torch.int64), starts[:-1] + self.n])
        counted = starts.unsqueeze(-1) + torch.arange(self.n) >= already_counted.unsqueeze(-1)
        windows = self._windows(self.data.held_out, starts, self.n)
        return common.split_batches({"ids": windows, "counted": counted}, HELD_OUT_BATCH)

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        targets = batch["ids"][:, 1:].masked_fill(~batch["counted"], common.IGNORED)
        return {
            "loss": float(common.summed_cross_entropy(model(batch["ids"][:, :-1]), targets)),
            "tokens": float(batch["counted"].sum()),
        }

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        size = self.data.size * sums["tokens"] / (len(self.data.held_out) - 1)
        return {"loss": sums["loss"] / sums["tokens"], "bits per byte": sums["loss"] / math.log(2) / size}

    def baselines(self) -> dict[str, float]:
        """Return the bits per byte of 5-gram models of the same tokens, on the same split."""
        data = self.data
        return ngrams.bits_per_byte(data.train.numpy(), data.held_out.numpy(), data.vocabulary, data.size, self.end)

    def probes(self) -> Sequence[Probe]:
        """Return the probes: held-out text, and blocks of random tokens that are repeated three times."""
        data = self.data
        texts = min(TEXTS, len(data.held_out) // self.n)
        block = min(BLOCK, (data.vocabulary - 1) // TIMES, (self.n - 1) // TIMES)
        if data.tokenizer is None:
            ids = data.held_out[: texts * self.n].long().reshape(texts, self.n)
            natural = Probe("natural", ids, torch.arange(self.n) == 0)
            probe_tokenizer = ProbeTokenizer(ByteTokenizer())
        else:
            tokenizer = Tokenizer(data.tokenizer)
            probe_tokenizer = ProbeTokenizer(tokenizer)
            # More tokens than needed: the decoded text may be tokenized differently.
            text = tokenizer.decode(data.held_out[: (TEXTS + 1) * self.n].tolist())
            natural = natural_probe(probe_tokenizer, self.n, texts, text)
        return [natural, *repeated_probes(probe_tokenizer, block, TIMES, TEXTS, data.vocabulary)]


def _make_data(recipe: Recipe) -> _Data:
    """Read the documents or the token array of a recipe, split it, and tokenize it."""
    share = float(recipe.data["held"])
    vocabulary = int(recipe.data["vocabulary"])
    path = common.user_path("data.path", recipe.data["path"])
    has_path = bool(recipe.data["path"])
    if has_path and path.suffix in corpus.ARRAY_SUFFIXES:
        bytes_per_token = float(recipe.data["bytes"])
        if not 0 < bytes_per_token < math.inf:
            raise RegardError(f"data.bytes is {bytes_per_token:g}; for a token array it must be a finite number > 0")
        train, held_out = corpus.split_documents(corpus.read_token_array(path, vocabulary), share)
        train_ids = _join_pieces(train)
        held_out_ids = _join_pieces(held_out)
        return _Data(train_ids, held_out_ids, (len(held_out_ids) - 1) * bytes_per_token, vocabulary, None)

    least = BYTE_TOKENS + 1
    if vocabulary < least:
        raise RegardError(f"data.vocabulary is {vocabulary}; it must be {least} or more: {BYTE_TOKENS} bytes and {END}")
    documents = corpus.read_documents(path) if has_path else corpus.python_documents()
    train_documents, held_out_documents = corpus.split_documents(documents, share)
    train_texts = [document.text for document in train_documents]
    held_out_texts = [document.text for document in held_out_documents]
    tokenizer = _train_tokenizer(train_texts, vocabulary)
    size = float(sum(len(text.encode()) for text in held_out_texts))
    content = tokenizer.to_str().encode()  # before the next setting, which must not be stored
    # A text that contains "<|endoftext|>" means these characters, not the end of a document.
    tokenizer.encode_special_tokens = True
    streams = (_tokenize(tokenizer, train_texts), _tokenize(tokenizer, held_out_texts))
    return _Data(*streams, size, tokenizer.get_vocab_size(), content)


def _join_pieces(pieces: Sequence[corpus.TokenPiece]) -> Tensor:
    return torch.from_numpy(np.concatenate([piece.ids for piece in pieces]).astype(np.int32))


def _train_tokenizer(texts: Sequence[str], vocabulary: int) -> tokenizers.Tokenizer:
    """Learn a byte-level BPE tokenizer, which can encode every text and puts ``<|endoftext|>`` before it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
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


def _tokenize(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> Tensor:
    """Return one stream of ids: an ``END`` stands before every text and at the end of the stream."""
    parts = [np.array(encoding.ids, dtype=np.int32) for encoding in tokenizer.encode_batch(list(texts))]
    return torch.from_numpy(np.concatenate([*parts, np.zeros(1, dtype=np.int32)]))


def _tokenizer_files(tokenizer: bytes | None, max_tokens: int) -> dict[str, bytes]:
    if tokenizer is None:
        return {}
    # Without this file transformers would read the tokenizer of a Llama as Llama's own type.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
    }
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": (json.dumps(config, indent=2) + "\n").encode()}


def _write_data(data: _Data, folder: Path) -> None:
    """Write the tokenizer, and then ``tokens.safetensors``, whose presence shows that both files are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    if data.tokenizer is not None:
        with atomic_write(folder / "tokenizer.json") as temporary:
            temporary.write_bytes(data.tokenizer)
    numbers = {"size": torch.tensor(data.size, dtype=torch.float64), "vocabulary": torch.tensor(data.vocabulary)}
    with atomic_write(folder / "tokens.safetensors") as temporary:
        save_tensors({"train": data.train, "held": data.held_out, **numbers}, temporary)


def _read_data(folder: Path) -> _Data:
    file = folder / "tokens.safetensors"
    if not file.is_file():
        raise RegardError(f"{file} does not exist; prepare() writes it")
    tokenizer_file = folder / "tokenizer.json"
    tokenizer = tokenizer_file.read_bytes() if tokenizer_file.is_file() else None
    try:
        stored = load_file(file)
        size = float(stored["size"])
        return _Data(stored["train"], stored["held"], size, int(stored["vocabulary"]), tokenizer)
    except (SafetensorError, KeyError) as error:
        raise RegardError(f"{file} is truncated, or prepare() did not write it: {error}") from None
