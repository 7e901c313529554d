"""Jobs of the Look page, run by a worker process: record a model, score its heads, ablate heads."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from torch.nn.functional import cross_entropy

from regard import interp, models
from regard._errors import RegardError
from regard._files import atomic_folder
from regard.interp._atlas_store import model_fingerprint
from regard.interp._head_atlas import folder_atlas
from regard.interp._look import ANSWER_TOKENS, PAGE_OBSERVABLES
from regard.lab.look.head_type_fields import head_types_response
from regard.models import TextDecoder, TextToText
from regard.models._model import Model
from regard.nn import MultiHeadAttention

Progress = Callable[..., None]
MAX_SAVED_BYTES = 3 * 2**30  # the largest size of q and k of one recording
MAX_LOGIT_BYTES = 3 * 2**30  # the largest size of the logits of one text and their softmax
MAX_PIXELS = 4096  # per side of an image
TOP_TOKENS = 12  # next tokens that an ablation compares at each position
POSITIONS = 256  # positions whose next tokens an ablation compares


def _load_model(folder: str) -> Model:
    return _cached_model(folder, model_fingerprint(Path(folder)))


@lru_cache(maxsize=2)
def _cached_model(folder: str, fingerprint: str) -> Model:
    # The fingerprint is part of the cache's key: a model that was trained further is loaded again.
    return models.load(folder)


def look(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Run a model on a text or an image, record its heads, and save the recording."""
    progress(0, None, "loading the model")
    model = _load_model(args["model"])
    target = args["target"] or ""
    image = None
    text = None
    if args["image"]:
        image = _decode_image(args["image"])
    else:
        text = args["text"]
        _check_memory(model, text, args["tokens"], args["layers"], target)
    recording = interp.look(
        model,
        text,
        image,
        answer=target or None,
        observe=replace(PAGE_OBSERVABLES, keep=True),
        layers=args["layers"] or None,
        tokens=args["tokens"],
        progress=lambda done, of: progress(done, of, "recording"),
    )
    progress(1, 1, "saving")
    # The folder appears only when the recording is complete, so a killed process leaves no half of it.
    with atomic_folder(Path(args["folder"])) as temporary:
        recording.save(temporary)
    return {"recording": args["recording"]}


def _check_memory(model: Model, text: str, max_tokens: int | None, layers: str, target: str) -> None:
    """Refuse a text whose q and k do not fit in memory, before the model runs."""
    n = len(model.tokenizer.encode(text))
    if max_tokens is not None:
        n = min(n, max_tokens)
    target_tokens = 0
    if isinstance(model, TextToText):
        # The target begins with a start token. Without a target the model generates one.
        target_tokens = 1 + ANSWER_TOKENS
        if target:
            target_tokens = 1 + len(model.tokenizer.encode(target))
    heads, size = saved_bytes(model, n, target_tokens, layers)
    if size > MAX_SAVED_BYTES:
        raise RegardError(
            f"q and k of {heads} heads at {n:,} tokens take {size / 2**30:.1f} GiB, and at most "
            f"{MAX_SAVED_BYTES / 2**30:.0f} GiB are saved; lower tokens, or select layers such as *.1.*"
        )


def saved_bytes(model: Model, n: int, target_tokens: int, layers: str) -> tuple[int, int]:
    """Return how many heads are recorded on n tokens, and the bytes of their q and k in float32.

    ``target_tokens`` is 0 if the model has no separate decoder; an empty ``layers`` selects all module paths.
    """
    heads = 0
    size = 0
    for path, layer in model.named_modules():
        if not isinstance(layer, MultiHeadAttention) or (layers and not fnmatchcase(path, layers)):
            continue
        queries = n
        keys = n
        if target_tokens and path.startswith("decoder."):
            queries = target_tokens
            if not path.endswith(".cross"):  # cross-attention reads the keys of the source
                keys = target_tokens
        heads += layer.heads
        size += 4 * layer.d_key * (queries * layer.heads + keys * layer.kv_heads)
    return heads, size


