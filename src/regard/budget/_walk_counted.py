"""Run a model without a formula on tensors without data: its FLOPs, and the bytes of the cache that it returns."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.budget._count_live_model import WalkTimeError, count_call
from regard.budget._counted_model import (
    MOST_NESTED,
    CountedModel,
    first_entry,
    import_transformers,
    module_configs,
    quiet_transformers,
)
from regard.budget._model import Lengths

# The longest time of a walk. Models with recurrences run a loop over the tokens in each layer.
MOST_WALK_SECONDS = 60.0
CACHES = ("past_key_values", "cache_params", "mems", "state")  # under these names models return their caches


@dataclass(frozen=True)
class Walk:
    """What one call of a counted model costs. A figure is None if it is unknown; `reasons` says why."""

    forward_flops: int | None
    backward_flops: int | None
    cache: int | None
    uncounted_operators: tuple[str, ...]
    reasons: Mapping[str, str]


def walk_model(model: CountedModel, lengths: Lengths, dtype: str, *, backward: bool) -> Walk:
    """Run the model on tensors without data: its FLOPs, and the bytes of its cache in `dtype`."""
    inputs = _inputs(model, lengths)
    if inputs is None:
        reason = f"the input {model.reads} is neither text nor an image"
        return Walk(None, None, None, (), {"forward_flops": reason, "backward_flops": reason, "cache": reason})
    deadline = time.monotonic() + MOST_WALK_SECONDS
    with warnings.catch_warnings(), quiet_transformers(import_transformers(model.architecture)):
        warnings.simplefilter("ignore")
        module = copy.deepcopy(model.module).to(getattr(torch, dtype))
        inputs = _in_dtype_of(module, inputs)
        if backward:
            return _walk(module, inputs, deadline, backward=True)

        # A config may turn the cache off, and some models have none: these are run as they are.
        with_cache = copy.deepcopy(module)
        for config in module_configs(with_cache):
            if hasattr(config, "use_cache"):
                config.use_cache = True
        walk = _walk(with_cache, inputs, deadline)
        if walk.forward_flops is not None or time.monotonic() > deadline:
            return walk
        second = _walk(module, inputs, deadline)
        if second.forward_flops is None or not _generates(module):
            return second
        return replace(second, cache=None, reasons={"cache": walk.reasons["cache"]})


def _walk(module: nn.Module, inputs: dict[str, Tensor], deadline: float, backward: bool = False) -> Walk:
    try:
        counts, output = count_call(module, (), inputs, backward=backward, deadline=deadline)
    except WalkTimeError:
        reason = f"counting takes more than {MOST_WALK_SECONDS:.0f} s, which is the limit; fewer tokens take less"
    except Exception as error:  # a model may read values, or need other inputs
        cause = error.__cause__ or error
        reason = f"the model does not run on tensors without data ({type(cause).__name__}: {_first_line(cause)})"
    else:
        reasons: dict[str, str] = {}
        cache = None if backward else _cache_bytes(module, output, reasons)
        return Walk(counts.forward_flops, counts.backward_flops, cache, counts.uncounted_operators, reasons)
    return Walk(None, None, None, (), dict.fromkeys(("forward_flops", "backward_flops", "cache"), reason))


def _inputs(model: CountedModel, lengths: Lengths) -> dict[str, Tensor] | None:
    """Tensors without data for one call; None if the model reads neither text nor images."""

    def tokens(length: Any) -> Tensor:
        return torch.zeros(int(lengths.batch), int(length), dtype=torch.long, device="meta")

    if model.reads == "text":
        return {"input_ids": tokens(lengths.n)}
    if model.reads == "text and source":
        return {"input_ids": tokens(lengths.source), "decoder_input_ids": tokens(lengths.n)}
    inputs = _image_input(model, int(lengths.batch))
    if inputs is not None and model.reads == "text and images":
        inputs["input_ids"] = tokens(lengths.n)
    return inputs


def _image_input(model: CountedModel, batch: int) -> dict[str, Tensor] | None:
    """One image per sequence, of the size that the config names; None if the model reads no images."""
    if model.reads not in ("images", "text and images"):
        return None
    for config in module_configs(model.module):
        size = getattr(config, "image_size", None)
        if isinstance(size, int):
            size = (size, size)
        if isinstance(size, list | tuple) and len(size) == 2:
            channels = first_entry(config, ("num_channels",)) or 3
            return {"pixel_values": torch.zeros(batch, channels, *size, device="meta")}
    return None


def _cache_bytes(module: nn.Module, output: Any, reasons: dict[str, str]) -> int | None:
    """The bytes of the cache that the model returned; 0 if it returned none and does not generate."""
    found: dict[int, Tensor] = {}
    for name in CACHES:
        _collect_tensors(getattr(output, name, None), found, depth=0)
    # Tensors of positions and lengths are integers or single numbers, not keys, values or states.
    stored = [x for x in found.values() if x.is_floating_point() and x.ndim > 1]
    if not stored and _generates(module):
        # For example RecurrentGemma, whose layers keep their states in themselves.
        reasons["cache"] = "the model generates, but returns no cache"
        return None
    return sum(x.numel() * x.element_size() for x in stored)


def _generates(module: nn.Module) -> bool:
    """Whether the model generates text token by token."""
    can_generate: Any = getattr(module, "can_generate", None)
    return bool(can_generate and can_generate())


def _in_dtype_of(module: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inputs; images in the dtype of the weights."""
    dtype = next(parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}


def _collect_tensors(x: Any, found: dict[int, Tensor], depth: int) -> None:
    """All tensors that a cache holds in its attributes, lists and dictionaries."""
    if depth > MOST_NESTED or x is None:
        return
    if isinstance(x, Tensor):
        found[id(x)] = x
    elif isinstance(x, list | tuple):
        for each in x:
            _collect_tensors(each, found, depth + 1)
    elif isinstance(x, Mapping):
        for each in x.values():
            _collect_tensors(each, found, depth + 1)
    elif type(x).__module__.startswith("transformers"):
        for each in vars(x).values():
            _collect_tensors(each, found, depth + 1)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
