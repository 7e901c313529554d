"""``groups_of``: the tokens of a text as groups of keys: special tokens, sentences, words, or the roles of a chat."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._checks import as_tensor, describe_value, is_integer_dtype
from regard._errors import RegardError, RegardTypeError
from regard._groups import MOST_GROUPS, NO_GROUP, Groups
from regard.interp._token_readers import Encoded, Span, find_reader
from regard.interp._token_text import visible_label
from regard.models._tokenizer import MissingTokenizer

KINDS = ("special", "sentences", "words", "chat")
TEXT_NAMES = ("sentences", "words")  # the kinds whose groups are named by parts of the text
TEXT = "text"  # the group of all tokens that are not special
TEMPLATE = "template"  # the group of the tokens that mark the roles of a chat
LONGEST_NAME = 24  # characters of a sentence or a word

# A sentence ends at its punctuation and at an empty line. Full-width punctuation needs no space after it.
SENTENCE_END = re.compile(r"[.!?…]+[\"'”’»)\]]*(?=\s|$)|[。！？]+[”’」』）]*|\n\s*\n")
WORD = re.compile(r"\S+")

# What marks the roles of a chat. The text after a mark is of its role, until the next mark; a mark without a role ends
# the text of a role.
MARKS = re.compile(
    "|".join(
        (
            r"<\|im_start\|>\s*(?P<chatml>\w+)[^\S\n]*\n?",  # Qwen, SmolLM
            r"<\|start_header_id\|>\s*(?P<llama3>\w+)\s*<\|end_header_id\|>\n*",
            r"<start_of_turn>\s*(?P<gemma>\w+)[^\S\n]*\n?",
            r"<\|start\|>(?P<harmony>\w+)(?:(?!<\|message\|>).)*<\|message\|>",  # gpt-oss
            r"<\|start_of_role\|>(?P<granite>\w+)<\|end_of_role\|>",
            r"<\|(?P<phi>system|user|assistant|tool|observation)\|>\n?",  # Phi, Zephyr, GLM
            r"<｜(?P<deepseek>User|Assistant)｜>",
            r"<\|START_OF_TURN_TOKEN\|><\|(?P<cohere>SYSTEM|USER|CHATBOT)_TOKEN\|>",
            r"(?P<assistant>\[/INST\])",  # Llama 2, Mistral
            r"(?P<system><<SYS>>\n?|\[SYSTEM_PROMPT\])",
            r"(?P<user>\[INST\](?!\s*<<SYS>>)|<</SYS>>\n*)",
            r"\[INST\]\s*(?=<<SYS>>)",
            r"\[/SYSTEM_PROMPT\]",
            r"<\|(?:im_end|eot_id|eom_id|end|return|call|end_of_text|END_OF_TURN_TOKEN)\|>\n?",
            r"<end_of_turn>\n?",
            r"</s>",
            r"<｜end▁of▁sentence｜>",
        )
    ),
    re.DOTALL,
)
FIXED_ROLES = ("system", "user", "assistant")  # groups of MARKS that are themselves the role


@dataclass(frozen=True)
class _Tokens:
    """The tokens of one text: what they decode to, the characters of each, and the spelling of special ones."""

    text: str
    spans: list[Span]
    is_special: list[bool]
    spellings: list[str]


def groups_of(
    tokenizer: Any, ids: Tensor | Sequence[int] | Sequence[Sequence[int]], by: str | Mapping[str, Any] = "special"
) -> Groups:
    """Return the tokens of a text as ``Groups``, for ``Observe(groups=…)``.

    - ``tokenizer``: of ``transformers`` or ``tokenizers``, or of a model of ``regard.models``.
    - ``ids``: token ids, ``[n]`` or ``[B, n]``.
    - ``by``: which tokens are a group:

      - ``"special"``: the tokens of each special token (``<s>``, ``[SEP]``); all others are the group ``"text"``.
      - ``"sentences"``: each sentence. It ends with its punctuation, or at an empty line.
      - ``"words"``: each run of characters without spaces. The second "the" of a text is the group ``"the (2)"``.
      - ``"chat"``: all turns of each role, as the special tokens of the text mark them; the marks are the group
        ``"template"``. Marks of Qwen, Llama, Mistral, Gemma, Phi, DeepSeek, gpt-oss, Cohere and Granite are known.
      - a mapping name → token id, or several: ``{"image": 32000}`` for the patches of an image in a text. Other
        tokens are in no group. The tokenizer may be None.

    Special tokens are in no sentence and in no word. Raises ``RegardError`` if there are more than 256 groups, or if
    the text has no chat roles.

    >>> tokenizer = regard.models.load(regard.models.bundled()).tokenizer
    >>> ids = tokenizer.encode("It rains. The cat sleeps.")
    >>> groups_of(tokenizer, ids)
    Groups(<|endoftext|>: 1 keys, text: 15 keys)
    >>> groups_of(tokenizer, ids, by="sentences").names
    ('1 It rains.', '2 The cat sleeps.')
    """
    return name_groups(tokenizer, ids, by, with_text=True)


def name_groups(tokenizer: Any, ids: Any, by: str | Mapping[str, Any], *, with_text: bool) -> Groups:
    """``groups_of``; without ``with_text``, sentences and words have numbers as names."""
    rows = _checked_ids(ids)
    if isinstance(by, Mapping):
        return _groups_of_ids(rows, by, batched=_is_batched(ids))
    if by not in KINDS:
        raise RegardError(f"by must be {', '.join(map(repr, KINDS))} or a mapping name → token id, got {by!r}")
    reader = find_reader(tokenizer)
    if isinstance(tokenizer, MissingTokenizer):
        reader.encode("")  # raises, and says why
    names: dict[str, int] = {}
    labels = []
    for row in rows:
        text, spans, is_special = reader.decode(None, Encoded([], [], []), row)
        spellings = [
            visible_label(reader.spelling(token)) if special else ""
            for token, special in zip(row, is_special, strict=True)
        ]
        tokens = _Tokens(text, spans, is_special, spellings)
        if by == "special":
            own = [spelling or TEXT for spelling in spellings]
        elif by == "chat":
            own = _chat_roles(tokens)
        else:
            own = _parts_of_text(tokens, by, with_text)
        # A group of the same name in two batch entries is one group.
        for name in own:
            if name and name not in names:
                names[name] = len(names)
        labels.append([names[name] if name else NO_GROUP for name in own])
    ordered = list(names)
    if by == "special":
        ordered = [name for name in names if name != TEXT] + [TEXT]
    elif by == "chat":
        ordered = [name for name in names if name != TEMPLATE] + [TEMPLATE]
    if len(ordered) > MOST_GROUPS:
        raise RegardError(
            f"the text has {len(ordered)} groups by {by!r}, at most {MOST_GROUPS} can be measured; give fewer tokens"
        )
    if not ordered:
        raise RegardError(f"the text has no {by}: there is nothing to group")
    # The numbers of the groups in their new order.
    moved = torch.tensor([ordered.index(name) for name in names] + [NO_GROUP])
    numbers = moved[torch.tensor(labels, dtype=torch.int64)]
    return Groups(numbers if _is_batched(ids) else numbers[0], ordered)


def without_names(groups: Groups) -> Groups:
    """The same groups with numbers as names, which say nothing about the text."""
    return Groups(groups.labels, [f"group {number}" for number in range(1, len(groups) + 1)])


def _is_batched(ids: Any) -> bool:
    return as_tensor("ids", ids).ndim == 2


def _checked_ids(ids: Any) -> list[list[int]]:
    """Token ids as rows of integers."""
    tensor = as_tensor("ids", ids)
    if tensor.ndim not in (1, 2) or not is_integer_dtype(tensor.dtype):
        raise RegardTypeError(f"ids must be token ids [n] or [B, n], got {describe_value(ids)}")
    if tensor.numel() == 0:
        raise RegardError("ids must have at least one token, got none")
    rows: list[list[int]] = tensor.reshape(-1, tensor.shape[-1]).tolist()
    return rows


def _groups_of_ids(rows: list[list[int]], by: Mapping[str, Any], *, batched: bool) -> Groups:
    """The tokens with the ids of each name."""
    ids = torch.tensor(rows)
    masks = {}
    for name, chosen in by.items():
        wanted = as_tensor(f"the token ids of group {name!r}", chosen).reshape(-1)
        if not is_integer_dtype(wanted.dtype):
            raise RegardTypeError(f"group {name!r} must be a token id or several, got {describe_value(chosen)}")
        masks[name] = torch.isin(ids, wanted.cpu())
    if not batched:
        masks = {name: mask[0] for name, mask in masks.items()}
    return Groups(masks)


def _parts_of_text(tokens: _Tokens, by: str, with_text: bool) -> list[str]:
    """The name of the sentence or word of each token; empty for a token of none."""
    bounds = _sentences(tokens.text) if by == "sentences" else [match.span() for match in WORD.finditer(tokens.text)]
    names: list[str] = []
    counts: dict[str, int] = {}
    for number, (start, end) in enumerate(bounds, 1):
        name = _shortened(tokens.text[start:end])
        counts[name] = counts.get(name, 0) + 1
        if not with_text:
            name = f"{by.removesuffix('s')} {number}"
        elif by == "sentences":
            name = f"{number} {name}"
        elif counts[name] > 1:
            name = f"{name} ({counts[name]})"
        names.append(name)

    owners = []
    part = 0
    for (start, end), special in zip(tokens.spans, tokens.is_special, strict=True):
        # A token belongs where its first character is that is no space: " The" begins a new sentence.
        piece = tokens.text[start:end]
        position = start + len(piece) - len(piece.lstrip())
        while part < len(bounds) and bounds[part][1] <= position:
            part += 1
        inside = part < len(bounds) and bounds[part][0] <= position and bool(piece.strip())
        if special:
            owners.append("")
        elif inside:
            owners.append(names[part])
        elif by == "sentences" and not piece.strip():
            # Spaces after a sentence belong to it.
            owners.append(owners[-1] if owners else "")
        else:
            owners.append("")
    return owners


def _sentences(text: str) -> list[Span]:
    """The first and the end character of each sentence, without the spaces around it."""
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    spans = []
    start = 0
    for end in [*ends, len(text)]:
        sentence = text[start:end]
        if sentence.strip():
            first = start + len(sentence) - len(sentence.lstrip())
            spans.append((first, first + len(sentence.strip())))
        start = end
    return spans


def _shortened(text: str) -> str:
    """A part of the text as a name: one line, at most ``LONGEST_NAME`` characters."""
    name = visible_label(" ".join(text.split()))
    if len(name) > LONGEST_NAME:
        name = name[: LONGEST_NAME - 1].rstrip() + "…"
    return name


def _chat_roles(tokens: _Tokens) -> list[str]:
    """The role of each token of a chat, or ``TEMPLATE``; empty for a token of none."""
    # The text with its special tokens, and where each token begins in it.
    pieces = []
    end = 0
    for (start, stop), spelling in zip(tokens.spans, tokens.spellings, strict=True):
        if spelling:
            pieces.append(spelling)
        else:
            # Parts of one character cover it together.
            pieces.append(tokens.text[max(start, end) : stop])
            end = max(end, stop)
    text = "".join(pieces)
    marks = list(MARKS.finditer(text))
    if not any(_role_of(mark) for mark in marks):
        raise RegardError(
            "by='chat' needs a text with the special tokens of a chat, such as <|im_start|>user; none was found "
            "(a tokenizer's apply_chat_template writes them)"
        )

    roles = []
    position = 0
    number = 0  # of marks that begin before the end of the token
    for piece, spelling in zip(pieces, tokens.spellings, strict=True):
        before = number
        while number < len(marks) and marks[number].start() < position + len(piece):
            number += 1
        current = marks[number - 1] if number else None
        # A token that a mark covers in part is one of the mark.
        touches = number > before or (current is not None and position < current.end())
        if spelling or touches:
            roles.append(TEMPLATE)
        else:
            roles.append(_role_of(current) if current is not None else "")
        position += len(piece)
    return roles


def _role_of(mark: re.Match[str]) -> str:
    """The role that a mark begins, in lower case; empty if it ends one."""
    name = mark.lastgroup
    if name is None:
        return ""
    return name if name in FIXED_ROLES else str(mark[name]).lower()
