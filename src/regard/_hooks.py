"""Observers of attention calls: the registry of observed modules, and the functions that run a call for its observers.

Three adapters lead attention calls to ``run_attention``. The layers of ``regard.nn`` look themselves up in
``observed``. ``regard.interp.huggingface`` does the same for the modules of ``transformers``.
``regard.interp._torch_adapter`` intercepts torch's own attention functions, and gives attention that a model computes
itself to ``observe_weights``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard._attribution import AttributedOutput, AttributionRequest
from regard._errors import RegardError
from regard._observables import Observation, Observe
from regard._operator import attention
from regard._running_modules import RunningModules
from regard.masks import Mask

# Module paths that contain one of these words belong to cross-attention …
CROSS_ATTENTION_WORDS = ("cross", "encdec", "encoder_attn")
# … and so do paths with one of these parts, which are the names in torch and in diffusers.
CROSS_ATTENTION_PARTS = ("multihead_attn", "attn2")

AttentionFunction = Callable[..., tuple[Tensor, Observation | None]]
Compute = Callable[[Observe | AttributionRequest | None], tuple[Tensor, Observation | None]]

# How a call was observed: "attention" by regard's kernels, "weights" from the weights that the model itself computed.
How = Literal["attention", "weights"]

# Observed modules, each with the function that computes its attention: ``function(module, q, k, v, **options)``, with
# the options of ``run_attention``. The registry is not an attribute of the modules, because a copy of an observed
# module must not be observed.
observed: weakref.WeakKeyDictionary[nn.Module, AttentionFunction] = weakref.WeakKeyDictionary()
_observers: weakref.WeakKeyDictionary[nn.Module, list[Observer]] = weakref.WeakKeyDictionary()


class _OwnComputation(threading.local):
    """How many computations of regard's own attention run in this thread, one within another."""

    depth = 0


_own = _OwnComputation()


@contextmanager
def own_computation() -> Iterator[None]:
    """Mark what runs in this context as a part of regard: the attention in it is not the model's."""
    _own.depth += 1
    try:
        yield
    finally:
        _own.depth -= 1


def is_own_computation() -> bool:
    """Whether regard's own attention runs in this thread."""
    return _own.depth > 0


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call, as one observer sees it.

    - ``path``: the module's path in the observer's model.
    - ``number``: the position of ``path`` among the paths the observer has reached, in the order of first calls.
    - ``q [*B, H, n, d]``, ``k [*B, G, m, d]``, ``v [*B, G, m, e]``: the arguments of the call. q and k are None if the
      model computed the weights.
    - ``cross``: whether the keys belong to another sequence than the queries.
    - ``queries``: which query rows are real, as ``Observe.queries`` takes them; None if this is not known.
    - ``how``: how the call is observed.
    """

    path: str
    number: int
    q: Tensor | None
    k: Tensor | None
    v: Tensor
    cross: bool
    queries: Tensor | None
    how: How


class Observer:
    """Base class of the observers that are called at every attention call of a model. It observes nothing.

    ``select`` decides which modules are observed. For each call of a selected module, ``before`` returns what to
    measure, ``after`` gets the measurement and may replace the output, and ``finish`` is called after all observers.
    ``reached`` numbers the module paths at which attention was computed, in the order of their first calls. ``unseen``
    are the paths at which attention was computed in a way that could not be observed. ``running`` knows which modules
    run, if the observer's model is not one of regard's own. ``replays`` is True while a module runs that the observer
    itself recomputes in backward: the observer then acts in the second run too.
    """

    replays = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.reached: dict[str, int] = {}
        self.unseen: list[str] = []
        self.running = RunningModules()

    def select(self, path: str) -> bool:
        """Whether the calls at a module path are observed. Pure: the same path always gets the same answer."""
        return True

    def replaces(self, path: str, number: int) -> bool:
        """Whether ``after`` replaces the output of heads at a module path. Pure, as ``select`` is."""
        return False

    def before(self, call: AttentionCall) -> Observe | None:
        """What to measure in this call; None measures nothing."""
        return None

    def attribution(self, call: AttentionCall) -> AttributionRequest | None:
        """What the backward pass of this call collects; None collects nothing."""
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
    own_output: Tensor | None = None,
    copies: bool = False,
    measure: bool = True,
    **options: Any,
) -> tuple[Tensor, Observation | None]:
    """Compute one attention call for its caller and for all its observers, in order.

    Each observer has its own measurement, and receives the output that the previous observer returned.

    - ``observers``: pairs of an observer and the path that the module has in the observer's model.
    - ``cross``: whether this is cross-attention; None: the name of the path decides.
    - ``queries``: the real query rows, if the caller knows them.
    - ``observe``: what the caller itself wants to measure.
    - ``own_output``: the output, if the caller computed it: then attention is only measured.
    - ``copies``: whether a measurement that is kept needs copies, because the model may overwrite the arguments.
    - ``measure``: False if the weights of this call were measured before; observers may still replace the output.
    - ``options``: the options of ``regard.attention``.

    Returns the output and one observation: the caller's own, or else that of the first observer that measured.
    """
    n = q.shape[-2]
    m = k.shape[-2]
    mask = options.get("mask")
    if queries is None and isinstance(mask, Mask):
        queries = mask.real_queries(n, m)

    def compute(request: Observe | AttributionRequest | None) -> tuple[Tensor, Observation | None]:
        if isinstance(request, AttributionRequest) and own_output is None:
            attributed: Any = request
            out: Any = attention(q, k, v, observe=attributed, **options)
            return out, None
        if not isinstance(request, Observe):
            if own_output is not None:
                return own_output, None
            return attention(q, k, v, **options), None
        if request.differentiable and own_output is not None:
            raise RegardError(
                "Observe(differentiable=True) does not work where gradient checkpointing runs torch's own attention; "
                "use a model that runs on regard's attention, or switch checkpointing off"
            )
        tensors = {"q": q, "k": _kept_keys(k, request), "v": v}
        if copies and request.keep:
            tensors |= {"q": q.clone(), "k": k.clone()}
            if options.get("bias") is not None:
                tensors["bias"] = options["bias"].clone()
        if own_output is not None:
            with torch.no_grad():
                _, observation = attention(observe=request, **(options | tensors))
            return own_output, observation
        out, observation = attention(observe=request, **(options | tensors))
        return out, observation

    arguments = {"q": q, "k": k, "v": v, "how": "attention"}
    sizes = (prod(q.shape[:-3]), n, m)
    return _run_observers(observers, compute, arguments, sizes, cross, queries, observe, measure)


def observe_weights(
    observers: Sequence[tuple[Observer, str]],
    scores: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    measure: bool = True,
    weights: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Measure weights that a model computed itself, and return the output that it goes on with.

    - ``measure``: False if they were measured before.
    - ``scores [B, H, n, m]``: the logarithms of the weights, up to a constant per row; −inf hides a key.
    - ``v [B, G, m, e]``: the values. ``out [B, H, n, e]``: the output of the heads.
    - ``weights``: returns the weights ``[B, H, n, m]`` that v was multiplied by, for attribution.
    """
    B, H, n, m = scores.shape
    # Scale 0 leaves the bias alone: the scores are those of the model.
    scores = scores.detach()
    if scores.dtype != torch.float64:
        scores = scores.float()
    no_queries = scores.new_zeros(1, 1, 1, 1).expand(B, H, n, 1)
    no_keys = scores.new_zeros(1, 1, 1, 1).expand(B, 1, m, 1)

    def compute(request: Observe | AttributionRequest | None) -> tuple[Tensor, Observation | None]:
        if isinstance(request, AttributionRequest) and weights is not None and torch.is_grad_enabled():
            base = out if out.requires_grad else request.require_gradient(out)
            attributed: Tensor = AttributedOutput.apply(request, base, weights().detach(), v.detach())
            return attributed, None
        if not isinstance(request, Observe):
            return out, None
        if request.differentiable:
            raise RegardError(
                "Observe(differentiable=True) needs attention that regard computes, but this model computes the "
                "weights itself; use a model of regard or of transformers, or F.scaled_dot_product_attention"
            )
        with torch.no_grad():
            _, observation = attention(no_queries, no_keys, no_keys, bias=scores, scale=0, observe=request)
        return out, observation

    arguments = {"q": None, "k": None, "v": v, "how": "weights"}
    return _run_observers(observers, compute, arguments, (B, n, m), None, None, None, measure)[0]


