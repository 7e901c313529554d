"""Text in and out of models: tokenizers, bytes, streams, and tokens drawn as `transformers` draws them."""

from __future__ import annotations

import json
import random
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from support.checkpoints import make, write
from support.model_configs import GPT2, T5
from tokenizers import decoders, pre_tokenizers, processors, trainers
from tokenizers import models as kinds
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from regard.models import Sampling, load
from regard.models._tokenizer import ByteTokenizer, Tokenizer

SENTENCES = [
    "the quick brown fox doesn't jump, it walks!",
    "één jaar in 日本, with an emoji 🎉 and 👩‍👩‍👧 words",
    "hello world. hello again",
]
HARD = [*SENTENCES, "naïve café", "日本語", "🎉🎉 🇧🇪", "  two  spaces ", "line\nbreak\ttab", "�", "x", "", "Z͑͗ḁ̈lgo"]


def byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(kinds.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=283, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    whole = [word for sentence in SENTENCES for word in re.findall(r"\w+|[^\w\s]+", sentence)]
    letters = [letter for word in whole for letter in word]
    vocabulary = dict.fromkeys(["[UNK]", "[CLS]", "[SEP]", *whole[::2], *letters, *(f"##{x}" for x in letters)])
    tokenizer = tokenizers.Tokenizer(kinds.WordPiece({x: i for i, x in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """As Llama 2's: pieces of text, and one token a byte for what they do not cover."""
    tokenizer = tokenizers.Tokenizer(kinds.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=331, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES[::2], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:1]
    return tokenizers.Tokenizer.from_str(json.dumps(content))


MAKERS = [byte_level, word_piece, byte_fallback]


def our_tokenizer(tokenizer: tokenizers.Tokenizer) -> Tokenizer:
    return Tokenizer(tokenizer.to_str().encode())


@pytest.mark.parametrize("sentence", HARD)
def test_round_trips(sentence: str) -> None:
    for text in (our_tokenizer(byte_level()), ByteTokenizer()):
        assert text.decode(text.encode(sentence)) == sentence
        assert "".join(text.decode_stream(iter(text.encode(sentence)))) == sentence
    if not sentence.startswith(" "):
        text = our_tokenizer(byte_fallback())
        assert text.decode(text.encode(sentence)) == sentence
        assert "".join(text.decode_stream(iter(text.encode(sentence)))) == sentence


def test_words_with_special_tokens() -> None:
    text = our_tokenizer(word_piece())
    found = text.encode("hello world")
    assert [found[0], found[-1]] == [1, 2] and text.decode(found) == "hello world"
    assert text.tokens(found) == ["[CLS]", "hello", "w", "##o", "##r", "##l", "##d", "[SEP]"]
    assert text.tokens([1, 1000]) == ["[CLS]", "<1000>"]
    both, types = text.encode_pair("hello again", "the brown")
    assert text.tokens(both) == ["[CLS]", "hello", "again", "[SEP]", "the", "brown", "[SEP]"]
    assert types == [0, 0, 0, 0, 1, 1, 1]
    assert len(text) == word_piece().get_vocab_size()


def test_bytes() -> None:
    text = ByteTokenizer()
    assert text.encode("é!") == [0xC3, 0xA9, 0x21] and len(text) == 256
    assert text.tokens([0x21, 0xC3, 300]) == ["!", "<c3>", "<300>"]
    assert text.decode([0x21, 300, 0xC3]) == "!�"


@pytest.mark.parametrize("maker", MAKERS)
def test_what_the_file_cuts_off_or_pads_is_left_whole(maker: Callable[[], tokenizers.Tokenizer]) -> None:
    plain, cutting = maker(), maker()
    cutting.enable_truncation(max_length=5)
    cutting.enable_padding(length=50)
    for sentence in SENTENCES:
        assert len(cutting.encode(sentence).ids) == 50
        assert our_tokenizer(cutting).encode(sentence) == plain.encode(sentence).ids


@pytest.mark.parametrize("maker", [*MAKERS, ByteTokenizer])
def test_pieces_of_any_ids_join_to_their_text(maker: Any) -> None:
    """Also of ids that no text has: broken characters, special tokens, ids beyond the vocabulary."""
    text = ByteTokenizer() if maker is ByteTokenizer else our_tokenizer(maker())
    draw = random.Random(0)
    for _ in range(300):
        ids = [draw.randrange(len(text) + 3) for _ in range(draw.randint(0, 25))]
        assert "".join(text.decode_stream(iter(ids))) == text.decode(ids)


@pytest.mark.parametrize("maker", [byte_level, byte_fallback, ByteTokenizer])
def test_pieces_are_whole_characters_as_soon_as_they_are(maker: Any) -> None:
    text = ByteTokenizer() if maker is ByteTokenizer else our_tokenizer(maker())
    read = 0

    def counted(ids: list[int]) -> Any:
        nonlocal read
        for read, i in enumerate(ids, start=1):  # noqa: B007 (what has been read is what we look at)
            yield i

    ids = text.encode("ab 日本 é🎉 and hello again")
    pieces = text.decode_stream(counted(ids))
    first = next(pieces)
    assert "ab".startswith(first.strip()) and read <= 2
    rest = list(pieces)
    assert len(rest) > 5 and not any("�" in piece or piece == "" for piece in rest)


def test_refusals() -> None:
    for text in (our_tokenizer(byte_level()), ByteTokenizer()):
        with pytest.raises(TypeError, match="a text must be a str, got bytes"):
            text.encode(b"x")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read"):
        Tokenizer(b"not json")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder and an encoder–decoder over the byte-level vocabulary, and a decoder over bytes."""
    size = {"vocab_size": 283, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
    models = {
        "decoder": make("GPT2LMHeadModel", GPT2 | size | {"n_positions": 61}),
        "answers": make("T5ForConditionalGeneration", T5 | size),
        "bytes": make("GPT2LMHeadModel", GPT2 | size | {"vocab_size": 256, "n_positions": 61}),
    }
    found = {name: write(model, tmp_path_factory.mktemp(name)) for name, model in models.items()}
    for name in ("decoder", "answers"):
        byte_level().save(str(found[name] / "tokenizer.json"))
    return found


DRAWN = {"temperature": 1.5, "top_k": 100, "top_p": 0.95}


@pytest.mark.parametrize("name", ["decoder", "answers", "bytes"])
def test_text_for_text(name: str, folders: dict[str, Path]) -> None:
    model = load(folders[name])
    assert isinstance(model.tokenizer, ByteTokenizer) == (name == "bytes")
    for seed in range(5):
        ids = model.generate([model.tokenizer.encode("hello é")], 31, seed=seed, **DRAWN)
        assert isinstance(ids, torch.Tensor) and ids.ndim == 2
        one = model.generate("hello é", 31, seed=seed, **DRAWN)
        assert one == model.tokenizer.decode([i for i in ids[0].tolist() if i != 0])
        assert "".join(model.stream("hello é", 31, seed=seed, **DRAWN)) == one
    many = model.generate(["hello é", "the"], 9)
    assert isinstance(many, list) and len(many) == 2 and all(isinstance(x, str) for x in many)
    assert many == [model.generate("hello é", 9), model.generate("the", 9)]


def test_seeds(folders: dict[str, Path]) -> None:
    model = load(folders["decoder"])
    drawn = [model.generate("hello", 20, seed=seed, end=None, **DRAWN) for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    torch.manual_seed(5)
    first = model.generate("hello", 20, end=None, **DRAWN)
    assert model.generate("hello", 20, end=None, **DRAWN) != first
    torch.manual_seed(5)
    assert model.generate("hello", 20, end=None, **DRAWN) == first


def test_ends_stop_and_are_not_printed(folders: dict[str, Path]) -> None:
    model = load(folders["bytes"])
    ids = model.generate([[3, 4, 5]], 20, end=None, seed=1, temperature=2.0)[0].tolist()
    end = ids[7]
    first = ids.index(end)
    prompt = "\x03\x04\x05"
    options: dict[str, Any] = {"seed": 1, "temperature": 2.0}
    for given in (end, [end], (end, 999)):
        assert model.generate([[3, 4, 5]], 20, end=given, **options)[0].tolist() == ids[: first + 1]
        assert model.generate(prompt, 20, end=given, **options) == ByteTokenizer().decode(ids[:first])
        assert "".join(model.stream(prompt, 20, end=given, **options)) == ByteTokenizer().decode(ids[:first])
    model.generation_config["eos_token_id"] = [end]
    assert model.generate([[3, 4, 5]], 20, **options)[0].tolist() == ids[: first + 1]


def test_rows_that_ended_are_filled_up(folders: dict[str, Path]) -> None:
    model = load(folders["bytes"])
    free = model.generate([[3, 4, 5], [6, 7]], 12, end=None)
    end = int(free[0, 2])
    found = model.generate([[3, 4, 5], [6, 7]], 12, end=end)
    for row, whole in zip(found.tolist(), free.tolist(), strict=True):
        kept = whole[: whole.index(end) + 1] if end in whole else whole
        assert row[: len(kept)] == kept[: len(row)] and set(row[len(kept) :]) <= {0}


def test_no_tokens_at_all(folders: dict[str, Path]) -> None:
    model = load(folders["decoder"])
    assert model.generate("hello", 0) == "" and list(model.stream("hello", 0)) == []
    assert model.generate([[3], [4, 5]], 0).shape == (2, 0)


def warped(logits: torch.Tensor, temperature: float, k: int | None, p: float | None) -> torch.Tensor:
    x = TemperatureLogitsWarper(temperature)(None, logits)
    x = x if k is None else TopKLogitsWarper(k)(None, x)
    return x if p is None else TopPLogitsWarper(p)(None, x)


@pytest.mark.parametrize("k", [None, 1, 2, 7, 53, 100])
@pytest.mark.parametrize("p", [None, 0.01, 0.3, 0.7, 0.95, 0.999])
def test_filters_are_theirs(k: int | None, p: float | None) -> None:
    g = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 3.0):
        logits = 3 * torch.randn(11, 53, generator=g)
        found, expected = Sampling(temperature, k, p).filter(logits), warped(logits, temperature, k, p)
        assert torch.equal(found.isinf(), expected.isinf())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        assert bool(found.isfinite().any(-1).all())


def test_ties_and_dtypes() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    assert Sampling(1.0, top_k=2).filter(logits).isfinite().tolist() == [[False, True, True, True, False]]
    assert Sampling()(torch.tensor([[1.0, 5.0, 5.0]])).tolist() == [1]
    assert Sampling(2.0).filter(logits.half()).dtype == torch.float32
    assert Sampling(2.0).filter(logits.double()).dtype == torch.float64


@pytest.mark.parametrize("options", [(1.0, None, None), (0.7, 4, None), (2.0, None, 0.8), (1.3, 6, 0.9)])
def test_frequencies_of_drawn_tokens(options: tuple[float, int | None, float | None]) -> None:
    """Pearson's χ² of 40,000 draws, below the 0.999 quantile of its distribution."""
    sampling, draws = Sampling(*options), 40_000
    logits = 1.5 * torch.randn(1, 11, generator=torch.Generator().manual_seed(1))
    p = sampling.filter(logits)[0].softmax(-1).double()
    drawn = sampling(logits.expand(draws, -1), torch.Generator().manual_seed(2))
    counts = torch.bincount(drawn, minlength=11).double()
    allowed = p > 0
    assert counts[~allowed].sum() == 0
    statistic = ((counts - draws * p)[allowed] ** 2 / (draws * p[allowed])).sum()
    quantile = torch.distributions.Chi2(allowed.sum() - 1.0).cdf(statistic)
    assert 0 < quantile < 0.999


def test_texts_for_a_vocabulary_that_is_not_bytes_are_refused(tmp_path: Path) -> None:
    """Older tokenizer files, or a large vocabulary without any: ids work, a text would be written as garbage."""
    large = write(make("GPT2LMHeadModel", GPT2 | {"vocab_size": 2000}), tmp_path / "large")
    older = write(make("GPT2LMHeadModel", GPT2), tmp_path / "older")
    (older / "merges.txt").write_text("#version")
    for folder, why in ((large, "its 2,000 tokens are not bytes"), (older, r"its tokenizer is in merges\.txt")):
        model = load(folder)
        assert model.generate([[5, 6]], 2).shape == (1, 2)
        assert model.tokenizer.tokens([5]) == ["<5>"]
        with pytest.raises(ValueError, match=f"has no tokenizer.json, and {why}"):
            model.generate("text", 2)


def test_rules_that_are_not_followed_are_named_once(tmp_path: Path) -> None:
    folder = write(make("GPT2LMHeadModel", GPT2), tmp_path)
    settings = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.3}))
    model = load(folder)
    with pytest.warns(UserWarning, match="repetition_penalty=1.3"):
        model.generate([[5]], 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate([[5]], 2)


def test_tokens_of_a_stream_are_ordinary_tensors(tmp_path: Path) -> None:
    model = load(write(make("GPT2LMHeadModel", GPT2), tmp_path))
    for token in model.stream(torch.tensor([[5, 6]]), 2, end=None):
        model(token.unsqueeze(1)).sum().backward()
