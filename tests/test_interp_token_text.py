"""Tokens as text that people can read, and the characters that each token covers."""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import Any

import pytest
from support.text_tokenizers import KINDS, TEXTS, byte_bpe, sentencepiece_bpe, unigram, wordpiece

from regard.interp import label_tokens
from regard.interp._token_labels import query_and_key_labels
from regard.interp._token_text import TokenText, visible_label
from regard.interp._unknown_tokens import describe_unknown_tokens
from regard.models._tokenizer import ByteTokenizer, Tokenizer, make_tokenizer


@cache
def tokenizer_of(kind: str) -> Any:
    if kind == "bytes":
        return ByteTokenizer()
    if kind == "byte BPE of a folder":
        return Tokenizer(byte_bpe().to_str().encode())
    return KINDS[kind]()


ALL_KINDS = [*KINDS, "bytes", "byte BPE of a folder"]
LOSSLESS = ["byte BPE", "byte BPE in transformers", "SentencePiece BPE", "ByT5", "bytes", "byte BPE of a folder"]


def joined_by_spans(tokens: TokenText) -> str:
    """The text, put together from the characters that each token covers; a shared character is taken once."""
    text = ""
    for start, end in tokens.spans:
        assert start <= len(text)  # no character is left out
        assert end >= len(text) or start == end
        if start < len(text):
            assert start == len(text) - 1 or start == end  # only the last character can be shared
        text += tokens.text[len(text) : end]
    return text


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_the_spans_cover_the_text_in_order(kind: str, name: str) -> None:
    tokens = label_tokens(tokenizer_of(kind), TEXTS[name])
    assert len(tokens.ids) == len(tokens.labels) == len(tokens.spans)
    assert tokens.text == TEXTS[name]
    if kind in LOSSLESS:
        assert joined_by_spans(tokens) == TEXTS[name]
    else:
        # A normalised character may be in several tokens, but the spans still cover everything.
        covered = {i for start, end in tokens.spans for i in range(start, end)}
        assert covered == set(range(len(tokens.text)))
    for label in tokens.labels:
        assert label == visible_label(label) != ""
        assert not any(unicodedata.category(c) in ("Cc", "Cs") or c in "Ġ▁�##" for c in label.replace("<0x", ""))


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("name", ["words", "one"])
def test_labels_joined_are_the_text(kind: str, name: str) -> None:
    tokens = label_tokens(tokenizer_of(kind), TEXTS[name])
    is_special = [start == end for start, end in tokens.spans]
    assert "".join(x for x, special in zip(tokens.labels, is_special, strict=True) if not special) == TEXTS[name]


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("name", TEXTS)
def test_ids_alone_give_the_same_labels(kind: str, name: str) -> None:
    tokens = label_tokens(tokenizer_of(kind), TEXTS[name])
    assert label_tokens(tokenizer_of(kind), ids=tokens.ids) == tokens


@pytest.mark.parametrize("kind", ["byte BPE", "SentencePiece BPE", "ByT5", "bytes"])
def test_a_continuation_may_begin_within_a_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    whole = label_tokens(tokenizer, "the 猫")
    prompt = label_tokens(tokenizer, "the ")
    if whole.ids[: len(prompt.ids)] == prompt.ids:
        assert label_tokens(tokenizer, "the ", whole.ids) == whole
    assert label_tokens(tokenizer, ids=whole.ids).text == "the 猫"
    with pytest.raises(ValueError, match="ids must begin with"):
        label_tokens(tokenizer, "x", [5])


def test_words_of_bert_are_not_glued() -> None:
    tokens = label_tokens(wordpiece(), TEXTS["words"])
    assert tokens.labels[:7] == ["[CLS]", "the", " animal", " didn", "'", "t", " cross"]
    assert tokens.labels[-4:] == [" compute", "s", ".", "[SEP]"]
    assert "".join(tokens.labels[1:-1]) == TEXTS["words"].lower()
    assert [tokens.text[slice(*span)] for span in tokens.spans[1:3]] == ["The", " animal"]
    # Without the text there is a space before each word, as in the tokenizer's own text.
    assert "".join(label_tokens(wordpiece(), ids=[4, 5, 14, 15]).labels) == "the animal computes"
    assert label_tokens(wordpiece(), "the snow").labels == ["[CLS]", "the", " [UNK]", "[SEP]"]


