"""Tokenizers: a folder's ``tokenizer.json``, or UTF-8 bytes for a small vocabulary without one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import tokenizers

from regard._error_report import error_line, held_back_stderr, is_report
from regard._errors import RegardError, RegardTypeError

# Formats of older folders, which are not read; transformers converts them to tokenizer.json.
OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
TOKENIZER_REMEDY = (
    "give token ids, or write one with transformers: AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)
MOST_GROWTH = 64  # how many times longer than a text its normalized form may be
MAX_BYTE_VOCABULARY = 1024  # a larger vocabulary cannot consist of bytes and a few special tokens


def make_tokenizer(extra_files: Mapping[str, bytes], vocab: object) -> Tokenizer | ByteTokenizer | MissingTokenizer:
    """A folder's tokenizer; without one, bytes for a small vocabulary, else a ``MissingTokenizer``.

    >>> type(make_tokenizer({}, vocab=256)).__name__, type(make_tokenizer({}, vocab=32000)).__name__
    ('ByteTokenizer', 'MissingTokenizer')
    """
    if "tokenizer.json" in extra_files:
        return Tokenizer(extra_files["tokenizer.json"])
    older = [name for name in OLDER_FILES if name in extra_files]
    if older:
        return MissingTokenizer(f"this folder has no tokenizer.json, and its tokenizer is in {', '.join(older)}")
    if isinstance(vocab, int) and vocab > MAX_BYTE_VOCABULARY:
        return MissingTokenizer(f"this folder has no tokenizer.json, and its {vocab:,} tokens are not bytes")
    return ByteTokenizer()


class Tokenizer:
    """A ``tokenizer.json``, read by the ``tokenizers`` package; truncation and padding in the file are switched off.

    >>> tokenizer = Tokenizer((regard.models.bundled() / "tokenizer.json").read_bytes())
    >>> tokenizer.encode("Return the number"), tokenizer.tokens([386, 264, 577]), tokenizer.decode([386, 264, 577])
    ([0, 386, 264, 577], ['Return', 'Ġthe', 'Ġnumber'], 'Return the number')
    """

    def __init__(self, content: bytes) -> None:
        with tokenizer_errors("cannot be read"):
            self._backend = tokenizers.Tokenizer.from_buffer(content)
            # The caller decides about truncation and padding, not a setting in the file.
            self._backend.no_truncation()
            self._backend.no_padding()
            _check_growth("normalizer", self._backend.normalizer)
            _check_growth("decoder", self._backend.decoder)

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The tokenizer of the ``tokenizers`` package."""
        return self._backend

    def __len__(self) -> int:
        """Number of tokens, added ones included."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer adds."""
        _check_text(text)
        with tokenizer_errors("cannot encode this text"):
            return list(self._backend.encode(text).ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids and token types (0 and 1) of two texts in one input."""
        _check_text(first)
        _check_text(second)
        with tokenizer_errors("cannot encode these texts"):
            encoding = self._backend.encode(first, second)
            return list(encoding.ids), list(encoding.type_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        with tokenizer_errors("cannot decode these ids"):
            return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id in the spelling of the vocabulary."""
        return [self._backend.id_to_token(i) or f"<{i}>" for i in ids]

    def decode_stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Pieces of text while ids arrive; a piece is returned when its characters are complete."""
        before: list[int] = []  # the ids of the last piece: a space may depend on the token before it
        pending: list[int] = []
        for i in ids:
            pending.append(i)
            piece = self._decode_after(before, pending)
            # � at the end: the bytes of a character are not complete yet.
            if piece and not piece.endswith("�") and self._has_own_text(i):
                yield piece
                before = pending
                pending = []
        if rest := self._decode_after(before, pending):
            yield rest

    def _decode_after(self, before: list[int], ids: list[int]) -> str:
        return self.decode(before + ids)[len(self.decode(before)) :]

    def _has_own_text(self, i: int) -> bool:
        """False for a token without text, and for a single byte (``<0x0A>``): the next byte may change its text."""
        return not re.fullmatch("<0x[0-9A-F]{2}>", self._backend.id_to_token(i) or "") and self.decode([i]) != ""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 … 255, for models without a tokenizer.

    >>> ByteTokenizer().decode(ByteTokenizer().encode("één"))
    'één'
    """

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        _check_text(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; ids above 255 are skipped, incomplete characters become �."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each byte as an ASCII character if it is a printable one, else as <hexadecimal number>."""
        names = []
        for i in ids:
            if 32 <= i < 127:
                names.append(chr(i))
            else:
                names.append(f"<{i:02x}>" if i < 256 else f"<{i}>")
        return names

    def decode_stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Pieces of text while bytes arrive; a piece is returned when its characters are complete."""
        pending = b""
        for i in ids:
            if 0 <= i < 256:
                pending += bytes([i])
            text = pending.decode(errors="replace")
            if pending and not text.endswith("�"):
                yield text
                pending = b""
        if pending:
            yield pending.decode(errors="replace")


class MissingTokenizer:
    """Stands in for a tokenizer that is not there or not read: ids work, texts are refused with the reason.

    - ``reason``: why texts are refused.
    - ``remedy``: how to get a tokenizer; the default is for a folder.

    >>> tokenizer = make_tokenizer({}, vocab=32000)
    >>> tokenizer.tokens([5, 7])
    ['<5>', '<7>']
    """

    def __init__(self, reason: str, remedy: str = TOKENIZER_REMEDY) -> None:
        self.reason = reason
        self.remedy = remedy

    def __len__(self) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise RegardError(f"{self.reason}: {self.remedy}")

    def encode(self, text: str) -> list[int]:
        """Raises: there is no tokenizer."""
        self._refuse()

    def decode(self, ids: Sequence[int]) -> str:
        """Raises: there is no tokenizer."""
        self._refuse()

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as a number."""
        return [f"<{i}>" for i in ids]

    def decode_stream(self, ids: Iterator[int]) -> Iterator[str]:
        """Raises: there is no tokenizer."""
        self._refuse()


@contextmanager
def tokenizer_errors(problem: str) -> Iterator[None]:
    """Turn any error of ``tokenizers`` into one of ours, with the problem in its message.

    A damaged file makes the package panic: the error is then not an ``Exception``, and Rust has already printed several
    lines. These are kept off the terminal.
    """
    with held_back_stderr() as discard:
        try:
            yield
        except RegardError:
            raise
        except BaseException as error:
            if not is_report(error):
                raise
            discard()
            raise RegardError(f"tokenizer.json {problem}: {error_line(error)}") from None


def _check_growth(name: str, component: object) -> None:
    """Raise if a part of a tokenizer can make a text much longer: nine small replacements make 10⁹ letters of one."""
    if component is None:
        return
    state = getattr(component, "__getstate__", lambda: b"{}")()
    growth = _growth(json.loads(state))
    if growth > MOST_GROWTH:
        raise RegardError(
            f"tokenizer.json: the replacements of its {name} must make a text at most {MOST_GROWTH} times longer, got "
            f"{growth:.2g} times"
        )


def _growth(part: Any) -> float:
    """By how much the replacements of a part and of the parts in it can lengthen a text."""
    growth = 1.0
    if isinstance(part, list):
        for child in part:
            growth *= _growth(child)
    if not isinstance(part, dict):
        return growth
    for child in part.values():
        if isinstance(child, list | dict):
            growth *= _growth(child)
    if part.get("type") == "Replace":
        pattern = part.get("pattern")
        replaced = 1  # a regular expression can match every single letter
        if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            replaced = max(1, len(pattern["String"]))
        growth *= max(1.0, len(str(part.get("content"))) / replaced)
    return growth


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RegardTypeError(f"a text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RegardError(f"a text must be valid Unicode; {text[:40]!r} holds bytes that are not UTF-8") from None
