"""Find the tokens that label the queries and keys of a layer: tokens of the text, or of the encoder's source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from regard._errors import RegardError
from regard._hooks import has_cross_attention_name
from regard.interp._token_text import visible_label


def is_cross_attention(metadata: Mapping[str, Any], path: str) -> bool:
    """Whether a layer is cross-attention: it was recorded as such (``metadata["cross"]``), or has such a name."""
    cross = metadata.get("cross")
    path = re.sub(r" \(\d+\)$", "", path)  # calls that cannot be joined are numbered: "path (2)"
    return (isinstance(cross, dict) and path in cross) or has_cross_attention_name(path)


def shares_source(metadata: Mapping[str, Any], path: str) -> bool:
    """Whether all calls of a cross-attention layer read the same keys, as the steps of a decoder do."""
    cross = metadata.get("cross")
    return isinstance(cross, dict) and cross.get(path) is True


def query_and_key_labels(
    metadata: Mapping[str, Any], path: str, n: int | None, m: int | None
) -> tuple[list[str] | None, list[str] | None]:
    """The labels of a layer's n queries and m keys; None if there are none that fit.

    ``metadata["tokens"]`` are the tokens of the text, ``metadata["source"]`` those that an encoder read for it. In
    cross-attention the queries are tokens of the text and the keys are of the source. An encoder reads the source, if
    there is one. Labels fit if there is one for each row. One more is allowed, and left out: a model does not read the
    last token that it wrote. Other labels are of another text, and would name the wrong rows. Every character of a
    label is visible (see ``visible_label``), whoever wrote the labels.

    >>> query_and_key_labels({"tokens": ["a", "b", "c"], "source": ["x", "y"]}, "decoder.blocks.0.cross", 2, 2)
    (['a', 'b'], ['x', 'y'])
    """
    of_queries, of_keys = _label_names(metadata, path)
    return _fitting_labels(metadata.get(of_queries), n), _fitting_labels(metadata.get(of_keys), m)


def label_problem(metadata: Mapping[str, Any], sizes: Mapping[str, tuple[int | None, int | None]]) -> str:
    """Why the labels of a recording name no row of it, in words; empty if they fit, or if there are none.

    - ``sizes``: the numbers of queries and keys of each layer, ``Recording.sizes()``.
    """
    for name in ("tokens", "source"):
        labels = metadata.get(name)
        if not isinstance(labels, list | tuple):
            continue
        counts: set[int] = set()
        for path, (n, m) in sizes.items():
            of_queries, of_keys = _label_names(metadata, path)
            if of_queries == name and n is not None:
                counts.add(n)
            elif of_keys == name and m is not None:
                counts.add(m)
        # Layers may have different sizes: it is enough that the labels fit one of them.
        if counts and all(_fitting_labels(labels, count) is None for count in counts):
            return f"{name} has {len(labels)} labels, but {_which_rows(metadata, name)} {_join_counts(counts)}"
    return ""


def check_token_labels(metadata: Mapping[str, Any], sizes: Mapping[str, tuple[int | None, int | None]]) -> None:
    """Raise if the labels fit no layer that they name: see ``label_problem``."""
    problem = label_problem(metadata, sizes)
    if problem:
        raise RegardError(problem)


def _label_names(metadata: Mapping[str, Any], path: str) -> tuple[str, str]:
    """The entries of the metadata that name a layer's queries and keys: "tokens" or "source"."""
    if is_cross_attention(metadata, path):
        return "tokens", "source"
    # The encoder beside a decoder reads the source, which may be unknown (the sound that Whisper hears). An encoder
    # alone, as in BERT, reads the text.
    in_encoder = any(part.startswith("encoder") for part in path.split("."))
    if in_encoder and (metadata.get("source") is not None or metadata.get("cross")):
        return "source", "source"
    return "tokens", "tokens"


def _which_rows(metadata: Mapping[str, Any], name: str) -> str:
    """What the labels of an entry of the metadata name, as the start of a sentence about its numbers."""
    if name == "source":
        return "the text that the encoder reads has"
    if metadata.get("cross"):
        return (
            'metadata["tokens"] names the tokens of the decoder (metadata["source"] names those of the encoder), and '
            "they number"
        )
    return "the layers have this many queries:"


def _join_counts(counts: set[int]) -> str:
    return " or ".join(map(str, sorted(counts)))


def _fitting_labels(labels: Any, count: int | None) -> list[str] | None:
    # A recording comes from a file, which may hold anything under this name.
    if count is None or not isinstance(labels, list | tuple) or len(labels) not in (count, count + 1):
        return None
    return [visible_label(str(label)) for label in labels[:count]]