def _run_observers(
    observers: Sequence[tuple[Observer, str]],
    compute: Compute,
    arguments: dict[str, Any],
    sizes: tuple[int, int, int],
    cross: bool | None,
    queries: Tensor | None,
    observe: Observe | None,
    measure: bool,
) -> tuple[Tensor, Observation | None]:
    """Compute one call for its caller and for all its observers, in order.

    - ``compute(request)`` returns the output, and the observation if one is requested.
    - ``arguments``: ``q``, ``k``, ``v`` and ``how`` of the observers' calls.
    - ``sizes``: the numbers of batch entries, queries and keys.
    """
    out: Tensor | None = None
    first: Observation | None = None

    def compute_own(request: Observe | AttributionRequest | None) -> tuple[Tensor, Observation | None]:
        with own_computation():
            return compute(request)

    # The caller measures before any observer can change the output.
    if observe is not None:
        out, first = compute_own(observe)

    calls = []
    for observer, path in observers:
        number = observer.reach(path)
        if observer.select(path):
            is_cross = cross if cross is not None else has_cross_attention_name(path)
            rows = queries
            if is_cross:
                # The padding of another sequence says nothing about the queries: in cross-attention all rows are real.
                rows = torch.full((1,), sizes[1])
            elif rows is None:
                rows = observer.running.real_queries(*sizes)
            call = AttentionCall(path=path, number=number, cross=is_cross, queries=rows, **arguments)
            calls.append((observer, call))

    # Contributions are collected where the output was computed that the model goes on with.
    for observer, call in calls:
        attribution = observer.attribution(call)
        if attribution is not None:
            out, _ = compute_own(attribution)

    for observer, call in calls:
        request = observer.before(call) if measure else None
        observation = None
        if request is not None:
            computed, observation = compute_own(request)
            # Keep the output that a previous observer may have replaced.
            if out is None:
                out = computed
            if first is None:
                first = observation
        elif out is None:
            out, _ = compute_own(None)
        out = observer.after(call, out, observation)

    # No observer selected the module.
    if out is None:
        out, _ = compute_own(None)
    if measure:
        for observer, call in calls:
            out = observer.finish(call, out)
    return out, first


def has_cross_attention_name(path: str) -> bool:
    """Whether a module path has one of the names that models give to cross-attention."""
    parts = path.lower().split(".")
    if any(part in CROSS_ATTENTION_PARTS for part in parts):
        return True
    # A stack for two modalities also has self-attention.
    names = " ".join(part for part in parts if "cross_modal" not in part)
    return any(word in names for word in CROSS_ATTENTION_WORDS)


def _kept_keys(k: Tensor, observe: Observe) -> Tensor:
    """Return the keys for a measurement. With ``keep=True`` they must not change after the call."""
    # The keys of a cache are a view of memory that the next decoding step writes to.
    is_view = k.untyped_storage().nbytes() > k.numel() * k.element_size()
    if observe.keep and is_view:
        return k.clone()
    return k
