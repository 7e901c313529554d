"""Words to token ids and back: a folder's ``tokenizer.json``, or plain bytes where there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

from tokenizers import Tokenizer

__all__ = ["Bytes", "NoText", "Text", "text_of"]

# What older folders have instead of tokenizer.json, which says all that these say and more.
OLDER = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
SMALL = 1024  # tokens; a larger vocabulary was not made of bytes


def text_of(beside: Mapping[str, bytes], vocab: object) -> Text | Bytes | NoText:
    """A folder's tokenizer; bytes where there is none and the vocabulary may be of bytes; else what says why not.

    >>> type(text_of({}, vocab=256)).__name__, type(text_of({}, vocab=32000)).__name__
    ('Bytes', 'NoText')
    """
    if "tokenizer.json" in beside:
        return Text(beside["tokenizer.json"])
    older = [name for name in OLDER if name in beside]
    if older:
        return NoText(f"its tokenizer is in {', '.join(older)}")
    if isinstance(vocab, int) and vocab > SMALL:
        return NoText(f"its {vocab:,} tokens are not bytes")
    return Bytes()


class Text:
    """``tokenizer.json`` through ``tokenizers``. Nothing is cut off or padded, whatever the file asks for.

    >>> text = Text((regard.models.bundled() / "tokenizer.json").read_bytes())
    >>> text.encode("Return the number"), text.tokens([386, 264, 577]), text.decode([386, 264, 577])
    ([0, 386, 264, 577], ['Return', 'Ġthe', 'Ġnumber'], 'Return the number')
    """

    def __init__(self, content: bytes) -> None:
        try:
            self.tokenizer = Tokenizer.from_buffer(content)
        except Exception as error:  # tokenizers raises plain Exception
            raise ValueError(f"tokenizer.json cannot be read: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def __len__(self) -> int:
        """How many tokens there are, added ones included."""
        return int(self.tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """The ids of a text, with the special tokens that the tokenizer puts around one."""
        _check_text(text)
        return list(self.tokenizer.encode(text).ids)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Ids and sentence types (0 and 1) of two texts in one input."""
        _check_text(first)
        _check_text(second)
        both = self.tokenizer.encode(first, second)
        return list(both.ids), list(both.type_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as the vocabulary writes it."""
        return [self.tokenizer.id_to_token(i) or f"<{i}>" for i in ids]

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        """Text as ids come in: a piece is given once its characters are whole."""
        before: list[int] = []  # the last ids whose text is given: spaces depend on what stands before
        held: list[int] = []
        for i in ids:
            held.append(i)
            piece = self._after(before, held)
            if piece and not piece.endswith("�") and self._stands_alone(i):
                yield piece
                before, held = held, []
        if rest := self._after(before, held):
            yield rest

    def _after(self, before: list[int], ids: list[int]) -> str:
        return self.decode(before + ids)[len(self.decode(before)) :]

    def _stands_alone(self, i: int) -> bool:
        """False for one byte of several (``<0x0A>``), whose text a broken run takes back, and for what has no text."""
        return not re.fullmatch("<0x[0-9A-F]{2}>", self.tokenizer.id_to_token(i) or "") and self.decode([i]) != ""


class Bytes:
    """UTF-8 bytes as ids 0 … 255, for models that come without a tokenizer.

    >>> Bytes().decode(Bytes().encode("één"))
    'één'
    """

    def __len__(self) -> int:
        return 256

    def encode(self, text: str) -> list[int]:
        """The bytes of a text."""
        _check_text(text)
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of bytes; ids beyond 255 are left out, broken characters shown as �."""
        return bytes(i for i in ids if 0 <= i < 256).decode(errors="replace")

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each byte as a character where it is one."""
        return [chr(i) if 32 <= i < 127 else f"<{i:02x}>" if i < 256 else f"<{i}>" for i in ids]

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        """Text as bytes come in: a piece is given once its characters are whole."""
        held = b""
        for i in ids:
            held += bytes([i]) if 0 <= i < 256 else b""
            text = held.decode(errors="replace")
            if held and not text.endswith("�"):
                yield text
                held = b""
        if held:
            yield held.decode(errors="replace")


class NoText:
    """A folder without ``tokenizer.json`` whose tokens are no bytes: ids work, texts are refused with the reason.

    >>> text = text_of({}, vocab=32000)
    >>> text.tokens([5, 7])
    ['<5>', '<7>']
    >>> text.encode("words")
    Traceback (most recent call last):
    ValueError: this folder has no tokenizer.json, and ...
    """

    def __init__(self, why: str) -> None:
        self.why = why

    def __len__(self) -> int:
        return 0

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"this folder has no tokenizer.json, and {self.why}: give token ids, or write one with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )

    def encode(self, text: str) -> list[int]:
        """Refused."""
        self._refuse()

    def decode(self, ids: Sequence[int]) -> str:
        """Refused."""
        self._refuse()

    def tokens(self, ids: Sequence[int]) -> list[str]:
        """Each id as a number: that much can be said."""
        return [f"<{i}>" for i in ids]

    def pieces(self, ids: Iterator[int]) -> Iterator[str]:
        """Refused."""
        self._refuse()


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise TypeError(f"a text must be a str, got {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"a text must be valid Unicode; {text[:40]!r} holds bytes that are no UTF-8") from None
