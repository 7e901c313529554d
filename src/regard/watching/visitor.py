"""Who comes by at every attention call of a model, whichever of the three kinds the model is.

A visitor says where it wants to be called (``wants``), what is to be measured there (``spec``), and is handed what was
measured (``add``), what the heads gave (``result``), which it may exchange, and what has become of that (``leave``).
Ours, ``transformers``' and torch's own attention each have one place that calls all who look on (``attended``):
``ours``, ``huggingface`` and ``intercept``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.observables import Observation, Observe
from regard.watching.words import named_cross

__all__ = ["UNSEEN", "Visitor", "again", "attended", "outside_graphs", "ran"]


class Visitor:
    """Looks on and changes nothing; others are made from it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}

    def wants(self, path: str) -> bool:
        """Whether a module's call is visited; asked when it comes."""
        return True

    def may_want(self, path: str) -> bool:
        """Whether any call of a module may be visited; asked before there are any."""
        return self.wants(path)

    def spec(self, path: str, q: Tensor, k: Tensor, cross: bool, queries: Tensor | None) -> Observe | None:
        """What to measure there; None measures nothing.

        ``cross``: whether the keys are another sequence's; ``queries``: the real rows, where they are known. The
        padding of another sequence says nothing of them, so that in cross-attention they are all of them.
        """
        return None

    def add(self, path: str, observation: Observation) -> None:
        """What was measured in one call."""

    def result(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """``out [*B, H, n, E]``, what the heads give before W_O, from ``v [*B, G, m, E]``; comes before ``add``."""
        return out

    def leave(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        """``out`` as all have left it, after ``add``; the same numbers are given back, perhaps laid out anew."""
        return out

    def attend(
        self,
        path: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        out: Tensor | None = None,
        cross: bool | None = None,
        queries: Tensor | None = None,
        **call: Any,
    ) -> tuple[Tensor, Observation | None]:
        """``regard.attention`` for a module that is visited; its output is ``out`` where another visitor made it."""
        if cross or (cross is None and named_cross(path)):
            spec = self.spec(path, q, k, True, torch.full((1,), q.shape[-2]))
        else:
            spec = self.spec(path, q, k, False, queries)
        if spec is None:
            return self.result(path, attention(q, k, v, **call) if out is None else out, v), None
        computed, observation = attention(q, _own(k) if spec.keep else k, v, **call, observe=spec)
        out = self.result(path, computed if out is None else out, v)
        self.add(path, observation)
        return out, observation


def attended(
    visitors: Iterable[tuple[Visitor, str]], q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> tuple[Tensor, Observation | None]:
    """One attention call before all who look on, each with its own name for the place: the first computes it.

    Each measures for itself, and sees the output as those before have left it.
    """
    out = observation = None
    wanted = [(visitor, path) for visitor, path in visitors if visitor.wants(path)]
    for visitor, path in wanted:
        out, seen = visitor.attend(path, q, k, v, out=out, **call)
        observation = observation or seen
    for visitor, path in wanted:
        assert out is not None
        out = visitor.leave(path, out, v)
    if out is None:
        call = {name: x for name, x in call.items() if name not in ("cross", "queries")}
        out = attention(q, k, v, **call)
    return out, observation


def outside_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, for which a compiled model steps out of its graph.

    Only where something may have been compiled: to import the compiler alone takes more than a second.
    """
    return torch.compiler.disable(function) if "torch._dynamo" in sys.modules else function


UNSEEN = "called no attention that can be seen: it has none, or computes it by hand (docs/watching.md)"


@contextmanager
def ran(model: nn.Module) -> Iterator[list[bool]]:
    """A list that has something in it once the model was called."""
    calls: list[bool] = []

    def note(*_: Any) -> None:
        if not calls:
            calls.append(True)

    hook = model.register_forward_hook(note)
    try:
        yield calls
    finally:
        hook.remove()


def again() -> bool:
    """Whether a layer runs again while gradients are computed (gradient checkpointing): it has been seen already."""
    return torch._C._current_graph_task_id() != -1


def _own(k: Tensor) -> Tensor:
    """Keys that outlive the call: those of a cache are a view of memory that its next step writes into."""
    return k.clone() if k.untyped_storage().nbytes() > k.numel() * k.element_size() else k
