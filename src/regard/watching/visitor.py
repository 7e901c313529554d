"""Who comes by at every attention call of a model, whichever of the three kinds the model is.

A visitor says where it wants to be called (``wants``), what is to be measured there (``spec``), and is handed what was
measured (``add``) and what the heads gave (``result``), which it may exchange. Ours, ``transformers``' and torch's own
attention each have one place that calls all who look on (``attended``): ``ours``, ``huggingface`` and ``intercept``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.observables import Observation, Observe

__all__ = ["Visitor", "again", "attended"]


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

    def spec(self, path: str, n: int, cross: bool | None, queries: Tensor | None) -> Observe | None:
        """What to measure there, for n queries; None measures nothing.

        ``cross``: whether the keys are another sequence's, None if nobody knows; ``queries``: the real rows, if known.
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
        spec = self.spec(path, q.shape[-2], cross, queries)
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


def again() -> bool:
    """Whether a layer runs again while gradients are computed (gradient checkpointing): it has been seen already."""
    return torch._C._current_graph_task_id() != -1


def _own(k: Tensor) -> Tensor:
    """Keys that outlive the call: those of a cache are a view of memory that its next step writes into."""
    return k.clone() if k.untyped_storage().nbytes() > k.numel() * k.element_size() else k
