"""Read the tokens of a tokenizer: the ids of a text, and the characters of the text that each token stands for.

Vocabularies spell tokens in their own ways: ``Ġthe``, ``▁the``, ``##s``, ``<0xE3>``, ``the</w>``. Each token becomes
the bytes that it adds to the text. The bytes of all tokens together are the text, and each token covers its characters.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import tokenizers

from regard._errors import RegardTypeError
from regard.models._tokenizer import ByteTokenizer, MissingTokenizer, Tokenizer, tokenizer_errors

Span = tuple[int, int]  # the first character, and the one after the last


@dataclass(frozen=True)
class Encoded:
    """The tokens of a text.

    - ``offsets``: the characters that each token comes from; None if the tokenizer does not say.
    - ``added``: which tokens the tokenizer added to the text, for example ``[CLS]``.
    """

    ids: list[int]
    offsets: list[Span] | None
    added: list[bool]


class Reader(Protocol):
    """Reads the tokens of one tokenizer."""

    def encode(self, text: str) -> Encoded:
        """The tokens of a text."""

    def spelling(self, token: int) -> str:
        """An id in the spelling of the vocabulary."""

    def decode(self, text: str | None, encoded: Encoded, ids: list[int]) -> tuple[str, list[Span], list[bool]]:
        """The text of ids, the characters of each token, and which tokens are special and not part of the text.

        The first ids are those of ``encoded``, the tokens of ``text``.
        """


class _ByteReader:
    """The ids are bytes."""

    def __init__(self, tokenizer: ByteTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> Encoded:
        ids = self.tokenizer.encode(text)
        return Encoded(ids, None, [False] * len(ids))

    def spelling(self, token: int) -> str:
        return self.tokenizer.tokens([token])[0]

    def decode(self, text: str | None, encoded: Encoded, ids: list[int]) -> tuple[str, list[Span], list[bool]]:
        is_special = [not 0 <= token < 256 for token in ids]
        pieces = []
        for token, special in zip(ids, is_special, strict=True):
            pieces.append(b"" if special else bytes([token]))
        return *_decode_bytes(pieces), is_special


class _MissingReader:
    """There is no tokenizer: the labels are numbers."""

    def __init__(self, tokenizer: MissingTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str) -> Encoded:
        self.tokenizer.encode(text)  # raises, and says why
        raise AssertionError("unreachable")

    def spelling(self, token: int) -> str:
        return self.tokenizer.tokens([token])[0]

    def decode(self, text: str | None, encoded: Encoded, ids: list[int]) -> tuple[str, list[Span], list[bool]]:
        return "", [(0, 0)] * len(ids), [True] * len(ids)


class _BackendReader:
    """A tokenizer of the ``tokenizers`` package, whose decoder says how the vocabulary spells text.

    ``tokenizer`` is one of ``transformers`` that uses this backend; it may have settings of its own.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokenizer: Any = None) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.added_tokens = backend.get_added_tokens_decoder()
        parts = _parts_by_type(backend.decoder or backend.pre_tokenizer)
        self.is_byte_level = "ByteLevel" in parts
        self.has_byte_tokens = "ByteFallback" in parts
        self.space = _space_mark(parts)
        self.prefix = parts.get("WordPiece", {}).get("prefix", "")
        self.suffix = parts.get("BPEDecoder", {}).get("suffix", "")
        # A text gets a space before it, which decoding takes away again.
        metaspace = parts.get("Metaspace", {})
        self.adds_space = "Strip" in parts or metaspace.get("prepend_scheme", "never") != "never"

    def encode(self, text: str) -> Encoded:
        if self.tokenizer is not None:
            with tokenizer_errors("cannot encode this text"):
                encoding = self.tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
            offsets = [(int(start), int(end)) for start, end in encoding["offset_mapping"]]
            return Encoded(list(encoding["input_ids"]), offsets, list(map(bool, encoding["special_tokens_mask"])))
        with tokenizer_errors("cannot encode this text"):
            encoding = self.backend.encode(text)
        # Padding, which a file may switch on, is not part of the text.
        real = [i for i, is_real in enumerate(encoding.attention_mask) if is_real]
        added = [bool(encoding.special_tokens_mask[i]) for i in real]
        return Encoded([encoding.ids[i] for i in real], [encoding.offsets[i] for i in real], added)

    def spelling(self, token: int) -> str:
        return self.backend.id_to_token(token) or f"<{token}>"

    def decode(self, text: str | None, encoded: Encoded, ids: list[int]) -> tuple[str, list[Span], list[bool]]:
        pieces = []
        is_special = []
        for i, token in enumerate(ids):
            piece = self._piece(token)
            if i < len(encoded.ids):
                if encoded.added[i]:
                    piece = None
                elif piece is None:
                    piece = self.spelling(token).encode()  # the text itself contains a special token
            is_special.append(piece is None)
            pieces.append(piece or b"")
        if not self.is_byte_level and not self.space:
            self._add_spaces(pieces, is_special, encoded, ids)

        decoded, spans = _decode_bytes(pieces)
        if _starts_with_added_space(decoded, text, self.adds_space):
            first = next(i for i, piece in enumerate(pieces) if piece)
            pieces[first] = pieces[first][1:]
            decoded, spans = _decode_bytes(pieces)
        return decoded, spans, is_special

    def _piece(self, token: int) -> bytes | None:
        """The bytes that a token adds to the text; None for a special token."""
        name = self.backend.id_to_token(token)
        added = self.added_tokens.get(token)
        if name is None or (added is not None and added.special):
            return None
        if added is not None:
            return str(added.content).encode()
        if self.is_byte_level:
            return _byte_level_bytes(name)
        if self.has_byte_tokens and re.fullmatch("<0x[0-9A-Fa-f]{2}>", name):
            return bytes([int(name[3:5], 16)])
        if self.space:
            name = name.replace(self.space, " ")
        return name.removeprefix(self.prefix).removesuffix(self.suffix).encode()

    def _add_spaces(self, pieces: list[bytes], is_special: list[bool], encoded: Encoded, ids: list[int]) -> None:
        """Put spaces between words: where the text has a gap between two tokens, or else where decoding puts one."""
        end = 0  # of the token before
        previous = None
        for i, token in enumerate(ids):
            if is_special[i]:
                continue
            if i < len(encoded.ids):
                assert encoded.offsets is not None
                has_space = encoded.offsets[i][0] > end
                end = encoded.offsets[i][1]
            else:
                continues = bool(self.prefix) and self.spelling(token).startswith(self.prefix)
                if self.suffix and previous is not None:
                    continues = not self.spelling(previous).endswith(self.suffix)
                has_space = not continues
            if has_space and previous is not None:
                pieces[i] = b" " + pieces[i]
            previous = token


