"""Which words stand at the queries and keys of a place: the text's own, or the source's in an encoder–decoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_words", "is_cross", "named_cross", "one_source", "words"]

# How models name attention over another sequence. torch's and diffusers' names are whole parts of a path.
CROSS = ("cross", "encdec", "encoder_attn")
CROSS_PARTS = ("multihead_attn", "attn2")


def named_cross(path: str) -> bool:
    """Whether a place's name says that its keys are another sequence's."""
    return any(word in path.lower() for word in CROSS) or any(part in CROSS_PARTS for part in path.split("."))


def is_cross(about: Mapping[str, Any], path: str) -> bool:
    """Whether it was seen to be so (``about["cross"]``), or its name says it."""
    seen = about.get("cross")
    return (isinstance(seen, dict) and path in seen) or named_cross(path)


def one_source(about: Mapping[str, Any], path: str) -> bool:
    """Whether all calls of a place looked at the same keys of another sequence, as the steps of a decoder do."""
    seen = about.get("cross")
    return isinstance(seen, dict) and seen.get(path) is True


def words(
    about: Mapping[str, Any], path: str, n: int | None, m: int | None
) -> tuple[list[str] | None, list[str] | None]:
    """The words at a place's n queries and m keys, None where there are none that fit.

    ``about["tokens"]`` are the words of the text, ``about["source"]`` those that an encoder read for it.
    Cross-attention asks from the one about the other; an encoder reads the source where there is one. More words than
    places is ordinary, and the first ones are meant: the last token that a model wrote was never read. Fewer words
    fit nothing.

    >>> words({"tokens": ["a", "b", "c"], "source": ["x", "y"]}, "decoder.blocks.0.cross", 2, 2)
    (['a', 'b'], ['x', 'y'])
    """
    if is_cross(about, path):
        return _first(about.get("tokens"), n), _first(about.get("source"), m)
    inside = any(part.startswith("encoder") for part in path.split("."))
    own = about.get("source" if inside and about.get("source") is not None else "tokens")
    return _first(own, n), _first(own, m)


def check_words(about: Mapping[str, Any], queries: Sequence[int | None]) -> None:
    """Words that are too few for every place were given for another text."""
    found, sizes = about.get("tokens"), [n for n in queries if n is not None]
    if isinstance(found, list | tuple) and sizes and len(found) < min(sizes):
        raise ValueError(f"tokens has {len(found)} words, but at least {min(sizes)} queries were seen at every place")


def _first(found: Any, size: int | None) -> list[str] | None:
    """As many words as there are places. A recording comes from a file, so that anything may be in it."""
    if size is None or not isinstance(found, list | tuple) or len(found) < size:
        return None
    return [str(word) for word in found[:size]]
