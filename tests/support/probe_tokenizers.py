"""Small tokenizers with special tokens around every text."""

from __future__ import annotations

from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", *(f"w{i}" for i in range(94))]
CLS = WORDS.index("[CLS]")
SEP = WORDS.index("[SEP]")


def bert_like(before: int = 1, after: int = 1) -> Any:
    """Words by number, with ``[CLS]`` before and ``[SEP]`` after every text."""
    vocabulary = {word: index for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=" ".join(["[CLS]"] * before + ["$A"] + ["[SEP]"] * after),
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return tokenizer


def in_transformers() -> Any:
    names = {
        name: f"[{name[:-6].upper()}]" for name in ("cls_token", "sep_token", "pad_token", "unk_token", "mask_token")
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bert_like(), **names)
