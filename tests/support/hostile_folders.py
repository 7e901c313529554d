"""Model folders that an attacker, a broken download or a bad training run would leave, built from the bundled model."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

from regard import models

__all__ = ["DAMAGED_TOKENIZERS", "copy_bundled", "damaged_tokenizer", "edit_json"]


def copy_bundled(folder: Path) -> Path:
    """A copy of the bundled model, which can be damaged."""
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.bundled() / name, folder / name)
    return folder


def edit_json(file: Path, **entries: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | entries))


def _charsmap(content: bytes) -> dict[str, Any]:
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": split}


def _template() -> dict[str, Any]:
    single = [{"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    template = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": {}}
    return {"post_processor": template}


def _bpe(**entries: Any) -> dict[str, Any]:
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    return {"model": {"type": "BPE", "vocab": vocabulary, "merges": ["a b"]} | entries}


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
# Entries of tokenizer.json. Most of them make the tokenizers package panic, when it reads the file or a text.
DAMAGED_TOKENIZERS: dict[str, dict[str, Any]] = {
    "an empty table of characters": _charsmap(b""),
    "a table of characters that is garbage": _charsmap(b"\xff" * 40),
    "a table of characters without entries": _charsmap(bytes(4)),
    "a table of characters with a wrong index": _charsmap(b"\x04\0\0\0\xff\xff\xff\xff"),
    "a pattern that takes exponential time": _split("(a|a|aa)+(?!a)c"),
    "a pattern that is not one": _split("(((("),
    "a template with a token that is not there": _template(),
    "pieces of length 0": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "a prefix longer than its tokens": _bpe(continuing_subword_prefix="########"),
    "a merge of a token that is not there": _bpe(merges=["a z"]),
    "a merge of numbers": _bpe(merges=[1, 2]),
    "an unknown token that is not there": _bpe(unk_token="<unk>"),
    "a negative id": _bpe(vocab={"a": -1, "b": 1, "ab": 2}),
    "a huge id": _bpe(vocab={"a": 2**64, "b": 1, "ab": 2}),
    "an empty model": {"model": {}},
    "a normalizer with a wrong field": {"normalizer": {"type": "BertNormalizer", "lowercase": "x"}},
    "replacements that grow to a thousand million letters": {
        "normalizer": {"type": "Sequence", "normalizers": [GROWING] * 9}
    },
    "a table of bytes": {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}},
}


def damaged_tokenizer(name: str) -> bytes:
    """The content of a ``tokenizer.json``."""
    base: dict[str, Any] = {"version": "1.0", "added_tokens": [], "model": _bpe()["model"]}
    return json.dumps(base | DAMAGED_TOKENIZERS[name]).encode()
