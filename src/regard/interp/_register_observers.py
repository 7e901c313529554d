"""Register an observer at every attention call of a model, and select heads by layer and number."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from regard import _hooks as hooks
from regard._checks import check_integer
from regard._errors import RegardError, RegardTypeError
from regard._hooks import Observer
from regard._running_modules import ContextHook
from regard.interp import huggingface
from regard.interp._compiled_models import without_compiled_graphs
from regard.interp._torch_adapter import torch_attention_intercepted
from regard.nn import MultiHeadAttention

Head = tuple[int | str, int]

NO_VISIBLE_ATTENTION = (
    "called no attention that can be observed: it has none, or computes it in an unusual way (docs/interp.md)"
)
PATHS_IN_MESSAGES = 6


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Call the observer at every attention call of its model within the context, for every kind of model."""
    modules = []
    has_regard_layers = False
    has_pretrained_models = False
    has_torch_layers = False
    for module, path in observer.paths.items():
        # A layer of ``regard.nn`` that is not selected is not registered, and runs at full speed.
        if not isinstance(module, MultiHeadAttention) or observer.select(path):
            modules.append(module)
        has_regard_layers |= isinstance(module, MultiHeadAttention)
        has_pretrained_models |= huggingface.is_pretrained(module)
        has_torch_layers |= isinstance(module, nn.MultiheadAttention)

    with ExitStack() as stack:
        stack.enter_context(without_compiled_graphs())
        stack.enter_context(hooks.registered(observer, modules))
        if has_pretrained_models:
            stack.enter_context(huggingface.switched(observer.model))
        # Models of transformers may also call torch's functions themselves.
        if has_torch_layers or has_pretrained_models or not has_regard_layers:
            stack.enter_context(torch_attention_intercepted(observer))
        yield


@contextmanager
def count_forwards(model: nn.Module) -> Iterator[list[int]]:
    """A list with one number: how often the model was called within the context."""
    count = [0]

    def add_one(*_: Any) -> None:
        count[0] += 1

    hook = model.register_forward_hook(ContextHook(add_one))
    try:
        yield count
    finally:
        hook.remove()


def in_backward() -> bool:
    """Whether gradients are being computed: gradient checkpointing then runs layers a second time."""
    return torch._C._current_graph_task_id() != -1


def list_paths(paths: Iterable[str]) -> str:
    """The first few module paths, for an error message."""
    paths = [path or "the model itself" for path in paths]
    if len(paths) > PATHS_IN_MESSAGES:
        paths = [*paths[: PATHS_IN_MESSAGES - 1], paths[PATHS_IN_MESSAGES - 1] + " …"]
    return ", ".join(paths)


def matches_layers(layers: str | Sequence[str] | Callable[[str], bool] | None, path: str) -> bool:
    """Whether a module path matches a pattern, one of several patterns, or a function of the path; None matches all."""
    if layers is None:
        return True
    if callable(layers):
        return bool(layers(path))
    if isinstance(layers, str):
        return fnmatch.fnmatchcase(path, layers)
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in layers)


class HeadSelection:
    """Heads by name: pairs ``(layer, head)``; a layer is a module path or its number in the order of the calls."""

    def __init__(self, heads: Iterable[Head]) -> None:
        self.pairs: list[Head] = list(map(_checked_head, heads))
        if not self.pairs:
            raise RegardError("heads is empty; it must hold pairs such as (3, 0): layer 3, head 0")

    def at(self, path: str, number: int) -> tuple[int, ...]:
        """The selected heads of a layer, each once; () if there are none."""
        heads = [head for layer, head in self.pairs if layer in (path, number)]
        return tuple(dict.fromkeys(heads))

    def check(self, reached: Mapping[str, int]) -> None:
        """Raise if a selected layer is not among the ``reached`` paths."""
        known = {*reached, *reached.values()}
        for layer, _ in self.pairs:
            if reached and layer not in known:
                raise RegardError(
                    f"heads names layer {layer!r}, but attention was computed at {len(reached)} layers: "
                    f"{list_paths(reached)}"
                )


def _checked_head(pair: Any) -> Head:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise RegardTypeError(f"heads must hold pairs (layer, head) such as (3, 0), got {pair!r}")
    layer, head = pair
    if not isinstance(layer, str):
        layer = check_integer("layer", layer, least=0)
    return layer, check_integer("head", head, least=0)
