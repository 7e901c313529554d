"""Run a model without a formula on tensors without data: its FLOPs, and the bytes of the cache that it returns."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode

from regard.budget._count_live_model import count
from regard.budget._counted_model import (
    MOST_NESTED,
    CountedModel,
    first_entry,
    import_transformers,
    module_configs,
    quiet_transformers,
)
from regard.budget._model import Lengths


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
    reasons: dict[str, str] = {}
    inputs = _inputs(model, lengths)
    if inputs is None:
        reason = f"the input {model.reads} is neither text nor an image"
        return Walk(None, None, None, (), {"forward_flops": reason, "backward_flops": reason, "cache": reason})
    with warnings.catch_warnings(), quiet_transformers(import_transformers(model.architecture)):
        warnings.simplefilter("ignore")
        module = copy.deepcopy(model.module).to(getattr(torch, dtype))
        forward, backward_flops, uncounted = _count_flops(module, inputs, backward, reasons)
        cache = _cache_bytes(module, inputs, reasons)
    return Walk(forward, backward_flops, cache, uncounted, reasons)


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


def _count_flops(
    module: nn.Module, inputs: dict[str, Tensor], backward: bool, reasons: dict[str, str]
) -> tuple[int | None, int | None, tuple[str, ...]]:
    inputs = _in_dtype_of(module, inputs)
    try:
        counts = count(module, backward=backward, **inputs)
    except Exception as error:  # a model may read values, or need other inputs: its FLOPs are unknown then
        reasons["forward_flops"] = _first_line(error)
        if backward:
            reasons["backward_flops"] = _first_line(error)
        return None, None, ()
    return counts.forward_flops, counts.backward_flops, counts.uncounted_operators


def _cache_bytes(module: nn.Module, inputs: dict[str, Tensor], reasons: dict[str, str]) -> int | None:
    """The bytes of the cache that the model returns; 0 if it returns none."""
    for config in module_configs(module):
        if hasattr(config, "use_cache"):
            config.use_cache = True
    try:
        # As `count` runs it: a model may read single numbers, which fake tensors have and meta tensors do not.
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with FakeCopyMode(fake):
            copied, tensors = copy.deepcopy((module, _in_dtype_of(module, inputs)))
        with fake, torch.no_grad():
            output = copied(**tensors)
    except Exception as error:
        reasons["cache"] = _first_line(error)
        return None
    found: dict[int, Tensor] = {}
    for name in ("past_key_values", "cache_params", "mems", "state"):
        _collect_tensors(getattr(output, name, None), found, depth=0)
    # Tensors of positions and lengths are integers or single numbers, not keys, values or states.
    stored = [x for x in found.values() if x.is_floating_point() and x.ndim > 1]
    return sum(x.numel() * x.element_size() for x in stored)


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


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
