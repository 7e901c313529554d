"""Small tokenizers of the usual kinds, and texts that are hard to show."""

from __future__ import annotations

from typing import Any

import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEXTS = {
    "words": "The animal didn't cross the street, and it computes.",
    "spaces": " two  spaces,\ttab\n\nand lines \n",
    "japanese": "猫は魚を食べる。日本語、カタカナ。",
    "emoji": "go 👩\u200d🚀 now ❤\ufe0f 👍🏽 🇳🇱!",
    "marks": "cafe\u0301 naïve Ångström a\u200bb \u202eabc\u202c",
    "one": "x",
}
CORPUS = [*TEXTS.values(), "日本語 日本 the cat sat on the street and the animal computed"]


def byte_bpe() -> Any:
    """Byte-level BPE, as in GPT-2 and Llama 3. Its merges join parts of characters with each other and with spaces."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|end|> $A", special_tokens=[("<|end|>", tokenizer.token_to_id("<|end|>"))]
    )
    return tokenizer


def wordpiece() -> Any:
    """WordPiece in lower case, as in BERT."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = ["the", "animal", "didn", "'", "t", "cross", "street", ",", "and", "it", "compute", "##s", ".", "two"]
    words += ["space", "tab", "line", "日", "本", "語", "x", "cafe", "##e", "naive", "go", "now", "!"]
    vocabulary = {word: i for i, word in enumerate(special + words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def sentencepiece_bpe() -> Any:
    """▁ for spaces, and bytes for characters that are not in the vocabulary, as in Llama 2."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"TheanimldtcrosUupy',.gx日本", "Th", "The", "▁The", "▁t", "▁th", "▁the"]
    merges = [("T", "h"), ("Th", "e"), ("▁", "The"), ("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
    model = tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def unigram() -> Any:
    """Unigram with ▁ for spaces, as in T5: spaces in a row become one, the text gets one before it."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    characters = sorted(set("".join(CORPUS)) - {" "})
    pieces += [(character, -8.0) for character in characters]
    pieces += [("▁The", -4.0), ("▁the", -4.0), ("▁animal", -5.0), ("▁and", -5.0)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=2))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def in_transformers(tokenizer: Any) -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {
    "byte BPE": byte_bpe,
    "byte BPE in transformers": lambda: in_transformers(byte_bpe()),
    "WordPiece": wordpiece,
    "SentencePiece BPE": sentencepiece_bpe,
    "Unigram": unigram,
    "ByT5": lambda: transformers.ByT5Tokenizer(),  # not loaded before it is needed
}
