"""Observers of attention calls: the registry of observed modules, and the function that runs a call for its observers.

Three adapters lead attention calls to ``run_attention``. The layers of ``regard.nn`` look themselves up in
``observed``. ``regard.interp.huggingface`` does the same for the modules of ``transformers``.
``regard.interp._torch_adapter`` intercepts torch's own attention functions.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._observables import Observation, Observe
from regard._operator import attention

# Module paths that contain one of these words belong to cross-attention …
CROSS_ATTENTION_WORDS = ("cross", "encdec", "encoder_attn")
# … and so do paths with one of these parts, which are the names in torch and in diffusers.
CROSS_ATTENTION_PARTS = ("multihead_attn", "attn2")

AttentionFunction = Callable[..., tuple[Tensor, Observation | None]]

# Observed modules, each with the function that computes its attention: ``function(module, q, k, v, **options)``, with
# the options of ``run_attention``. The registry is not an attribute of the modules, because a copy of an observed
# module must not be observed.
observed: weakref.WeakKeyDictionary[nn.Module, AttentionFunction] = weakref.WeakKeyDictionary()
_observers: weakref.WeakKeyDictionary[nn.Module, list[Observer]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call, as one observer sees it.

    - ``path``: the module's path in the observer's model.
    - ``number``: the position of ``path`` among the paths the observer has reached, in the order of first calls.
    - ``q [*B, H, n, d]``, ``k [*B, G, m, d]``, ``v [*B, G, m, e]``: the arguments of the call.
    - ``cross``: whether the keys belong to another sequence than the queries.
    - ``queries``: which query rows are real, as ``Observe.queries`` takes them; None if this is not known.
    """

    path: str
    number: int
    q: Tensor
    k: Tensor
    v: Tensor
    cross: bool
    queries: Tensor | None


class Observer:
    """Base class of the observers that are called at every attention call of a model. It observes nothing.

    ``select`` decides which modules are observed. For each call of a selected module, ``before`` returns what to
    measure, ``after`` gets the measurement and may replace the output, and ``finish`` is called after all observers.
    ``reached`` numbers the module paths at which attention was computed, in the order of their first calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.reached: dict[str, int] = {}

    def select(self, path: str) -> bool:
        """Whether the calls at a module path are observed. Pure: the same path always gets the same answer."""
        return True

    def before(self, call: AttentionCall) -> Observe | None:
        """What to measure in this call; None measures nothing."""
        return None

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        """Return the output of the heads before W_O, ``[*B, H, n, e]``: ``out`` itself or a replacement."""
        return out

    def finish(self, call: AttentionCall, out: Tensor) -> Tensor:
        """Return the final output, after all observers. It must have the values of ``out``; its layout may differ."""
        return out

    def reach(self, path: str) -> int:
        """Record a call at a path, and return the number of the path."""
        return self.reached.setdefault(path, len(self.reached))


@contextmanager
def registered(observer: Observer, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Observe these modules of the observer's model within the context."""
    modules = list(modules)
    for module in modules:
        _set_observers(module, [*_observers.get(module, ()), observer])
    try:
        yield
    finally:
        for module in modules:
            _set_observers(module, [other for other in _observers[module] if other is not observer])


def _set_observers(module: nn.Module, observers: list[Observer]) -> None:
    if not observers:
        del _observers[module], observed[module]
        return
    _observers[module] = observers
    # A compiled model must leave its graph here. Importing the compiler takes more than a second, so this is done only
    # if something may have been compiled.
    if "torch._dynamo" in sys.modules:
        observed[module] = torch.compiler.disable(_attend)
    else:
        observed[module] = _attend


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Observation | None]:
    observers = [(observer, observer.paths[module]) for observer in _observers[module]]
    return run_attention(observers, q, k, v, **options)


def run_attention(
    observers: Sequence[tuple[Observer, str]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cross: bool | None = None,
    queries: Tensor | None = None,
    observe: Observe | None = None,
    **options: Any,
) -> tuple[Tensor, Observation | None]:
    """Compute one attention call for its caller and for all its observers, in order.

    Each observer has its own measurement, and receives the output that the previous observer returned.

    - ``observers``: pairs of an observer and the path that the module has in the observer's model.
    - ``cross``: whether this is cross-attention; None: the name of the path decides.
    - ``queries``: the real query rows, if the caller knows them.
    - ``observe``: what the caller itself wants to measure.
    - ``options``: the options of ``regard.attention``.

    Returns the output and one observation: the caller's own, or else that of the first observer that measured.
    """
    out: Tensor | None = None
    first: Observation | None = None
    # The caller measures before any observer can change the output.
    if observe is not None:
        out, first = attention(q, k, v, observe=observe, **options)

    calls = []
    for observer, path in observers:
        number = observer.reach(path)
        if observer.select(path):
            is_cross = cross if cross is not None else has_cross_attention_name(path)
            rows = queries
            # The padding of another sequence says nothing about the queries, so in cross-attention all rows are real.
            if is_cross:
                rows = torch.full((1,), q.shape[-2])
            calls.append((observer, AttentionCall(path, number, q, k, v, is_cross, rows)))

    for observer, call in calls:
        request = observer.before(call)
        observation = None
        if request is not None:
            computed, observation = attention(q, _kept_keys(k, request), v, observe=request, **options)
            # Keep the output that a previous observer may have replaced.
            if out is None:
                out = computed
            if first is None:
                first = observation
        elif out is None:
            out = attention(q, k, v, **options)
        out = observer.after(call, out, observation)

    # No observer selected the module.
    if out is None:
        out = attention(q, k, v, **options)
    for observer, call in calls:
        out = observer.finish(call, out)
    return out, first


def has_cross_attention_name(path: str) -> bool:
    """Whether a module path has one of the names that models give to cross-attention."""
    if any(part in CROSS_ATTENTION_PARTS for part in path.split(".")):
        return True
    return any(word in path.lower() for word in CROSS_ATTENTION_WORDS)


def _kept_keys(k: Tensor, observe: Observe) -> Tensor:
    """Return the keys for a measurement. With ``keep=True`` they must not change after the call."""
    # The keys of a cache are a view of memory that the next decoding step writes to.
    is_view = k.untyped_storage().nbytes() > k.numel() * k.element_size()
    if observe.keep and is_view:
        return k.clone()
    return k
