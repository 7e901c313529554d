"""Count the parameters and FLOPs of any ``torch.nn.Module`` by running it. No formula of its architecture is needed.

``_op_flops`` has the formulas of single operators, and says what counts as a FLOP.
"""

from __future__ import annotations

import copy
import logging
import math
import random
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from regard._devices import preserved_random_state
from regard._errors import RegardError, RegardTypeError
from regard.budget._op_flops import find_formula, may_contain_products, operator_name


class ModuleParameters(NamedTuple):
    """The number of parameters that a module has itself, not in its children."""

    path: str
    type: str
    parameters: int


@dataclass(frozen=True)
class ModelCounts:
    """The parameters of a model, and the FLOPs of one call.

    - `parameters`, `trainable`: numbers of parameters; a shared parameter counts once.
    - `weight_bytes`, `buffer_bytes`: memory of parameters and buffers; shared ones count once.
    - `by_module`: path, type and parameters of every module that has parameters, in order.
    - `forward_flops`: FLOPs of one call; None without inputs.
    - `backward_flops`: FLOPs of the backward pass; None if it was not requested.
    - `flops_by_module`: forward FLOPs by module path; ``""`` is the whole model. A module that uses the weights of
      another module without calling it gets the FLOPs (torch.nn.MultiheadAttention does this with its out_proj).
    - `uncounted_operators`: operators without a formula that ran and might contain matrix products.
    - `ran_on`: ``"nothing"``: not run; ``"shapes"``: run on tensors without data; ``"values"``: on real tensors.

    >>> counts = count(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), torch.empty(7, 3, device="meta"))
    >>> counts.parameters, dict(counts.flops_by_module), counts.ran_on
    (30, {'': 350, '0': 210, '1': 140}, 'shapes')
    >>> counts.by_module[1]
    ModuleParameters(path='1', type='Linear', parameters=10)
    """

    parameters: int
    trainable: int
    weight_bytes: int
    buffer_bytes: int
    by_module: tuple[ModuleParameters, ...]
    forward_flops: int | None = None
    backward_flops: int | None = None
    flops_by_module: Mapping[str, int] = field(default_factory=dict)
    uncounted_operators: tuple[str, ...] = ()
    ran_on: str = "nothing"


def count(model: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> ModelCounts:
    """Count the parameters of `model` and, with inputs, the FLOPs of ``model(*args, **kwargs)``.

    A copy of the model runs once on tensors that have shapes and no data. Nothing is computed and nothing large is
    allocated, at any length. The model, its inputs and random generators stay unchanged. The model's training or
    evaluation mode and the caller's autocast setting are used.

    A model that reads values, or has an operator without a shapes-only form, cannot run in this way. Then a real copy
    runs on the real inputs, and takes the time and memory of a normal call. `ran_on` says which of the two happened.

    - `args`, `kwargs`: inputs, real or ``torch.empty(..., device="meta")``; meta inputs are moved to the model's
      device. The model may be on ``meta`` itself.
    - `backward`: also count the gradients of all outputs with respect to every parameter and input that requires one.
      The forward passes that activation checkpointing repeats count as backward.

    >>> counts = count(nn.Linear(3, 5), torch.empty(7, 3, device="meta"), backward=True)
    >>> counts.parameters, counts.forward_flops, counts.backward_flops
    (20, 210, 210)
    """
    return count_call(model, args, kwargs, backward=backward)[0]


def count_call(
    model: nn.Module, args: Any, kwargs: Any, *, backward: bool, deadline: float = math.inf
) -> tuple[ModelCounts, Any]:
    """As `count`, and what the call returned: tensors without data, unless it ran on values.

    - `deadline`: the value of ``time.monotonic()`` from which on the call is given up with a `WalkTimeError`.
    """
    if not isinstance(model, nn.Module):
        raise RegardTypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for name, tensor in _named_tensors(model):
        if is_lazy(tensor):
            raise RegardError(f"{name} has no shape yet; run the model once, so that its lazy modules are initialized")
    parameters = _count_parameters(model)
    if not args and not kwargs:
        if backward:
            raise RegardError("backward=True needs inputs: count(model, *inputs, backward=True)")
        return ModelCounts(**parameters), None
    counter, ran_on = _trace(model, args, kwargs, backward, deadline)
    by_module = {path: counter.flops[path] for path in counter.paths.values() if counter.flops.get(path)}
    counts = ModelCounts(
        **parameters,
        forward_flops=counter.forward,
        backward_flops=counter.backward if backward else None,
        flops_by_module=MappingProxyType(by_module),
        uncounted_operators=tuple(sorted(counter.unknown)),
        ran_on=ran_on,
    )
    return counts, counter.output


# --- parameters ------------------------------------------------------------------------------------------------------


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _count_parameters(model: nn.Module) -> dict[str, Any]:
    counts = {"parameters": 0, "trainable": 0, "weight_bytes": 0, "buffer_bytes": 0}
    for parameter in model.parameters():
        size = parameter.numel()
        counts["parameters"] += size
        counts["trainable"] += size * parameter.requires_grad
        counts["weight_bytes"] += size * parameter.element_size()
    for buffer in model.buffers():
        counts["buffer_bytes"] += buffer.numel() * buffer.element_size()

    by_module: list[ModuleParameters] = []
    counted: set[int] = set()
    for path, module in model.named_modules():
        # A shared parameter belongs to the first module that has it.
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in counted}
        counted |= own.keys()
        if own:
            by_module.append(ModuleParameters(path, type(module).__name__, sum(own.values())))
    return {**counts, "by_module": tuple(by_module)}


