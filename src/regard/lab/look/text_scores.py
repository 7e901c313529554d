"""What one head does on the text of its recording: its weight on the previous token and on repeated tokens.

Head types are found on probes, which are other texts. These scores are of this text, from its exact weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard.interp._token_labels import is_cross_attention, query_and_key_labels
from regard.lab.look.map_pyramid import Pyramid

MAX_WEIGHTS = 2**25  # queries × keys; about 5,800 tokens, and a second of computation
STRIP_WEIGHTS = 2**22  # weights that are computed at once
TEXT_SCORES = {
    "previous": "weight on the token before the query",
    "induction": "weight on the token after an earlier occurrence of the present token",
    "duplicate": "weight on earlier occurrences of the present token",
}


def token_numbers(metadata: Mapping[str, Any], path: str, n: int | None, m: int | None) -> Tensor | None:
    """Return a number per token of a layer's text, equal for equal tokens; None if queries and keys are not one text.

    The numbers are the token ids if the recording has them for this layer, else they are assigned by the labels.
    """
    if n is None or n != m or is_cross_attention(metadata, path):
        return None
    labels, _ = query_and_key_labels(metadata, path, n, m)
    if labels is None:
        return None
    # The ids belong to the tokens of the text; an encoder may read another one, the source.
    tokens = metadata.get("tokens")
    ids = metadata.get("ids")
    names: list[Any] = labels
    has_same_labels = isinstance(tokens, list | tuple) and list(map(str, tokens[:n])) == labels
    if has_same_labels and isinstance(ids, list) and len(ids) >= n and all(isinstance(i, int) for i in ids[:n]):
        names = ids[:n]
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(name, len(numbers)) for name in names])


def score_text(pyramid: Pyramid, tokens: Tensor | None) -> dict[str, Any]:
    """Return ``{name: {"value", "rows"}}`` for each of ``TEXT_SCORES``: a mean over ``rows`` rows of exact weights.

    A row counts for a score if it sees at least one of the keys that the score is about. ``value`` is None if there is
    no such row, for example because no token of the text is repeated.

    - ``pyramid``: the weights of the head.
    - ``tokens``: ``[n]``, from ``token_numbers``; None if queries and keys are not the same text.

    If nothing can be computed, the result is ``{"reason": …}`` instead.
    """
    if tokens is None:
        return {"reason": "queries and keys are not tokens of one text"}
    n = pyramid.n
    if n * n > MAX_WEIGHTS:
        return {"reason": f"the text is too long for this: {n:,} tokens"}
    totals = dict.fromkeys(TEXT_SCORES, 0.0)
    rows = dict.fromkeys(TEXT_SCORES, 0)
    positions = torch.arange(n)
    step = max(1, STRIP_WEIGHTS // max(1, n))
    for start in range(0, n, step):
        strip = slice(start, min(n, start + step))
        queries = positions[strip].unsqueeze(1)
        weights = pyramid.weights(strip).double()
        visible = pyramid.call.visible(pyramid.batch, pyramid.head, strip, None)

        copies = (tokens[strip].unsqueeze(1) == tokens) & (positions < queries)
        after_copies = torch.zeros_like(copies)
        after_copies[:, 1:] = copies[:, :-1]
        chosen = {"previous": positions == queries - 1, "induction": after_copies, "duplicate": copies}
        for name, keys in chosen.items():
            counts = (keys & visible).any(1) & pyramid.counted[strip]
            totals[name] += float(torch.where(keys, weights, 0.0).sum(1)[counts].sum())
            rows[name] += int(counts.sum())
    scores: dict[str, Any] = {}
    for name, count in rows.items():
        scores[name] = {"value": None, "rows": count}
        if count:
            scores[name]["value"] = totals[name] / count
    return scores
