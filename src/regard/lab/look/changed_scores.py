"""Variants of a head: another inverse temperature, no mask, or no positions, computed from its saved q and k."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from regard._errors import RegardError
from regard._observables import Observation
from regard._operator import observe_lowered
from regard._saved_call import SavedCall
from regard.kernels import native
from regard.kernels.choose_backend import resolve_backend
from regard.models import load
from regard.positions import Rotary

# Loading a model takes memory: only one thread at a time loads one.
_LOAD_LOCK = threading.Lock()

# The most weights (queries × keys, over all entries of the batch) that are measured for a variant: a few seconds.
MAX_NATIVE_WEIGHTS = 2**30
MAX_REFERENCE_WEIGHTS = 2**26  # the reference kernel is slower


@dataclass(frozen=True)
class Variant:
    """What to change in a head."""

    beta: float = 1.0  # factor on the trained scale
    hard: bool = False  # hard attention (infinite scale): only the keys with the largest q·k get weight
    mask: bool = True  # False removes the mask
    position: bool = True  # False removes the positions (biases and rotations)


def apply_variant(call: SavedCall, variant: Variant, rotary: Rotary | None) -> SavedCall:
    """Return the call with the options of a variant, or the call itself if nothing changes.

    ``rotary`` is the rotation that was applied to q and k, if it is known.
    """
    scores = call.scores
    if variant.hard:
        if scores.softcap or scores.sinks is not None:
            raise RegardError("hard attention is not defined for a head with a softcap or learned sinks")
        scores = replace(scores, scale=math.inf)
    elif variant.beta != 1.0:
        scores = replace(scores, scale=scores.scale * variant.beta)
    if not variant.mask:
        scores = replace(scores, lo=None, hi=None, mask=None)
    q = call.q
    k = call.k
    if not variant.position:
        scores = replace(scores, terms=())
        if rotary is not None:
            q = _rotate_back(rotary, q)
            k = _rotate_back(rotary, k)
    if scores is call.scores and q is call.q:
        return call
    return SavedCall(q, k, scores)


def reason_no_weights(observation: Observation) -> str:
    """Return in plain words why the exact weights of a layer's heads are not known; an empty text if they are."""
    if not observation.saved_calls:
        return "the recording has no q and k"
    if observation.counted is None:
        return "the layer merges calls of different sizes"
    return ""


def reason_not_measured(observation: Observation) -> str:
    """Return in plain words why the variants of a layer's heads cannot be measured; an empty text if they can."""
    reason = reason_no_weights(observation)
    if reason or observation.counted is None or observation.n is None or observation.m is None:
        return reason
    weights = observation.counted.shape[0] * observation.n * observation.m
    saved_call = observation.saved_calls[0]
    assert isinstance(saved_call, SavedCall)
    most = MAX_NATIVE_WEIGHTS
    if native.refusal(saved_call.q):
        most = MAX_REFERENCE_WEIGHTS
    if weights > most:
        return f"the text is too long to measure a changed head: {weights:,} weights, and at most {most:,} are measured"
    return ""


def observe_variant(observation: Observation, head_index: int, variant: Variant, rotary: Rotary | None) -> Observation:
    """Measure one head of a layer again with the options of a variant, from its saved q and k.

    The result has one head, all entries of the batch, the row values and the profile of ``observation``, and the mean
    weight of each key. The rows that count in ``observation`` are the rows that count here, if they see a key.
    """
    assert observation.counted is not None
    observe = replace(observation.observe, map=0, key_mass=True, top=0, queries=None, keep=False, heads=None)
    measured = []
    first = 0
    for saved_call in observation.saved_calls:
        assert isinstance(saved_call, SavedCall)
        group = head_index * saved_call.k.shape[1] // saved_call.q.shape[1]
        q = saved_call.q[:, head_index : head_index + 1]
        k = saved_call.k[:, group : group + 1]
        call = apply_variant(SavedCall(q, k, saved_call.scores.select_heads([head_index])), variant, rotary)
        counted = observation.counted[first : first + saved_call.batch_size, head_index]
        first += saved_call.batch_size

        # The observables do not depend on the values, so the narrowest values are used.
        v = call.k.new_zeros(*call.k.shape[:3], 1)
        kernel = resolve_backend("auto", call.q)
        measured.append(observe_lowered(call.q, call.k, v, call.scores, kernel, observe, counted)[1])
    return measured[0].merge(*measured[1:])


def rotary_of(folder: Path | None, path: str) -> Rotary | None:
    """Return the rotation that a layer applies to q and k, or None if there is no rotation or it cannot be undone."""
    if folder is None:  # the model is not open
        return None
    with _LOAD_LOCK:
        return _rotary_by_path(str(folder)).get(path)


@lru_cache(maxsize=64)
def _rotary_by_path(folder: str) -> dict[str, Rotary]:
    """Load a model and return the rotations of its layers, by module path. The model is not kept in memory."""
    try:
        layers = list(load(folder).named_modules())
    except (ValueError, OSError, TypeError):
        return {}
    rotations = {}
    for path, layer in layers:
        position = getattr(layer, "position", None)
        if not isinstance(position, Rotary) or position.attention_factor == 0:
            continue
        # Schemes that override for_length depend on the length of the text, so their rotation of q and k is not known.
        if type(position).for_length is Rotary.for_length:
            rotations[path] = position
    return rotations


def _rotate_back(rotary: Rotary, x: Tensor) -> Tensor:
    """Return ``x`` as it was before row j was rotated by position j: rotate it by −j."""
    rotated = rotary(x.float(), position_ids=-torch.arange(x.shape[2]))
    # Both rotations multiply by the attention factor, in the rotated part of the width only.
    factor = rotary.attention_factor**2
    if factor != 1:
        width = rotary.width
        rotated = torch.cat([rotated[..., :width] / factor, rotated[..., width:]], dim=-1)
    return rotated.to(x.dtype)
