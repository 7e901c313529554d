"""A head as it would be with another inverse temperature, without its mask, or without its positions."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from regard.kept import KeptCall
from regard.models import load
from regard.positions import Rotary

__all__ = ["Variant", "changed", "rotary_of"]


@dataclass(frozen=True)
class Variant:
    """``beta`` multiplies the trained scale, ``hard`` is scale = ∞; ``mask`` and ``position`` False leave them out."""

    beta: float = 1.0
    hard: bool = False
    mask: bool = True
    position: bool = True


def changed(call: KeptCall, variant: Variant, rotary: Rotary | None) -> KeptCall:
    """The call with a variant's options; itself where nothing changes. ``rotary``: what had turned q and k."""
    scores = call.scores
    if variant.hard:
        if scores.softcap or scores.sinks is not None:
            raise ValueError("this head has a softcap or a learned sink, and hard attention takes neither")
        scores = replace(scores, scale=math.inf)
    elif variant.beta != 1.0:
        scores = replace(scores, scale=scores.scale * variant.beta)
    if not variant.mask:
        scores = replace(scores, lo=None, hi=None, mask=None)
    q, k = call.q, call.k
    if not variant.position:
        scores = replace(scores, terms=())
        if rotary is not None:
            q, k = _turned_back(rotary, q), _turned_back(rotary, k)
    same = scores is call.scores and q is call.q
    return call if same else KeptCall(q, k, scores)


def rotary_of(folder: Path | None, path: str) -> Rotary | None:
    """What turns q and k of a layer, where the model is known; schemes that stretch as they read are not undone."""
    if folder is None:
        return None
    with _LOADING:
        return _rotaries(str(folder)).get(path)


_LOADING = threading.Lock()


@lru_cache(maxsize=64)
def _rotaries(folder: str) -> dict[str, Rotary]:
    """By path; the model itself is let go."""
    try:
        layers = list(load(folder).named_modules())
    except (ValueError, OSError, TypeError):
        return {}
    found = ((path, getattr(layer, "position", None)) for path, layer in layers)
    return {path: x for path, x in found if isinstance(x, Rotary) and _can_be_undone(x)}


def _can_be_undone(rotary: Rotary) -> bool:
    return type(rotary).for_length is Rotary.for_length and rotary.attention_factor != 0


def _turned_back(rotary: Rotary, x: Tensor) -> Tensor:
    """``x`` before row j was turned by position j: turned by −j, and without the factor that both turns bring."""
    at = -torch.arange(x.shape[2])
    turned = rotary(x.float(), at=at)
    width, factor = rotary.width, rotary.attention_factor**2
    if factor != 1:
        turned = torch.cat([turned[..., :width] / factor, turned[..., width:]], dim=-1)
    return turned.to(x.dtype)
