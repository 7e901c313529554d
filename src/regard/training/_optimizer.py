"""AdamW and its learning rate, and the conversion of weights and optimizer state to plain tensors by name.

Checkpoints hold these tensors, never pickled objects. Under FSDP a parameter and its moments are sharded over the
processes (DTensor). They are gathered before they are written and sharded again when they are read, so a run can resume
with any number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from regard._errors import RegardError
from regard.positions import Quadratic
from regard.training._recipe import Recipe

STATE_KEYS = {"step", "exp_avg", "exp_avg_sq"}  # of one parameter
STEP_COUNT = "step"  # AdamW's own count of steps: one number per parameter, the same in every process


def create_optimizer(model: nn.Module, recipe: Recipe) -> AdamW:
    """Return AdamW: ``p ← p − η (m̂ / (√v̂ + ε) + λ p)``.

    λ is ``recipe.decay`` for matrices and 0 for vectors (norms and biases) and for the parameters of ``Quadratic``: its
    centres are offsets in an image, and decay would pull them towards 0, the query.
    """
    quadratic: set[nn.Parameter] = set()
    for module in model.modules():
        if isinstance(module, Quadratic):
            quadratic.update(module.parameters())

    decayed = []
    not_decayed = []
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.ndim > 1 and parameter not in quadratic:
            decayed.append(parameter)
        elif parameter.requires_grad:
            not_decayed.append(parameter)
    groups = []
    if decayed:
        groups.append({"params": decayed, "weight_decay": recipe.decay})
    if not_decayed:
        groups.append({"params": not_decayed, "weight_decay": 0.0})

    # The fused kernel does not accept DTensors.
    sharded = any(map(_is_sharded, model.parameters()))
    return AdamW(groups, lr=recipe.rate, betas=(recipe.beta1, recipe.beta2), fused=not sharded)


def learning_rate(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step: linear warmup, then a cosine.

        rate · (t + 1) / w                              for t < w
        rate · (f + (1 − f) · (1 + cos π u) / 2)        after that, with u = (t − w) / (T − 1 − w)

    t is the step, counted from 0; T is ``steps``, w is ``warmup`` and f is ``floor``. The rate of the first step is
    above 0, and the rate of the last step is f · rate.

    >>> recipe = Recipe("text", steps=11, batch=1, rate=1.0, warmup=2, floor=0.1)
    >>> [round(learning_rate(recipe, t), 3) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < recipe.warmup:
        return recipe.rate * (step + 1) / recipe.warmup
    u = min(1.0, (step - recipe.warmup) / max(1, recipe.steps - 1 - recipe.warmup))
    return recipe.rate * (recipe.floor + (1 - recipe.floor) * (1 + math.cos(math.pi * u)) / 2)


def weight_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter and persistent buffer by name, gathered, on the CPU.

    A tensor that is used at two places (tied embeddings, shared tables) is listed once, under its first name. Under
    FSDP every process must call this.
    """
    return {name: _copy_to_cpu(value) for name, value in _persistent_tensors(model).items()}


def load_weights(model: nn.Module, stored: Mapping[str, Tensor]) -> None:
    """Copy the tensors of ``weight_tensors`` into a model; raise if one is missing, unknown or has another shape."""
    own = _persistent_tensors(model)
    for problem, names in (("missing", own.keys() - stored.keys()), ("unknown", stored.keys() - own.keys())):
        if names:
            raise RegardError(f"the checkpoint is of another model: {min(names)} is {problem}")
    for name, value in stored.items():
        _copy_into(name, own[name], value)


def optimizer_state(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """Return AdamW's state by name (``name.exp_avg`` …), gathered, on the CPU. With FSDP all processes must call it."""
    state = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            state[f"{name}.{key}"] = _copy_to_cpu(value)
    return state


def load_optimizer_state(model: nn.Module, optimizer: AdamW, stored: Mapping[str, Tensor]) -> None:
    """Restore the state that ``optimizer_state`` returned."""
    by_parameter: dict[str, dict[str, Tensor]] = {}
    for name, value in stored.items():
        owner, _, key = name.rpartition(".")  # names of parameters contain dots, AdamW's keys do not
        by_parameter.setdefault(owner, {})[key] = value
    parameters = dict(model.named_parameters())
    unknown = by_parameter.keys() - parameters.keys()
    if unknown:
        raise RegardError(f"the checkpoint is of another model: {min(unknown)} is unknown")

    # A parameter that has had no gradient yet has no state.
    for name, values in by_parameter.items():
        parameter = parameters[name]
        if values.keys() != STATE_KEYS:
            found = ", ".join(sorted(values))
            expected = ", ".join(sorted(STATE_KEYS))
            raise RegardError(f"the checkpoint has {found} of {name}; it must have {expected}")
        count = values[STEP_COUNT]
        if count.shape != () or count.dtype != torch.float32:
            raise RegardError(f"the step of {name} must be one float32, got {count.dtype} {list(count.shape)}")
        state: dict[str, Any] = {}
        for key, value in values.items():
            if key == STEP_COUNT:
                state[key] = value.clone()
            else:
                state[key] = torch.zeros_like(parameter, requires_grad=False)
                _copy_into(f"{name}.{key}", state[key], value)
        optimizer.state[parameter] = state


def full_tensor(value: Any) -> Tensor:
    """Gather a tensor that is sharded over processes (all must call this); return any other tensor unchanged."""
    return value.full_tensor() if _is_sharded(value) else value


def _persistent_tensors(model: nn.Module) -> dict[str, Tensor]:
    # The state dictionary lists a shared tensor once per name, named_parameters() only once.
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def _is_sharded(value: Any) -> bool:
    """Whether a tensor is a DTensor, tested without importing that class: the import takes a second."""
    return hasattr(value, "full_tensor")


def _copy_to_cpu(value: Tensor) -> Tensor:
    return full_tensor(value).detach().to("cpu", copy=True).contiguous()


@torch.no_grad()
def _copy_into(name: str, target: Any, value: Tensor) -> None:
    if target.shape != value.shape:
        shapes = f"{list(value.shape)} in the checkpoint and {list(target.shape)} in the model"
        raise RegardError(f"the checkpoint is of another model: {name} is {shapes}")
    # Each process keeps its own shard of the value.
    if _is_sharded(target):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(target.dtype), target.device_mesh, target.placements)
    target.copy_(value)
