"""The tokenizer of a GGUF file gives the ids of the tokenizer that it was written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.gguf_files import byte_pair_entries
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

from regard import RegardError
from regard.models import create, load
from regard.models._gguf_tokenizer import PATTERNS, tokenizer_json
from regard.models._tokenizer import MissingTokenizer, Tokenizer

TEXT = "The cat's hat, HE'LL say 1234567 times: naïve café 東京! Don't   stop\n\n  now.\tAnd\r\nthen <|end|>"
CORPUS = [TEXT, "the cat sat on the mat and the hat", "12 345 6789", "stop now then stop", "naïve café"] * 4
# A letter and an accent apart, which a tokenizer with NFC joins.
TEXTS = (TEXT, "", " a", "cafe\u0301", "x<|end|>y <|end|>", "\U0001f600 ok", "a\u00a0b  c   d")


def byte_pairs(pre: str) -> tokenizers.Tokenizer:
    """A trained tokenizer with the words of a published one; its parts are written here as their folders have them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(ignore_merges=pre == "llama-bpe"))
    letters = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    digits = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in digits:
        pattern = f"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{letters}|{digits[pre]}|{rest}"
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    elif pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    else:
        tokenizer.pre_tokenizer = gpt2
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=["<|start|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def kinds(vocabulary: dict[str, int], control: tuple[str, ...]) -> list[int]:
    return [3 if token in control else 1 for token in sorted(vocabulary, key=lambda token: vocabulary[token])]


def byte_pair_metadata(pre: str, **others: Any) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    theirs = byte_pairs(pre)
    model = json.loads(theirs.to_str())["model"]
    merges = [" ".join(merge) for merge in model["merges"]]
    special = {"token_type": kinds(model["vocab"], ("<|start|>", "<|end|>")), "bos_token_id": 0, "eos_token_id": 1}
    return theirs, byte_pair_entries(model["vocab"], merges, pre, **special | others)


def read(metadata: dict[str, Any]) -> Tokenizer:
    content, reason = tokenizer_json(metadata, "model.gguf")
    assert content is not None and not reason
    return Tokenizer(content)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
def test_byte_pairs(pre: str) -> None:
    theirs, metadata = byte_pair_metadata(pre, add_bos_token=False)
    ours = read(metadata)
    assert len(ours) == theirs.get_vocab_size()
    for text in TEXTS:
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    # All other names have the pattern of one of these four.
    assert PATTERNS[pre] is None or pre in ("llama-bpe", "qwen2")


def test_a_start_and_an_end_token_are_added_where_the_file_says_so() -> None:
    _, metadata = byte_pair_metadata("llama-bpe", add_eos_token=True)
    ours = read(metadata)
    plain = read(metadata | {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": False})
    ids = plain.encode("the cat")
    assert ours.encode("the cat") == [0, *ids, 1]  # Llama 3 begins with its start token unless the file forbids it
    assert ours.encode_pair("the", "cat")[0] == [0, *plain.encode("the"), 1, 0, *plain.encode("cat"), 1]
    assert ours.decode([0, *ids, 1]) == "the cat"
    _, metadata = byte_pair_metadata("gpt-2")
    assert 0 not in read(metadata).encode("the cat")


def sentence_pieces(prefix: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A tokenizer with the parts of Llama 2's, and its metadata; the score of a piece is minus its rank."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=True)
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    control = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*control, *bytes_], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in control]
    ranks = {"".join(merge): rank for rank, merge in enumerate(state["model"]["merges"])}
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(state))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s>:1 $B:1", [("<s>", 1)])
    vocabulary = state["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    entries = {
        "model": "llama",
        "tokens": tokens,
        "scores": [float(-ranks.get(token, 1000)) for token in tokens],
        "token_type": [3 if token in control else 6 if token in bytes_ else 1 for token in tokens],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    if not prefix:
        entries["add_space_prefix"] = False
    return tokenizer, {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentence_pieces(prefix: bool) -> None:
    theirs, metadata = sentence_pieces(prefix)
    ours = read(metadata)
    for text in (*TEXTS, "the cat sat", "and the mat", "</s>the"):
        ids = theirs.encode(text).ids
        assert ours.encode(text) == ids and ids[0] == 1
        assert ours.decode(ids) == theirs.decode(ids)
    assert ours.decode(ours.encode("the cat says 東")) == "the cat says 東"


def test_a_loaded_file_reads_and_writes_text(tmp_path: Path) -> None:
    from support.gguf_files import write_gguf

    theirs, metadata = byte_pair_metadata("gpt-2")
    sizes = {"vocab_size": 340, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 64, "n_inner": 17}
    source = create({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, "layer_norm_epsilon": 1e-5})
    model = load(write_gguf(source, tmp_path / "model.gguf", "gpt2", metadata=metadata))
    assert model.tokenizer.encode(TEXT) == theirs.encode(TEXT).ids
    assert isinstance(model.generate("the cat", 3), str)
    assert model.end_ids == (1,)
    model.save(tmp_path / "folder")
    assert load(tmp_path / "folder").tokenizer.encode(TEXT) == theirs.encode(TEXT).ids


def test_an_unknown_tokenizer_leaves_ids(tmp_path: Path) -> None:
    from support.gguf_files import write_gguf

    sizes = {"vocab_size": 37, "n_embd": 12, "n_layer": 1, "n_head": 3, "n_positions": 19, "n_inner": 17}
    source = create({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes, "layer_norm_epsilon": 1e-5})
    unknown = [
        {},
        {"tokenizer.ggml.model": "bert"},
        {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "of tomorrow"},
        {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["a", "b", "a"]},
    ]
    for i, metadata in enumerate(unknown):
        model = load(write_gguf(source, tmp_path / f"{i}.gguf", "gpt2", metadata=metadata))
        assert isinstance(model.tokenizer, MissingTokenizer)
        assert model.generate([[5, 7]], 2).shape == (1, 2)
        with pytest.raises(RegardError, match=f"{i}.gguf.*token ids"):
            model.tokenizer.encode("a")


@pytest.mark.parametrize(
    ("entry", "value"),
    [
        ("tokens", "abc"),
        ("tokens", [1, 2]),
        ("merges", None),
        ("merges", ["a"]),
        ("merges", ["never seen"]),
        ("token_type", [1, 2]),
        ("bos_token_id", 10**6),
        ("bos_token_id", -1),
        ("bos_token_id", "a"),
        ("add_eos_token", 3),
        ("pre", 5),
    ],
)
def test_damaged_entries_of_byte_pairs_are_named(entry: str, value: object) -> None:
    _, metadata = byte_pair_metadata("llama-bpe")
    with pytest.raises(RegardError, match=rf"model\.gguf.*{entry}"):
        tokenizer_json(metadata | {f"tokenizer.ggml.{entry}": value}, "model.gguf")


@pytest.mark.parametrize("scores", [None, [1.0], ["a"] * 400, [float("nan")] * 400, [float("inf")] * 400])
def test_damaged_scores_are_named(scores: object) -> None:
    _, metadata = sentence_pieces(True)
    count = len(metadata["tokenizer.ggml.tokens"])
    if isinstance(scores, list) and len(scores) > 1:
        scores = scores[:1] * count
    with pytest.raises(RegardError, match="scores"):
        tokenizer_json(metadata | {"tokenizer.ggml.scores": scores}, "model.gguf")
