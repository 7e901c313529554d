"""Token ids as text that people can read: a label for each token, and the characters of the text that it covers.

These are the rules for labels, wherever a token is shown:

    word       a token that begins a word keeps its space: " the"; a continuation (``##s``) has none
    part       one character in several tokens: "日·1/3", "日·2/3", "日·3/3"
    invisible  line break ↵, tab ⇥, other control characters ␀ … ␡, zero-width ones by name: ⟨ZWJ⟩, ⟨U+200B⟩
    special    as the vocabulary spells it: "<s>", "[CLS]"; it covers no characters unless the text contains it
    bytes      that are no UTF-8, as a model may generate them: "<0xE3>"
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from regard._errors import RegardError
from regard.interp._token_readers import Encoded, Span, find_reader

SPACE = "␣"  # the label of a token without text of its own, such as a ▁ that the tokenizer put before the text
NAMES = {
    "\n": "↵",
    "\t": "⇥",
    "\x7f": "␡",
    "\u200d": "⟨ZWJ⟩",
    "\u200c": "⟨ZWNJ⟩",
    "\ufe0e": "⟨VS15⟩",
    "\ufe0f": "⟨VS16⟩",
}
JOINERS = "\u200c\u200d"  # inside of a label they shape the characters around them


@dataclass(frozen=True)
class TokenText:
    """Tokens and the text they stand for.

    - ``ids``: the ids of the tokens.
    - ``labels``: a readable label of each token.
    - ``text``: the text; if it is not known, what the tokens decode to.
    - ``spans``: for each token, the first character of ``text`` that it covers, and the one after the last. Together
      the spans cover the text in order. Two spans overlap only in a character that has parts in both tokens. A special
      token that is not in the text covers nothing: ``(i, i)``.

    >>> tokens = label_tokens(regard.models.load(regard.models.bundled()).tokenizer, "a b")
    >>> tokens.labels, tokens.spans, tokens.first(2).text
    (['<|endoftext|>', 'a', ' b'], [(0, 0), (0, 1), (1, 3)], 'a')
    """

    ids: list[int]
    labels: list[str]
    spans: list[Span]
    text: str

    def first(self, count: int) -> TokenText:
        """The first tokens, and the part of the text that they cover."""
        spans = self.spans[:count]
        end = max((span[1] for span in spans), default=0)
        return TokenText(self.ids[:count], self.labels[:count], spans, self.text[:end])


def label_tokens(tokenizer: Any, text: str | None = None, ids: Sequence[int] | None = None) -> TokenText:
    """Readable labels of tokens, and the characters that each of them covers.

    - ``tokenizer``: of ``transformers`` or ``tokenizers``, or of a model of ``regard.models``.
    - ``text``: the text; its ids are those that the tokenizer gives.
    - ``ids``: token ids, if there is no text; with a text they begin with its ids and may continue, as ``generate``
      returns them.

    Raises ``RegardError`` if ids do not begin with those of the text.

    >>> tokenizer = regard.models.load(regard.models.bundled()).tokenizer
    >>> tokens = label_tokens(tokenizer, "Return é")
    >>> tokens.labels, tokens.spans
    (['<|endoftext|>', 'Return', ' ', 'é·1/2', 'é·2/2'], [(0, 0), (0, 6), (6, 7), (7, 8), (7, 8)])
    """
    if text is None and ids is None:
        raise RegardError("give a text, ids, or both")
    reader = find_reader(tokenizer)
    encoded = Encoded([], [], [])
    if text is not None:
        encoded = reader.encode(text)
    all_ids = encoded.ids
    if ids is not None:
        all_ids = list(map(int, ids))
        if all_ids[: len(encoded.ids)] != encoded.ids:
            raise RegardError(f"ids must begin with the {len(encoded.ids)} ids of the text, got {all_ids[:8]} …")

    decoded, spans, is_special = reader.decode(text, encoded, all_ids)
    labels = _labels(decoded, spans)
    for i, token in enumerate(all_ids):
        if is_special[i]:
            labels[i] = visible_label(reader.spelling(token))

    # What the tokens of the text decode to. If it is not the text itself (lower case, collapsed spaces), the
    # tokenizer's own offsets say which characters a token covers.
    count = len(encoded.ids)
    end = max((span[1] for span in spans[:count]), default=0)
    if text is not None and encoded.offsets is not None and decoded[:end] != text:
        shift = len(text) - end
        spans = _cover(encoded.offsets, encoded.added, len(text)) + [(a + shift, b + shift) for a, b in spans[count:]]
        decoded = text + decoded[end:]
    return TokenText(all_ids, labels, spans, _without_surrogates(decoded))


def visible_label(text: str) -> str:
    """A label in which every character can be seen. A label that is visible already stays the same.

    >>> visible_label(" a\\tb\\n"), visible_label("e\\u200d"), visible_label("\\u0301")
    (' a⇥b↵', 'e⟨ZWJ⟩', '◌́')
    """
    return "".join(visible_characters(text))


def visible_characters(text: str) -> list[str]:
    """Each character of a label as it is shown."""
    if text.isascii() and text.isprintable():
        return list(text)
    shown = []
    for i, character in enumerate(text):
        after_another = i > 0 and not text[i - 1].isspace()
        category = unicodedata.category(character)
        if category in ("Mn", "Me"):
            # A mark is drawn over the character before it. A dotted circle stands for one that is in another token.
            if not after_another:
                character = NAMES.get(character, "◌" + character)
        elif character in JOINERS:
            if not after_another or i + 1 == len(text):
                character = NAMES[character]
        elif character < " ":
            character = NAMES.get(character, chr(0x2400 + ord(character)))
        elif "\udc80" <= character <= "\udcff":
            character = f"<0x{ord(character) - 0xDC00:02X}>"
        elif category in ("Cc", "Cf", "Cs", "Zl", "Zp"):
            character = NAMES.get(character, f"⟨U+{ord(character):04X}⟩")
        shown.append(character)
    return shown


def _labels(text: str, spans: list[Span]) -> list[str]:
    """The characters of each token, with a mark at a character that has parts in several tokens."""
    parts: dict[int, int] = {}
    for start, end in spans:
        for position in {start, end - 1} if end > start else ():
            parts[position] = parts.get(position, 0) + 1
    number = dict.fromkeys(parts, 0)
    labels = []
    for start, end in spans:
        shown = visible_characters(text[start:end])
        for position in {start, end - 1} if end > start else ():
            number[position] += 1
            if parts[position] > 1:
                shown[position - start] += f"·{number[position]}/{parts[position]}"
        labels.append("".join(shown) or SPACE)
    return labels


def _cover(offsets: list[Span], added: list[bool], length: int) -> list[Span]:
    """Spans that cover a text, from offsets that may leave out spaces: these belong to the next token."""
    spans: list[Span] = []
    last = None  # the last token of the text
    start = 0
    end = 0
    for i, (first, stop) in enumerate(offsets):
        if added[i] or first == stop:
            spans.append((end, end))
            continue
        # A character that was normalised into several tokens is in all their spans.
        start = max(start, min(first, end))
        end = max(end, min(stop, length))
        spans.append((start, end))
        last = i
    # Spaces after the last token belong to it; only special tokens follow.
    if last is not None:
        spans[last] = (spans[last][0], length)
        spans[last + 1 :] = [(length, length)] * (len(spans) - last - 1)
    return spans


def _without_surrogates(text: str) -> str:
    """The text with � for each byte that is no UTF-8: files are written in UTF-8."""
    return re.sub("[\ud800-\udfff]", "�", text)