def _decode_image(url: str) -> Image.Image:
    """Decode a data URL. Formats and size are limited, because images come from outside."""
    try:
        data = base64.b64decode(url.split(",", 1)[1], validate=True)
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as image:
            width, height = image.size
            if max(width, height) > MAX_PIXELS:
                raise RegardError(f"image must have at most {MAX_PIXELS} pixels per side, got {width} × {height}")
            return image.convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError) as error:
        raise RegardError(f"the image cannot be read: {str(error).splitlines()[0]}") from None


def score_heads(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Find the type of every head of a model, and store them for the lab, the command line and Python."""
    folder = Path(args["model"])
    atlas = folder_atlas(
        folder, lambda: (_load_model(str(folder)), None), progress=lambda done, of: progress(done, of, "scoring")
    )
    return head_types_response(atlas)


def ablate(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Compare the predictions of a model with all heads and without some of them.

    Returns ``{"loss", "next"}``. ``loss``: the loss of each token after the first, given the tokens before it, in nats,
    and its total, as ``before`` and ``after``. ``next``: the probabilities of the likeliest next tokens, before and
    after, at ``args["position"]`` and the positions around it.
    """
    model = _load_model(args["model"])
    if not isinstance(model, TextDecoder):
        raise RegardError(f"ablation needs a language model that predicts next tokens, got {type(model).__name__}")
    ids = torch.tensor([args["ids"]])
    n = ids.shape[1]
    size = 8 * n * model.config.integer("vocab_size", 1)  # float32 logits, and what is computed from them
    if size > MAX_LOGIT_BYTES:
        raise RegardError(
            f"the probabilities at {n:,} tokens take {size / 2**30:.1f} GiB, and at most "
            f"{MAX_LOGIT_BYTES / 2**30:.0f} GiB are allowed; record a shorter text"
        )
    first = max(0, min(args["position"] - POSITIONS // 2, n - POSITIONS))
    positions = slice(first, min(n, first + POSITIONS))
    heads = [(path, head) for path, head in args["heads"]]
    ablation = interp.ablate(model, heads, by=args["by"], over=ids if args["by"] == "mean" else None)
    progress(0, 2, "with all heads")
    with torch.no_grad():
        losses_before, before = _predictions(model, ids, positions)
        progress(1, 2, "with heads ablated")
        with ablation:
            losses_after, after = _predictions(model, ids, positions)

    rows = []
    labels: dict[int, str] = {}
    for probabilities_before, probabilities_after in zip(before, after, strict=True):
        likely = likely_tokens(probabilities_before, probabilities_after)
        for row in likely:
            # The same tokens are likely at many positions: each is labelled once.
            if row["id"] not in labels:
                labels[row["id"]] = interp.label_tokens(model.tokenizer, ids=[row["id"]]).labels[0]
            row["token"] = labels[row["id"]]
        rows.append(likely)
    return {
        "loss": {"before": _losses(losses_before), "after": _losses(losses_after)},
        "next": {"first": first, "positions": rows},
    }


def _predictions(model: TextDecoder, ids: torch.Tensor, positions: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token after the first, ``[n − 1]``, and the next token's probabilities at positions."""
    logits = model(ids)
    assert isinstance(logits, torch.Tensor)
    losses = cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
    return losses, logits[0, positions].float().softmax(-1)


def _losses(losses: torch.Tensor) -> dict[str, Any]:
    # The total is computed in float64: it is a sum over thousands of tokens.
    return {"tokens": losses.tolist(), "total": float(losses.double().sum())}


def likely_tokens(before: torch.Tensor, after: torch.Tensor) -> list[dict[str, Any]]:
    """Return the ids and probabilities of the tokens that are likely in either case, the most likely first."""
    count = min(TOP_TOKENS, len(before))
    likely = torch.cat([before.topk(count).indices, after.topk(count).indices]).unique()
    order = torch.maximum(before, after)[likely].argsort(descending=True)
    rows = []
    for token_id in likely[order][:count].tolist():
        rows.append({"id": token_id, "before": float(before[token_id]), "after": float(after[token_id])})
    return rows
