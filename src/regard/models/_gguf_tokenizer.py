"""Writes the vocabulary of a GGUF file as the ``tokenizer.json`` that the ``tokenizers`` package reads.

Two kinds are read: ``gpt2``, pairs of bytes with their merges, and ``llama``, the pieces of SentencePiece with scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from regard._config_json import Config
from regard._errors import RegardError

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2_PATTERN = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST

# tokenizer.ggml.pre says how a text is cut into words before pairs are merged. By name: the pattern of a word; None is
# the pattern of GPT-2. The names and patterns are those of llama.cpp.
PATTERNS: dict[str, str | None] = {
    "gpt-2": None,
    "olmo": None,
    "phi-2": None,
    "smollm": None,
    "dbrx": _LLAMA3_PATTERN,
    "llama-bpe": _LLAMA3_PATTERN,
    "llama3": _LLAMA3_PATTERN,
    "smaug-bpe": _LLAMA3_PATTERN,
    "qwen2": _QWEN2_PATTERN,
    "deepseek-r1-qwen": _QWEN2_PATTERN,
    "stablelm2": _QWEN2_PATTERN,
}
LLAMA3_NAMES = ("llama-bpe", "llama3")  # a word that is a token is not split, and texts begin with a token
DIGITS_APART = ("smollm",)  # every digit is a word
NORMALIZED = ("qwen2", "deepseek-r1-qwen")  # letters and accents are composed first (NFC)

# tokenizer.ggml.token_type
CONTROL = 3
USER_DEFINED = 4
SPACE = "▁"  # stands for a space in the pieces of SentencePiece
LONGEST_PIECE = 256  # letters; a longer one takes no part in merges, because its splits take quadratic time


def tokenizer_json(metadata: Mapping[str, Any], file: str) -> tuple[bytes | None, str]:
    """The content of a ``tokenizer.json``, or None and the reason why the file's tokenizer is not read."""
    entries = Config({key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()})
    entries.file = file
    # A model without a tokenizer, or with one that is not known, can still be given token ids.
    kind = entries.string("model", "")
    if not kind:
        return None, "it has no tokenizer"
    if kind not in ("gpt2", "llama"):
        return None, f"its tokenizer is of the kind {kind!r:.40}; gpt2 and llama are read"
    pre = entries.string("pre", "")
    # Other patterns than the file's would give other tokens, silently.
    if kind == "gpt2" and pre not in PATTERNS:
        return None, f"tokenizer.ggml.pre is {pre!r:.40}; known are {', '.join(PATTERNS)}"
    tokens = _texts(entries, "tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        return None, "its vocabulary has the same token twice"

    if kind == "gpt2":
        content = _byte_pairs(entries, vocabulary, pre)
    else:
        content = _sentence_pieces(entries, vocabulary, tokens)
    content |= {"version": "1.0", "truncation": None, "padding": None}
    content["added_tokens"] = _added_tokens(entries, tokens)
    content["post_processor"] = _start_and_end(entries, tokens, kind, pre)
    return json.dumps(content, ensure_ascii=False).encode("utf-8", errors="replace"), ""


def _byte_pairs(entries: Config, vocabulary: dict[str, int], pre: str) -> dict[str, Any]:
    """Byte pairs as GPT-2 has them, with the words of ``pre``."""
    pattern = PATTERNS[pre]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": pattern is None}
    steps: list[dict[str, Any]] = []
    if pre in DIGITS_APART:
        steps.append({"type": "Digits", "individual_digits": True})
    if pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    steps.append(byte_level)
    merges = []
    for merge in _texts(entries, "merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right) or not {left, right, left + right} <= vocabulary.keys():
            raise entries.error("merges", f"each must be two tokens whose union is a token, unlike {merge!r:.40}")
        merges.append([left, right])
    return {
        "normalizer": {"type": "NFC"} if pre in NORMALIZED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level | {"add_prefix_space": True, "use_regex": True},
        "model": _bpe_model(vocabulary, merges) | {"ignore_merges": pre in LLAMA3_NAMES},
    }


def _sentence_pieces(entries: Config, vocabulary: dict[str, int], tokens: Sequence[str]) -> dict[str, Any]:
    """Pieces of SentencePiece: the pair with the highest score is merged first, and unknown letters become bytes."""
    has_prefix = entries.boolean("add_space_prefix", True)
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = _token(entries, "unknown_token_id", tokens)
    model = _bpe_model(vocabulary, _merges_from_scores(entries, vocabulary, tokens))
    return {
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": "first" if has_prefix else "never",
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | {"byte_fallback": True, "fuse_unk": True, "unk_token": unknown},
    }


def _merges_from_scores(entries: Config, vocabulary: dict[str, int], tokens: Sequence[str]) -> list[list[str]]:
    """All ways to split a token into two tokens, those of tokens with the highest score first."""
    scores = entries.get("scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(_is_finite(x) for x in scores):
        raise entries.error("scores", f"it must be {len(tokens):,} finite numbers, one per token")
    merges = []
    for i, token in enumerate(tokens):
        if len(token) > LONGEST_PIECE:
            continue
        for cut in range(1, len(token)):
            left = vocabulary.get(token[:cut])
            right = vocabulary.get(token[cut:])
            if left is not None and right is not None:
                # Equal scores: shorter left parts first, then the order of the vocabulary.
                merges.append((-scores[i], cut, len(token) - cut, i, left, right))
    return [[tokens[left], tokens[right]] for *_, left, right in sorted(merges)]


def _bpe_model(vocabulary: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }


def _added_tokens(entries: Config, tokens: Sequence[str]) -> list[dict[str, Any]]:
    """The tokens that are found in a text before anything else: markers, and words that a user has added."""
    kinds = entries.get("token_type") or [0] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise entries.error("token_type", f"it must be {len(tokens):,} numbers, one per token")
    added = []
    for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (CONTROL, USER_DEFINED) and token:
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            added.append({"id": i, "content": token, "special": kind == CONTROL} | flags)
    return added


def _start_and_end(entries: Config, tokens: Sequence[str], kind: str, pre: str) -> dict[str, Any] | None:
    """The tokens that are put before and after a text, if the file asks for them."""
    # The defaults are those of llama.cpp.
    has_start = entries.boolean("add_bos_token", kind == "llama" or pre in LLAMA3_NAMES)
    has_end = entries.boolean("add_eos_token", False)
    before = []
    after = []
    if has_start and (start := _token(entries, "bos_token_id", tokens)) is not None:
        before.append(start)
    if has_end and (end := _token(entries, "eos_token_id", tokens)) is not None:
        after.append(end)
    if not before and not after:
        return None

    def template(*names: str) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        for type_id, name in enumerate(names):
            parts += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in before]
            parts.append({"Sequence": {"id": name, "type_id": type_id}})
            parts += [{"SpecialToken": {"id": token, "type_id": type_id}} for token in after]
        return parts

    # The template names tokens; this table says which ids they have.
    special = {}
    for token in (*before, *after):
        special[token] = {"id": token, "ids": [tokens.index(token)], "tokens": [token]}
    return {
        "type": "TemplateProcessing",
        "single": template("A"),
        "pair": template("A", "B"),
        "special_tokens": special,
    }


def _token(entries: Config, name: str, tokens: Sequence[str]) -> str | None:
    """The token whose id an entry has; None if the entry is absent."""
    if entries.get(name) is None:
        return None
    i = entries.integer(name, least=0)
    if i >= len(tokens):
        raise entries.error(name, f"it must be below {len(tokens):,}, the number of tokens")
    return tokens[i]


def _texts(entries: Config, name: str) -> list[str]:
    texts = entries.get(name)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise RegardError(f"{entries.file}: tokenizer.ggml.{name} must be a list of texts, got {texts!r:.40}")
    return texts


def _is_finite(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < 1e300
