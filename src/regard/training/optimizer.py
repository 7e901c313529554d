"""AdamW, and what it remembers as plain tensors by name: no pickle.

Under FSDP a parameter and its moments are spread over the processes (DTensor). They are put together before they are
written and spread again when they are read, so that a run goes on with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from regard.positions import Quadratic
from regard.training.recipe import Recipe

__all__ = ["adamw", "moments", "put", "remember", "weights", "whole"]

COUNT = "step"  # AdamW's own count of steps: one number a parameter, the same in every process


def adamw(model: nn.Module, recipe: Recipe) -> AdamW:
    """``p ← p − η (m̂ / (√v̂ + ε) + λ p)``, with λ = ``decay`` on matrices, 0 on vectors (norms, biases) and on places

    Centres of a ``Quadratic`` are places in a picture, which decay would pull to the query.
    """
    learned = [p for p in model.parameters() if p.requires_grad]
    places = {id(p) for module in model.modules() if isinstance(module, Quadratic) for p in module.parameters()}
    matrices = [p for p in learned if p.ndim > 1 and id(p) not in places]
    others = [p for p in learned if p.ndim <= 1 or id(p) in places]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    spread = any(_is_spread(p) for p in model.parameters())
    betas = (recipe.beta1, recipe.beta2)
    return AdamW([g for g in groups if g["params"]], lr=recipe.rate, betas=betas, fused=not spread)


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and lasting buffer by name, whole, on the CPU; under FSDP every process must ask.

    One that stands at two places (tied embeddings, shared tables) is there once, under its first name.
    """
    return {name: _kept(value) for name, value in _lasting(model).items()}


def put(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Fill a model with ``weights``; what is missing, left over or of another shape raises by name."""
    own = _lasting(model)
    _check_names(own, found)
    for name, value in found.items():
        _fill(name, own[name], value)


def moments(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """What AdamW remembers, ``name.exp_avg`` …, whole, on the CPU; under FSDP every process must ask."""
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = _kept(value)
    return found


def remember(model: nn.Module, optimizer: AdamW, found: Mapping[str, Tensor]) -> None:
    """Give an optimizer back what ``moments`` took."""
    by_name: dict[str, dict[str, Tensor]] = {}
    for name, value in found.items():
        owner, _, key = name.rpartition(".")
        by_name.setdefault(owner, {})[key] = value
    learned = dict(model.named_parameters())
    left = by_name.keys() - learned.keys()
    if left:
        raise ValueError(f"a checkpoint of another model: {min(left)} is left over")
    for name, parameter in learned.items():
        if name not in by_name:  # it had no gradient yet, so that there is nothing to remember
            continue
        state: dict[str, Any] = {}
        for key, value in by_name[name].items():
            state[key] = value.clone() if key == COUNT else torch.zeros_like(parameter, requires_grad=False)
            if key != COUNT:
                _fill(f"{name}.{key}", state[key], value)
        optimizer.state[parameter] = state


def _lasting(model: nn.Module) -> dict[str, Tensor]:
    kept = model.state_dict().keys()
    return dict(model.named_parameters()) | {name: x for name, x in model.named_buffers() if name in kept}


def _check_names(own: Iterable[str], found: Iterable[str]) -> None:
    for what, names in (("missing", set(own) - set(found)), ("left over", set(found) - set(own))):
        if names:
            raise ValueError(f"a checkpoint of another model: {min(names)} is {what}")


def whole(value: Any) -> Tensor:
    """A tensor that is spread over processes, put together; every process must ask. Any other as it is."""
    return value.full_tensor() if _is_spread(value) else value


def _is_spread(value: Any) -> bool:
    """Whether it is a DTensor, asked without importing them: that takes a second, and most runs have none."""
    return hasattr(value, "full_tensor")


def _kept(value: Tensor) -> Tensor:
    return whole(value).detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def _fill(name: str, there: Any, value: Tensor) -> None:
    if there.shape != value.shape:
        raise ValueError(
            f"a checkpoint of another model: {name} is {list(value.shape)} there and {list(there.shape)} here"
        )
    if _is_spread(there):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(there.dtype), there.device_mesh, there.placements)
    there.copy_(value)
