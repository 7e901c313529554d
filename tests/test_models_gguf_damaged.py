"""Damaged and hostile GGUF files give one line that names what is wrong."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.checkpoints import perturb
from support.gguf_files import write_gguf

from regard import RegardError
from regard.models import Model, create, load

SIZES = {
    "vocab_size": 37,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


@pytest.fixture(scope="module")
def source() -> Model:
    model = create({"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SIZES})
    perturb(model)
    return model


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


ARCHITECTURE = entry("general.architecture", 8, text("llama"))


def header(tensors: int, entries: int, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, entries)


def tensor(name: str, sizes: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


ONE = header(1, 1) + ARCHITECTURE
HEADERS: list[tuple[str, bytes]] = [
    ("begins with GGUF", b""),
    ("begins with GGUF", b"GGU"),
    ("begins with GGUF", b"PK\3\4" + bytes(100)),
    ("version", b"GGUF"),
    ("version", header(0, 0, version=1)),
    ("version", header(0, 0, version=99)),
    ("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)),
    ("number of tensors", header(2**63, 0)),
    ("number of metadata entries", header(0, 2**40)),
    ("truncated", header(0, 5) + ARCHITECTURE),
    ("metadata key", header(0, 1) + text("a\nb") + bytes(12)),
    ("metadata key", header(0, 1) + text("")),
    ("metadata key", header(0, 1) + text("k" * 300)),
    ("metadata key.*truncated", header(0, 1) + struct.pack("<Q", 2**62)),
    ("twice", header(0, 2) + ARCHITECTURE * 2),
    ("general.x.*type", header(0, 1) + entry("general.x", 13, b"")),
    ("general.x.*truncated", header(0, 1) + entry("general.x", 8, struct.pack("<Q", 2**63))),
    ("length of general.x", header(0, 1) + entry("general.x", 9, struct.pack("<IQ", 4, 2**60))),
    ("general.x.*truncated", header(0, 1) + entry("general.x", 9, struct.pack("<IQ", 4, 2**20))),
    ("general.x.*truncated", header(0, 1) + entry("general.x", 9, struct.pack("<IQ", 8, 2**20))),
    ("general.x.*elements of type 9", header(0, 1) + entry("general.x", 9, struct.pack("<IQ", 9, 1))),
    ("general.architecture", header(0, 0)),
    ("general.architecture", header(0, 1) + entry("general.architecture", 4, struct.pack("<I", 7))),
    ("general.architecture.*mamba", header(0, 1) + entry("general.architecture", 8, text("mamba"))),
    ("one part of 3", header(0, 1) + entry("split.count", 2, struct.pack("<H", 3))),
    ("general.alignment", header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 0))),
    ("general.alignment", header(0, 1) + entry("general.alignment", 4, struct.pack("<I", 48))),
    ("general.alignment", header(0, 1) + entry("general.alignment", 8, text("32"))),
    ("general.alignment", header(0, 1) + entry("general.alignment", 10, struct.pack("<Q", 2**40))),
    ("token_embd.*missing", header(0, 1) + ARCHITECTURE),
    ("a.weight.*dimensions, got 0", ONE + tensor("a.weight", ())),
    ("a.weight.*dimensions, got 5", ONE + tensor("a.weight", (1, 1, 1, 1, 1))),
    ("dimensions of a.weight", ONE + tensor("a.weight", (0, 3))),
    ("dimensions of a.weight", ONE + tensor("a.weight", (2**40, 2**40))),
    ("a.weight.*within the file", ONE + tensor("a.weight", (2**30, 2**30))),
    ("a.weight.*within the file", ONE + tensor("a.weight", (3,), offset=2**63)),
    ("a.weight.*multiple of 32", ONE + tensor("a.weight", (3,), offset=7)),
    ("a.weight.*type", ONE + tensor("a.weight", (32,), kind=4)),
    ("a.weight.*type", ONE + tensor("a.weight", (32,), kind=26)),
    ("a.weight.*type", ONE + tensor("a.weight", (32,), kind=2**31)),
    ("a.weight.*blocks of 32", ONE + tensor("a.weight", (33,), kind=8)),
    ("twice", header(2, 1) + ARCHITECTURE + tensor("a", (1,)) + tensor("a", (1,), offset=32) + bytes(200)),
    ("overlap", header(2, 1) + ARCHITECTURE + tensor("a", (99,)) + tensor("b", (1,), offset=32) + bytes(600)),
]


@pytest.mark.parametrize(("problem", "content"), HEADERS, ids=range(len(HEADERS)))
def test_damaged_headers(problem: str, content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(RegardError, match=problem) as caught:
        load(file)
    message = str(caught.value)
    assert "\n" not in message and "model.gguf" in message and len(message) < 600


@pytest.mark.parametrize(
    ("problem", "metadata"),
    [
        ("block_count", {"llama.block_count": None}),
        ("block_count", {"llama.block_count": "two"}),
        ("num_hidden_layers", {"llama.block_count": 2**30}),
        ("missing", {"llama.block_count": 2}),
        ("embedding_length", {"llama.embedding_length": 0}),
        ("shape", {"llama.embedding_length": 128}),
        ("attention.head_count", {"llama.attention.head_count": 0}),
        ("attention.head_count_kv", {"llama.attention.head_count_kv": [1, 2]}),
        ("kv_heads", {"llama.attention.head_count_kv": 5}),
        ("rows", {"llama.attention.head_count": 64, "llama.attention.key_length": 32}),
        ("epsilon", {"llama.attention.layer_norm_rms_epsilon": -1.0}),
        ("epsilon", {"llama.attention.layer_norm_rms_epsilon": float("nan")}),
        ("freq_base", {"llama.rope.freq_base": float("inf")}),
        ("dimension_count", {"llama.rope.dimension_count": 4}),
        ("value_length", {"llama.attention.value_length": 4}),
        ("rope.scaling.type", {"llama.rope.scaling.type": "spiral"}),
        ("expert_count", {"llama.expert_count": 8}),
        ("clamp_kqv", {"llama.attention.clamp_kqv": 8.0}),
        ("attention.causal", {"llama.attention.causal": False}),
        ("eos_token_id", {"tokenizer.ggml.eos_token_id": "two"}),
        ("tokens", {"tokenizer.ggml.model": "llama"}),
    ],
)
def test_damaged_entries(source: Model, problem: str, metadata: dict[str, Any], tmp_path: Path) -> None:
    file = write_gguf(source, tmp_path / "model.gguf", "llama", metadata=metadata)
    with pytest.raises(RegardError, match=problem) as caught:
        load(file)
    assert "model.gguf" in str(caught.value)


@pytest.mark.parametrize("name", ["blk.0.attn_extra.weight", "blk.7.ffn_up.weight", "head", "blk.0.attn_v.bias"])
def test_a_tensor_that_the_model_does_not_have(source: Model, name: str, tmp_path: Path) -> None:
    extra = {name: np.zeros(3, np.float32)}
    file = write_gguf(source, tmp_path / "model.gguf", "llama", extra=extra)
    with pytest.raises(RegardError, match="left over"):
        load(file)


def test_weights_that_are_not_finite(source: Model, tmp_path: Path) -> None:
    file = write_gguf(source, tmp_path / "model.gguf", "llama", quantise="Q8_0")
    content = bytearray(file.read_bytes())
    # The scale of the last block becomes NaN.
    content[-34:-32] = b"\xff\xff"
    file.write_bytes(content)
    with pytest.raises(RegardError, match=r"finite"):
        load(file)
    assert isinstance(load(file, allow_nonfinite=True), Model)


def test_what_is_not_a_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises((RegardError, OSError), match=r"pipe\.gguf"):
        load(tmp_path / "pipe.gguf")
    with pytest.raises(FileNotFoundError, match="GGUF"):
        load(tmp_path / "absent.gguf")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"tiny\.gguf"):
        load(tmp_path / "folder")


def truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def flip(content: bytearray, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 4)):
        content[chance.randrange(1200)] = chance.randrange(256)


def overwrite(content: bytearray, chance: random.Random) -> None:
    start = chance.randrange(0, 1200)
    value = chance.choice([0, 1, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1])
    content[start : start + 8] = struct.pack("<Q", value)


@pytest.mark.parametrize("damage", [truncate, flip, overwrite])
def test_random_damage(source: Model, damage: Callable[[bytearray, random.Random], None], tmp_path: Path) -> None:
    """Every damaged file is refused in one line, or is a model that computes."""
    vocabulary = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *map(chr, range(60, 95))],
        "tokenizer.ggml.scores": [0.0] * 37,
        "tokenizer.ggml.bos_token_id": 1,
    }
    file = write_gguf(source, tmp_path / "whole.gguf", "llama", quantise="Q8_0", metadata=vocabulary)
    whole = file.read_bytes()
    outcomes = set()
    for seed in range(150):
        content = bytearray(whole)
        damage(content, random.Random(seed))
        # Another name for each file: a file that is mapped must not be overwritten.
        damaged = tmp_path / f"{seed}.gguf"
        damaged.write_bytes(content)
        try:
            model = load(damaged)
            with torch.no_grad():
                outcomes.add(tuple(model(torch.tensor([[2, 3]])).shape[:2]))
        except RegardError as error:
            assert "\n" not in str(error) and str(seed) in str(error)
            outcomes.add("refused")
    assert "refused" in outcomes
