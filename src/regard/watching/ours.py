"""Our own layers: each ``MultiHeadAttention`` lets those who look on compute its attention."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from regard.nn.multihead import MultiHeadAttention, visits
from regard.observables import Observation
from regard.watching.visitor import Visitor, attended, outside_graphs

__all__ = ["asked"]

_visitors: weakref.WeakKeyDictionary[MultiHeadAttention, list[Visitor]] = weakref.WeakKeyDictionary()


@contextmanager
def asked(visitor: Visitor) -> Iterator[None]:
    """Within: every layer that may be wanted asks the visitor. Others are left as they are, and run at full speed."""
    layers = [
        x for x in visitor.model.modules() if isinstance(x, MultiHeadAttention) and visitor.may_want(visitor.paths[x])
    ]
    door = outside_graphs(_attend)
    for layer in layers:
        _visitors.setdefault(layer, []).append(visitor)
        visits[layer] = door
    try:
        yield
    finally:
        for layer in layers:
            _visitors[layer].remove(visitor)
            if not _visitors[layer]:
                del _visitors[layer], visits[layer]


def _attend(
    layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, **call: Any
) -> Tensor | tuple[Tensor, Observation]:
    """What the layer returns in place of the operator: a pair if its caller asked for an observation, as always."""
    observe = call.pop("observe")
    visitors = [(visitor, visitor.paths[layer]) for visitor in _visitors[layer]]
    if observe is None:
        return attended(visitors, q, k, v, **call)[0]
    caller = _Caller(observe)
    out, _ = attended([(caller, ""), *visitors], q, k, v, **call)
    return out, caller.seen


class _Caller(Visitor):
    """Whoever called the layer with ``observe``."""

    def __init__(self, observe: Any) -> None:
        self.observe = observe

    def spec(self, path: str, q: Tensor, k: Tensor, cross: bool, queries: Tensor | None) -> Any:
        return self.observe

    def add(self, path: str, observation: Observation) -> None:
        self.seen = observation