def test_words_outside_the_vocabulary_are_counted() -> None:
    tokenizer = wordpiece()
    note = describe_unknown_tokens(tokenizer, tokenizer.encode("the snow").ids)
    assert "1 of 4 tokens is [UNK]" in note and "animal" in note
    assert describe_unknown_tokens(tokenizer, tokenizer.encode("the animal").ids) == ""
    assert describe_unknown_tokens(ByteTokenizer(), [200, 3]) == ""  # every byte is a token


def test_parts_of_a_character_are_numbered() -> None:
    assert label_tokens(ByteTokenizer(), "é!").labels == ["é·1/2", "é·2/2", "!"]
    tokens = label_tokens(byte_bpe(), TEXTS["emoji"])
    for start, end in tokens.spans:
        assert end - start < 4 or tokens.text[start:end].isascii()
    for position, character in enumerate(tokens.text):
        owners = [i for i, (start, end) in enumerate(tokens.spans) if start <= position < end]
        marks = [f"·{i + 1}/{len(owners)}" in tokens.labels[owner] for i, owner in enumerate(owners)]
        assert all(marks) if len(owners) > 1 else character != " " or marks == [False]
    # A model may generate half a character.
    assert label_tokens(ByteTokenizer(), ids=[0xE7, 0x8C, 65]).labels == ["<0xE7>", "<0x8C>", "A"]
    assert label_tokens(ByteTokenizer(), ids=[0xE7, 65]).text == "�A"
    # The first tokens of a text: the character that is cut is still known.
    cut = label_tokens(ByteTokenizer(), "a猫b").first(2)
    assert cut.labels == ["a", "猫·1/3"] and cut.text == "a猫" and cut.spans == [(0, 1), (1, 2)]


def test_spaces_that_the_tokenizer_adds_are_not_shown() -> None:
    assert label_tokens(sentencepiece_bpe(), "The the").labels == ["<s>", "The", " the"]
    assert label_tokens(sentencepiece_bpe(), " The").text == " The"
    tokens = label_tokens(unigram(), "The  animal\nand")
    assert tokens.labels == ["The", " animal", " and", "</s>"]
    assert tokens.spans == [(0, 3), (3, 11), (11, 15), (15, 15)]


def test_special_tokens_within_the_text() -> None:
    tokens = label_tokens(byte_bpe(), "a<|end|>b")
    assert tokens.labels == ["<|end|>", "a", "<|end|>", "b"] and tokens.spans[1:3] == [(0, 1), (1, 8)]


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("a\nb\t", "a↵b⇥"),
        ("\r\x00\x7f", "␍␀␡"),
        ("\u200d", "⟨ZWJ⟩"),
        ("👩\u200d🚀", "👩\u200d🚀"),
        ("\ufe0f", "⟨VS16⟩"),
        ("❤\ufe0f", "❤\ufe0f"),
        ("\u0301", "◌\u0301"),
        ("e\u0301", "e\u0301"),
        ("a\u200bb\u202e", "a⟨U+200B⟩b⟨U+202E⟩"),
        (" the", " the"),
    ],
)
def test_every_character_is_visible(text: str, label: str) -> None:
    assert visible_label(text) == label == visible_label(label)


def test_labels_of_any_recording_are_visible() -> None:
    """Also those that were stored by an older version, or come from elsewhere."""
    assert query_and_key_labels({"tokens": ["a\n", "\u202e"]}, "blocks.0", 2, 2)[0] == ["a↵", "⟨U+202E⟩"]


def test_tokenizers_that_cannot_be_read() -> None:
    missing = make_tokenizer({}, vocab=32000)
    assert label_tokens(missing, ids=[5, 7]).labels == ["<5>", "<7>"]
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        label_tokens(missing, "a text")
    with pytest.raises(TypeError, match="tokenizer must be"):
        label_tokens(object(), "a text")
    with pytest.raises(ValueError, match="a text, ids"):
        label_tokens(missing)