class _DecodingReader:
    """A tokenizer of ``transformers`` without offsets: what a token adds to the text is found by decoding."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.special_ids = set(tokenizer.all_special_ids)

    def encode(self, text: str) -> Encoded:
        ids = list(self.tokenizer(text)["input_ids"])
        return Encoded(ids, None, [token in self.special_ids for token in ids])

    def spelling(self, token: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens([token])[0])

    def decode(self, text: str | None, encoded: Encoded, ids: list[int]) -> tuple[str, list[Span], list[bool]]:
        decoded = ""
        spans: list[Span] = []
        before: list[int] = []  # the ids of the last characters: a space may depend on the token before it
        pending: list[int] = []  # tokens whose last character is not complete
        piece = ""
        complete = 0  # characters of the pending tokens
        for token in ids:
            if token in self.special_ids:
                spans.append((len(decoded) + complete,) * 2)
                continue
            pending.append(token)
            piece = self._decode_ids(before + pending)[len(self._decode_ids(before)) :]
            start = len(decoded) + complete
            complete = len(piece.rstrip("�"))
            end = len(decoded) + complete
            if len(piece) > complete:
                end += 1  # � at the end: the bytes of a character are not complete yet
            spans.append((min(start, end), end))
            if piece and len(piece) == complete:
                # Tokens that had no text before this one are parts of its first character.
                for i in reversed(range(len(spans))):
                    if spans[i][0] < len(decoded):
                        break
                    if spans[i][1] == len(decoded) and ids[i] not in self.special_ids:
                        spans[i] = (len(decoded), len(decoded) + 1)
                decoded += piece
                before = pending
                pending = []
                piece = ""
                complete = 0
        return decoded + piece, spans, [token in self.special_ids for token in ids]

    def _decode_ids(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def find_reader(tokenizer: Any) -> Reader:
    if isinstance(tokenizer, ByteTokenizer):
        return _ByteReader(tokenizer)
    if isinstance(tokenizer, MissingTokenizer):
        return _MissingReader(tokenizer)
    if isinstance(tokenizer, Tokenizer):
        return _BackendReader(tokenizer.backend)
    if isinstance(tokenizer, tokenizers.Tokenizer):
        return _BackendReader(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if isinstance(backend, tokenizers.Tokenizer):
        return _BackendReader(backend, tokenizer)
    if not callable(getattr(tokenizer, "convert_ids_to_tokens", None)):
        raise RegardTypeError(
            f"tokenizer must be a tokenizer of transformers, tokenizers or regard, got {type(tokenizer).__name__}"
        )
    return _DecodingReader(tokenizer)


def _starts_with_added_space(decoded: str, text: str | None, adds_space: bool) -> bool:
    """Whether decoded tokens begin with a space that the tokenizer put before the text."""
    if not decoded.startswith(" "):
        return False
    if text is None:
        return adds_space
    return not decoded.startswith(text) and (decoded.startswith(f" {text}") or not text[:1].isspace())


def _decode_bytes(pieces: list[bytes]) -> tuple[str, list[Span]]:
    """The text of all bytes, and the characters of each piece. Bytes that are no UTF-8 become single surrogates."""
    text = b"".join(pieces).decode(errors="surrogateescape")
    byte_counts = [len(character.encode(errors="surrogateescape")) for character in text]
    starts = [0, *accumulate(byte_counts)]
    spans = []
    position = 0
    for piece in pieces:
        start = bisect_right(starts, position) - 1
        position += len(piece)
        end = start
        if piece:
            end = bisect_right(starts, position - 1)
        spans.append((start, end))
    return text, spans


def _parts_by_type(component: Any) -> dict[str, dict[str, Any]]:
    """The settings of a decoder or pre-tokenizer by type; a sequence of several gives each of them."""
    if component is None:
        return {}
    settings = json.loads(component.__getstate__())
    parts = {}
    for part in settings.get("decoders") or settings.get("pretokenizers") or [settings]:
        parts[part["type"]] = part
    return parts


def _space_mark(parts: dict[str, dict[str, Any]]) -> str:
    """The character that stands for a space in the vocabulary, usually ▁; empty if there is none."""
    if "Metaspace" in parts:
        return str(parts["Metaspace"]["replacement"])
    replaced = parts.get("Replace", {})
    if replaced.get("content") == " ":
        return str(replaced["pattern"].get("String", ""))
    return ""


def _byte_characters() -> dict[str, int]:
    """How byte-level vocabularies spell bytes: printable ones as they are in Latin-1, others from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(range(256)) - set(printable))
    characters = {chr(byte): byte for byte in printable}
    for i, byte in enumerate(others):
        characters[chr(256 + i)] = byte
    return characters


BYTE_CHARACTERS = _byte_characters()


def _byte_level_bytes(name: str) -> bytes:
    codes = [BYTE_CHARACTERS.get(character) for character in name]
    if None in codes:
        return name.encode()
    return bytes(code for code in codes if code is not None)