# --- FLOPs of a call -------------------------------------------------------------------------------------------------

# Operators that return a tensor's shape or layout; nested and other irregular tensors implement them themselves.
_SHAPE_QUERIES = frozenset(
    f"aten::{name}"
    for name in (
        *("size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset"),
        *("sym_storage_offset", "is_contiguous", "sym_is_contiguous", "is_strides_like_format"),
        "is_non_overlapping_and_dense",
    )
) | {"prim::layout"}


@cache  # a model calls few operators, and each of them many times
def _is_composite(op: Any) -> bool:
    """Whether an operator can be decomposed into those that it calls."""
    if isinstance(op, HigherOrderOperator) or op.namespace == "prim":
        return False
    return bool(op._can_decompose())


class _Counter(TorchDispatchMode):
    """Counts the FLOPs of every operator that runs, and adds them to the modules that are being called."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, deadline: float) -> None:
        super().__init__()
        self.deadline = deadline
        self.output: Any = None  # what the call returned
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.call_stack: list[int] = []  # ids of the modules that are being called
        self.flops: dict[str, int] = {}  # of the forward pass, by module path
        self.forward = 0
        self.backward = 0
        self.unknown: set[str] = set()  # names of operators without a formula
        self.in_backward = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Models with recurrences run a loop over tokens, whose length only this stops.
        if time.monotonic() > self.deadline:
            raise WalkTimeError("running the model on shapes takes too long")
        name = operator_name(func)
        if name in _SHAPE_QUERIES:
            return NotImplemented  # torch then calls the tensor's own implementation
        formula = find_formula(func)
        if formula is None and _is_composite(func):
            # A composite operator, which appears here in inference mode, is counted by the operators that it calls.
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula is not None:
            self._add(int(formula(out, *args, **kwargs)))
        elif name not in self.unknown and may_contain_products(func, (args, kwargs)):
            self.unknown.add(name)
        return out

    def _add(self, flops: int) -> None:
        if self.in_backward:
            self.backward += flops
            return
        self.forward += flops
        # A set: a module that calls itself must not count twice.
        called = {self.paths[module] for module in self.call_stack if module in self.paths}
        for path in {"", *called}:
            self.flops[path] = self.flops.get(path, 0) + flops

    @contextmanager
    def follow_calls(self, model: nn.Module) -> Iterator[None]:
        """Keep `call_stack` up to date while the model runs."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self.call_stack.append(id(module))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.call_stack and self.call_stack[-1] == id(module):
                self.call_stack.pop()

        hooks = []
        for module in model.modules():
            # Scripted modules accept no hooks.
            if not isinstance(module, torch.jit.ScriptModule):
                hooks.append(module.register_forward_pre_hook(enter, prepend=True))
                hooks.append(module.register_forward_hook(leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class WalkTimeError(RegardError):
    """The call was given up, because it ran until its deadline."""


class _NoGradientError(RegardError):
    """Raised if no output requires a gradient. A run on real values would not change this."""


def _trace(model: nn.Module, args: Any, kwargs: Any, backward: bool, deadline: float) -> tuple[_Counter, str]:
    """Run on shapes; if this fails for any reason, run on values. An error of the model itself then occurs again."""
    with _unchanged_state(model):
        try:
            return _run_on_shapes(model, args, kwargs, backward, deadline), "shapes"
        except (_NoGradientError, WalkTimeError):
            raise
        except Exception as error:
            if any(x.is_meta for x in (*_tensors((args, kwargs)), *model.parameters())):
                first_line = str(error).strip().partition("\n")[0]
                reason = f"{type(error).__name__}: {first_line}"
                raise RegardError(f"the model does not run on shapes alone; give real inputs ({reason})") from error
        copied, args, kwargs = _deep_copy((model, args, kwargs))
        return _run(copied, args, kwargs, backward, deadline), "values"


def _run_on_shapes(model: nn.Module, args: Any, kwargs: Any, backward: bool, deadline: float) -> _Counter:
    tensors = [tensor for _, tensor in _named_tensors(model)]
    if tensors and all(tensor.is_meta for tensor in tensors):
        # Meta tensors are several times as fast as fake ones. Some models need fake ones, which have the values of
        # constants, and can be on several devices.
        try:
            return _run_on_meta(model, args, kwargs, backward, deadline)
        except (_NoGradientError, WalkTimeError):
            raise
        except Exception:
            pass  # if the reason is not that, it occurs again on fake tensors
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied, args, kwargs = _deep_copy((model, args, kwargs))
    device = next((tensor.device for _, tensor in _named_tensors(model)), torch.device("cpu"))

    def moved_from_meta(x: Any) -> Any:
        """Move meta inputs to the model's device; if the model is on meta, move all inputs there."""
        if not isinstance(x, Tensor) or "meta" not in (x.device.type, device.type):
            return x
        moved = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return moved.requires_grad_(x.requires_grad)

    with fake:
        args, kwargs = tree_map(moved_from_meta, (args, kwargs))
        return _run(copied, args, kwargs, backward, deadline)


def _run_on_meta(model: nn.Module, args: Any, kwargs: Any, backward: bool, deadline: float) -> _Counter:
    def moved_to_meta(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta").requires_grad_(x.requires_grad)

    copied = _deep_copy(model)
    args, kwargs = tree_map(moved_to_meta, (args, kwargs))
    # The device of tensors that the model makes without naming one: otherwise they would take memory.
    with torch.device("meta"):
        return _run(copied, args, kwargs, backward, deadline)


def _run(model: nn.Module, args: Any, kwargs: Any, backward: bool, deadline: float) -> _Counter:
    counter = _Counter(model, deadline)
    with torch.set_grad_enabled(backward), counter, counter.follow_calls(model):
        out = model(*args, **kwargs)
        counter.output = out
        if backward:
            roots = [x for x in _tensors(out) if x.requires_grad]
            if not roots:
                raise _NoGradientError("backward=True needs an output that requires a gradient; none does")
            counter.in_backward = True
            with _unchanged_gradients(roots):
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    return counter


@contextmanager
def _unchanged_gradients(roots: list[Tensor]) -> Iterator[None]:
    """Restore every ``grad``. A model may use tensors that were not copied with it, for example global variables."""
    leaves = [x for x in roots if x.is_leaf]
    # Walk the graph of the backward pass to all tensors that get a gradient.
    nodes: list[Any] = [x.grad_fn for x in roots]
    visited = set(nodes)
    while nodes:
        node = nodes.pop()
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        new = {each for each, _ in getattr(node, "next_functions", ()) if each is not None} - visited
        visited |= new
        nodes += new

    before = [x.grad for x in leaves]
    try:
        for x in leaves:
            x.grad = None
        yield
    finally:
        for x, grad in zip(leaves, before, strict=True):
            x.grad = grad


def _deep_copy(x: Any) -> Any:
    try:
        return copy.deepcopy(x)
    except Exception as error:
        raise RegardTypeError(f"model and inputs must support copy.deepcopy, because a copy runs: {error}") from error


def _tensors(x: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists, mappings and data classes."""
    for leaf in tree_leaves(x):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from _tensors(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors(list(vars(leaf).values()))


@contextmanager
def _unchanged_state(model: nn.Module) -> Iterator[None]:
    """Run compiled functions uncompiled and torch.nn's fused layers unfused; restore random generators afterwards.

    The matrix products are the same, and each can be assigned to the module that computes it.
    """
    devices = {torch.device("cpu"), *[parameter.device for parameter in model.parameters()]}
    # This logger prints the traceback of a failed run on shapes, which is expected here.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    with ExitStack() as restore:
        restore.callback(setattr, log, "disabled", log.disabled)
        restore.callback(random.setstate, random.getstate())
        restore.callback(np.random.set_state, np.random.get_state())
        restore.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        for device in devices:
            restore.enter_context(preserved_random_state(device))
        restore.enter_context(torch.compiler.set_stance("force_eager"))
        # A copy made in inference mode could have no gradients.
        restore.enter_context(torch.inference_mode(False))
        torch.backends.mha.set_fastpath_enabled(False)
        log.disabled = True
        yield
