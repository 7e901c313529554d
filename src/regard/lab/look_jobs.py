"""What the room «Look» has done by a worker: a model run and recorded, its heads named, heads taken out."""

from __future__ import annotations

import base64
import binascii
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError

from regard import models
from regard.lab.kinds import stamp
from regard.models import ImageModel, TextDecoder, TextToText
from regard.models.model import Model
from regard.nn import MultiHeadAttention
from regard.watching import ablate as without
from regard.watching import heads
from regard.watching.atlas import COLUMNS
from regard.watching.look import ANSWER, LOOK
from regard.watching.look import look as watched

__all__ = ["ablate", "kinds", "look"]

Progress = Callable[..., None]
KEPT = 3 * 2**30  # bytes of q and k in one recording
PIXELS = 4096  # a side of a picture
LOGITS = 3 * 2**30  # bytes of logits, and of what is made of them
SHOWN = 12  # next tokens that are told


def _model(folder: str) -> Model:
    return _loaded(folder, stamp(Path(folder)))


@lru_cache(maxsize=2)
def _loaded(folder: str, mark: str) -> Model:
    """``mark``: a model that was trained further is loaded anew."""
    return models.load(folder)


def look(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Watch a model on a text or a picture, and save what was seen."""
    progress(0, None, "loading the model")
    model = _model(args["model"])
    picture = _picture(args["image"]) if args["image"] else None
    text, tokens = None if picture is not None else args["text"], args["tokens"]
    if text is not None:
        _check_room(model, text, tokens, args["layers"], args["target"] or "")
    seen = watched(
        model,
        text,
        picture,
        answer=args["target"] or None,
        observe=replace(LOOK, keep=True),
        layers=args["layers"] or None,
        tokens=tokens,
        progress=lambda done, of: progress(done, of, "watching"),
    )
    progress(1, 1, "saving")
    folder = Path(args["folder"])
    try:
        seen.save(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return {"recording": args["recording"]}


def _check_room(model: Model, text: str, tokens: int | None, layers: str, answer: str) -> None:
    """q and k of a long text in a large model do not fit: say so before the model runs."""
    n = len(model.text.encode(text))
    n = n if tokens is None else min(n, tokens)
    written = 1 + (len(model.text.encode(answer)) if answer else ANSWER) if isinstance(model, TextToText) else 0
    heads, size = kept_bytes(model, n, written, layers)
    if size > KEPT:
        raise ValueError(
            f"q and k of {heads} heads at {n:,} tokens would take {size / 2**30:.1f} GiB, and "
            f"{KEPT / 2**30:.0f} are kept at most: read fewer tokens, or name layers to watch, e.g. *.1.*"
        )


def kept_bytes(model: Model, n: int, written: int, layers: str) -> tuple[int, int]:
    """Heads that are watched on n tokens, and the float32 bytes of their q and k; ``written``: an answer's tokens."""
    heads = size = 0
    for path, x in model.named_modules():
        if not isinstance(x, MultiHeadAttention) or (layers and not fnmatchcase(path, layers)):
            continue
        answers, across = written and path.startswith("decoder."), path.endswith(".cross")
        rows, keys = (written if answers else n), (written if answers and not across else n)
        heads, size = heads + x.heads, size + 4 * x.d_key * (rows * x.heads + keys * x.kv_heads)
    return heads, size


def _picture(url: str) -> Image.Image:
    try:
        data = base64.b64decode(url.split(",", 1)[1], validate=True)
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG", "WEBP")) as opened:
            if max(opened.size) > PIXELS:
                raise ValueError(f"the picture has {opened.size[0]} × {opened.size[1]} pixels; at most {PIXELS} a side")
            return opened.convert("RGB")
    except (binascii.Error, UnidentifiedImageError, OSError, SyntaxError) as error:
        raise ValueError(f"the picture cannot be read: {str(error).splitlines()[0]}") from None


def kinds(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Score every head on probes, and name it."""
    model = _model(args["model"])
    told = lambda done, of=None: progress(done, of, "scoring")  # noqa: E731
    if isinstance(model, ImageModel):
        noise = torch.Generator().manual_seed(0)
        pictures = torch.rand(4, model.images.channels, *model.images.image, generator=noise) * 2 - 1
        found = heads.atlas(model, images=pictures, grid=model.vit.grid, progress=told)
    else:
        found = heads.atlas(model, progress=told)
    return {
        "kinds": [
            {
                **{"path": row["path"], "head": row["head"], "labels": row["labels"]},
                "confidence": {name: x["confidence"] for name, x in row["kinds"].items()},
                "columns": {name: row[name] for name in COLUMNS},
            }
            for row in found.rows
        ]
    }


def ablate(args: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The next token's probabilities and the loss, with all heads and without some."""
    model = _model(args["model"])
    if not isinstance(model, TextDecoder):
        raise ValueError("next tokens are what language models give; this model is none")
    ids = torch.tensor([args["ids"]])
    size = 8 * ids.numel() * model.config.whole("vocab_size", 1)  # float32, and once more for their softmax
    if size > LOGITS:
        raise ValueError(
            f"the probabilities at {ids.numel():,} tokens would take {size / 2**30:.1f} GiB, and at most "
            f"{LOGITS / 2**30:.0f} are allowed: run a shorter text"
        )
    gone = [(path, head) for path, head in args["heads"]]
    cut = without(model, gone, by=args["by"], over=ids if args["by"] == "mean" else None)
    progress(0, 2, "with all heads")
    with torch.no_grad():
        before, loss = _last(model, ids)
        progress(1, 2, "without")
        with cut:
            after, lost = _last(model, ids)
    most = torch.cat([before.topk(SHOWN).indices, after.topk(SHOWN).indices]).unique()
    order = most[torch.maximum(before, after)[most].argsort(descending=True)][:SHOWN].tolist()
    rows = [{"token": model.text.decode([i]), "before": float(before[i]), "after": float(after[i])} for i in order]
    return {"next": rows, "loss": {"before": loss, "after": lost}}


def _last(model: TextDecoder, ids: torch.Tensor) -> tuple[torch.Tensor, float | None]:
    """The probabilities of what comes next, and the mean loss of the text; None of a text of one token."""
    logits = model(ids)
    assert isinstance(logits, torch.Tensor)
    loss = None
    if ids.shape[1] > 1:
        loss = float(torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]))
    return logits[0, -1].float().softmax(-1), loss
