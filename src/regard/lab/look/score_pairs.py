"""A job of the Look page: split the score of one query and one key over pairs of parts of the model."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch

from regard._errors import RegardError
from regard.interp import Component, ScorePair
from regard.interp._model_blocks import CONSTANT, HEAD
from regard.interp._score_attribution import split_score
from regard.lab.look.jobs import Progress, _load_model
from regard.models import TextDecoder, TextEncoder
from regard.nn._stack import Stack

MOST_PAIRS = 200  # pairs that are sent to the page
MAX_PATH_BYTES = 3 * 2**30  # the largest size of the linear paths of one text
VECTORS_PER_BLOCK = 12  # that the linear paths of a block keep for each token


def split(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Split the score of ``args["row"]`` and ``args["key"]`` in head ``args["head"]`` of the layer ``args["path"]``.

    Returns ``{"score", "bias", "softcap", "exact", "count", "rest", "pairs"}``: the largest pairs, each with its parts
    and its value, and the sum of the pairs that are not sent. ``exact`` is False if the model computes in 16 bits: the
    parts are those of the model in float32.
    """
    model = _load_model(args["model"])
    if not isinstance(model, TextDecoder | TextEncoder):
        raise RegardError(f"a score can be split in models that read one text, got {type(model).__name__}")
    ids = torch.tensor([args["ids"]])
    stack: Stack = model.decoder if isinstance(model, TextDecoder) else model.encoder
    size = 4 * ids.shape[1] * stack.d * len(stack.blocks) * VECTORS_PER_BLOCK
    if size > MAX_PATH_BYTES:
        raise RegardError(
            f"the paths of {ids.shape[1]:,} tokens take about {size / 2**30:.1f} GiB, and at most "
            f"{MAX_PATH_BYTES / 2**30:.0f} GiB are allowed; record a shorter text"
        )
    place = (args["path"], args["head"], args["row"], args["key"])
    parts = split_score(model, ids, *place, progress=lambda done, of: progress(done, of, "splitting the score"))
    pairs = _without_single_biases(parts.pairs())
    shown = pairs[:MOST_PAIRS]
    return {
        "score": parts.score,
        "bias": parts.bias,
        "softcap": parts.softcap,
        "exact": next(model.parameters()).dtype in (torch.float32, torch.float64),
        "count": len(pairs),
        "rest": sum(pair.value for pair in pairs[MOST_PAIRS:]),
        "pairs": [
            {"query": _part_fields(pair.query), "key": _part_fields(pair.key), "value": pair.value} for pair in shown
        ],
    }


def _without_single_biases(pairs: Iterable[ScorePair]) -> list[ScorePair]:
    """The pairs with all constants of a side as one part: single biases of earlier layers say little on a page."""
    values: dict[tuple[Component | None, Component | None], float] = {}
    for pair in pairs:
        names = (_merged(pair.query), _merged(pair.key))
        values[names] = values.get(names, 0.0) + pair.value
    merged = [ScorePair(query, key, value) for (query, key), value in values.items()]
    return sorted(merged, key=lambda pair: -abs(pair.value))


def _merged(part: Component | None) -> Component | None:
    if part is not None and part.kind == CONSTANT:
        return Component(CONSTANT, "", None)
    return part


def _part_fields(part: Component | None) -> dict[str, Any] | None:
    """A part for the page: its kind, its module path, its head, and the number of its block."""
    if part is None:
        return None
    numbers = ".".join(re.findall(r"\d+", part.path)) if part.kind != HEAD else ""
    return {"kind": part.kind, "path": part.path, "head": part.head, "block": numbers}
