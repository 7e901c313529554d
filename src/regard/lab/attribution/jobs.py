"""Jobs of the Attribution page, run by a worker process: attribute a prediction, and patch a head."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard import interp, models
from regard._errors import RegardError
from regard.interp import Attribution, Site
from regard.interp._atlas_store import model_fingerprint
from regard.lab.look.jobs import likely_tokens
from regard.models import TextDecoder

Progress = Callable[..., None]
MAX_TOKENS = 1024  # of a text: the page gets one number per head and token
MAX_FLOAT32_PARAMETERS = 2**30  # larger models keep their dtype: in float32 they may not fit into memory


def attribute(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Attribute a predicted token to the tokens and heads of a text.

    - ``args``: ``model`` (a folder), ``text``, ``position`` (None: the last token), ``target`` and ``against`` (token
      ids; None: the most likely token, and no other token).

    Returns the tokens of the text, the likeliest next tokens at the position, the target's number, the contribution of
    each token and head, for each head also that of every key, and the exact parts of the logit.
    """
    progress(0, None, "loading the model")
    model = _load_exact(args["model"])
    tokens = interp.label_tokens(model.tokenizer, args["text"])
    n = len(tokens.ids)
    if n > MAX_TOKENS:
        raise RegardError(f"the text must have at most {MAX_TOKENS} tokens here, got {n}; record it on the Look page")
    if model.max_positions is not None and n > model.max_positions:
        raise RegardError(f"the text has {n} tokens, and the model reads at most {model.max_positions}")
    ids = torch.tensor([tokens.ids])
    position = n - 1 if args["position"] is None else int(args["position"])
    if position >= n:
        raise RegardError(f"position must be below {n}, the number of tokens, got {position}")

    progress(0, None, "predicting")
    with torch.no_grad():
        logits = _logits(model, ids)[0, position].float()
    target = int(logits.argmax()) if args["target"] is None else int(args["target"])
    against = args["against"]
    for name, token in (("target", target), ("against", against)):
        if token is not None and token >= len(logits):
            raise RegardError(f"{name} must be below {len(logits)}, the size of the vocabulary, got {token}")
    if against == target:
        raise RegardError("against must be another token than the target")

    progress(0, None, "attributing")
    number: Any = (position, target) if against is None else (position, target, against)
    attribution = interp.attribute(model, ids, number)
    progress(0, None, "splitting the logit")
    parts, reason = _logit_parts(model, ids, target, against, position)
    return {
        "tokens": tokens.labels,
        "ids": tokens.ids,
        "position": position,
        "next": _labelled(model, likely_tokens(logits.softmax(-1), logits.softmax(-1))),
        "target": _token(model, target),
        "against": None if against is None else _token(model, against),
        "value": attribution.value,
        "contributions": attribution.tokens[0].tolist(),
        "heads": _head_rows(attribution, parts),
        "parts": [part for part in parts if part["kind"] != "head"],
        "no_parts": reason,
    }


def patch(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Measure what happens if one head is patched.

    - ``args``: ``model``, ``ids``, ``path``, ``head``, ``key`` (None: the whole output is replaced; else the value that
      the head reads at this key), ``by`` ("zero" or "mean"), ``position``, ``target`` and ``against``.

    Returns the target's number before and after, and the likeliest next tokens with both probabilities.
    """
    model = _load_exact(args["model"])
    ids = torch.tensor([args["ids"]])
    if args["key"] is None:
        site = Site(args["path"], args["head"], "output")
    else:
        site = Site(args["path"], args["head"], "v", args["key"])
    replace = torch.zeros_like if args["by"] == "zero" else _mean_of_rows
    progress(0, 2, "without the patch")
    with torch.no_grad():
        before = _logits(model, ids)[0, args["position"]].float()
        progress(1, 2, "with the patch")
        with interp.patch(model, [site], replace):
            after = _logits(model, ids)[0, args["position"]].float()
    return {
        "before": _number(before, args["target"], args["against"]),
        "after": _number(after, args["target"], args["against"]),
        "next": _labelled(model, likely_tokens(before.softmax(-1), after.softmax(-1))),
    }


def _mean_of_rows(x: Tensor) -> Tensor:
    """``[B, n, width]`` with the mean over n in every row."""
    return x.mean(1, keepdim=True).expand_as(x)


def _load_exact(folder: str) -> TextDecoder:
    """The model in float32: small effects would vanish in the rounding of half precision."""
    model = _cached_model(folder, model_fingerprint(Path(folder)))
    if not isinstance(model, TextDecoder):
        raise RegardError(f"attribution needs a language model that predicts next tokens, got {type(model).__name__}")
    return model


@lru_cache(maxsize=1)
def _cached_model(folder: str, fingerprint: str) -> models.Model:
    # The fingerprint is part of the cache's key: a model that was trained further is loaded again.
    model = models.load(folder)
    if sum(parameter.numel() for parameter in model.parameters()) <= MAX_FLOAT32_PARAMETERS:
        model = model.float()
    return model


def _logits(model: TextDecoder, ids: Tensor) -> Tensor:
    logits = model(ids)
    assert isinstance(logits, Tensor)
    return logits


def _number(logits: Tensor, target: int, against: int | None) -> float:
    number = logits[target]
    if against is not None:
        number = number - logits[against]
    return float(number)


def _token(model: TextDecoder, token: int) -> dict[str, Any]:
    return {"id": token, "token": interp.label_tokens(model.tokenizer, ids=[token]).labels[0]}


def _labelled(model: TextDecoder, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row | _token(model, row["id"]) for row in rows]


def _logit_parts(
    model: TextDecoder, ids: Tensor, target: int, against: int | None, position: int
) -> tuple[list[dict[str, Any]], str]:
    """The exact parts of the logit, or of the difference of two; and why there are none."""
    chosen = target if against is None else (target, against)
    try:
        parts = interp.logit_attribution(model, ids, chosen, position)
    except RegardError as error:
        return [], str(error)
    rows = []
    for part in parts.parts:
        rows.append({"kind": part.kind, "path": part.path, "head": part.head, "value": part.value})
    return rows, ""


def _head_rows(attribution: Attribution, parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per head: its contribution, the contribution of each key, and its direct part of the logit."""
    direct = {(part["path"], part["head"]): part["value"] for part in parts if part["kind"] == "head"}
    rows = []
    for number, (path, layer) in enumerate(attribution.items()):
        contributions = layer.heads[0].tolist()
        keys = layer.keys[0].tolist()
        for head, contribution in enumerate(contributions):
            row = {"layer": number, "path": path, "head": head, "contribution": contribution, "keys": keys[head]}
            rows.append(row | {"direct": direct.get((path, head))})
    return rows
