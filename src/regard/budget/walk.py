"""A live model counted by walking and tracing it: no formula of any architecture, only what its modules hold and run.

The convention of FLOPs, and the formulas of single operators, are in ``flops_of_ops``.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, is_dataclass
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

from regard.budget.flops_of_ops import could_hide_products, formula_of, name_of, register

__all__ = ["Counted", "Part", "count", "register"]


class Part(NamedTuple):
    """The parameters that a module holds itself, not through its children."""

    path: str
    kind: str
    parameters: int


@dataclass(frozen=True)
class Counted:
    """What a model holds, and what one call of it computes.

    Attributes
    ----------
    parameters, trainable: numbers; a shared parameter counts once.
    weight_bytes, buffer_bytes: what parameters and buffers take in memory, shared ones once.
    by_part: (path, type, parameters) of every module that holds some, in order; shared ones where they first stand.
    forward: FLOPs of one call; None where no inputs were given.
    backward: FLOPs of its gradients; None where not asked for.
    flops: forward FLOPs by module path, for every module that has some; ``""`` is the whole model. What a module
        computes with another's weights without calling it is its own (torch.nn.MultiheadAttention and its out_proj).
    uncounted: operators that ran, that no formula knows, and that might hide products; empty when everything was seen.
    ran: ``"nothing"``; ``"shapes"``: on tensors without data; ``"values"``: for real, since shapes were not enough.

    >>> found = count(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False)), torch.empty(7, 3, device="meta"))
    >>> found.parameters, dict(found.flops), found.ran
    (30, {'': 350, '0': 210, '1': 140}, 'shapes')
    >>> found.by_part[1]
    Part(path='1', kind='Linear', parameters=10)
    """

    parameters: int
    trainable: int
    weight_bytes: int
    buffer_bytes: int
    by_part: tuple[Part, ...]
    forward: int | None
    backward: int | None
    flops: Mapping[str, int]
    uncounted: tuple[str, ...]
    ran: str


def count(model: nn.Module, *args: Any, backward: bool = False, **kwargs: Any) -> Counted:
    """Parameters of ``model`` and, where inputs are given, FLOPs of ``model(*args, **kwargs)`` and of its gradients.

    A copy of model and inputs runs once, on tensors that have shapes and no data: nothing is computed, nothing large is
    allocated, at any length; model, inputs and random generators stay as they are. Inputs may be real tensors, or
    ``torch.empty(..., device="meta")``, which then stand on the model's device; the model may be on ``meta`` itself.
    Training or evaluation, and autocast, are as the caller has them.

    A model that looks at values, or an operator that has no shapes-only form, cannot run that way. Then a real copy
    runs on the real inputs, and takes the time and the memory of a call; ``ran`` says which of the two it was.

    Gradients are those of all outputs together, down to every parameter and input that wants one. What activation
    checkpointing runs again counts as backward, because it does run.

    >>> found = count(nn.Linear(3, 5), torch.empty(7, 3, device="meta"), backward=True)
    >>> found.parameters, found.forward, found.backward
    (20, 210, 210)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    lazy = [name for name, p in _named(model) if is_lazy(p)]
    if lazy:
        raise ValueError(f"{lazy[0]} has no shape yet; run the model once, so that its lazy modules take theirs")
    held = _held(model)
    if not args and not kwargs:
        if backward:
            raise ValueError("backward=True needs inputs: count(model, *inputs, backward=True)")
        return Counted(**held, forward=None, backward=None, flops={}, uncounted=(), ran="nothing")
    seen, ran = _trace(model, args, kwargs, backward)
    return Counted(
        **held,
        forward=seen.forward,
        backward=seen.backward if backward else None,
        flops=MappingProxyType({path: seen.flops[path] for path in seen.paths.values() if seen.flops.get(path)}),
        uncounted=tuple(sorted(seen.unknown)),
        ran=ran,
    )


# --- what a model holds ----------------------------------------------------------------------------------------------


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _held(model: nn.Module) -> dict[str, Any]:
    parameters, buffers = list(model.parameters()), list(model.buffers())
    parts: list[Part] = []
    known: set[int] = set()
    for path, module in model.named_modules():
        own = {id(p): p.numel() for p in module.parameters(recurse=False) if id(p) not in known}
        known |= own.keys()
        if own:
            parts.append(Part(path, type(module).__name__, sum(own.values())))
    return {
        "parameters": sum(p.numel() for p in parameters),
        "trainable": sum(p.numel() for p in parameters if p.requires_grad),
        "weight_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "buffer_bytes": sum(b.numel() * b.element_size() for b in buffers),
        "by_part": tuple(parts),
    }


# --- what a call of it computes --------------------------------------------------------------------------------------


class _Counter(TorchDispatchMode):
    """Sees every operator that runs, asks for its formula, and books it on the modules that are being called."""

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.paths = {id(module): path for path, module in model.named_modules()}
        self.called: list[int] = []
        self.flops: dict[str, int] = {}
        self.forward = self.backward = 0
        self.unknown: set[str] = set()
        self.returning = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if name in _ASKS:
            return NotImplemented
        formula = formula_of(func)
        if formula is None and not isinstance(func, HigherOrderOperator) and func.namespace != "prim":
            with self:  # an operator that is made of others, as in inference mode, is seen by its parts
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        out = func(*args, **kwargs)
        if formula is not None:
            self._book(int(formula(out, *args, **kwargs)))
        elif name not in self.unknown and could_hide_products(func, (args, kwargs)):
            self.unknown.add(name)
        return out

    def _book(self, flops: int) -> None:
        if self.returning:
            self.backward += flops
            return
        self.forward += flops
        for path in {"", *(self.paths[each] for each in self.called if each in self.paths)}:
            self.flops[path] = self.flops.get(path, 0) + flops

    @contextmanager
    def following(self, model: nn.Module) -> Iterator[None]:
        """Know which modules are being called."""

        def enter(module: nn.Module, inputs: Any) -> None:
            self.called.append(id(module))

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            if self.called and self.called[-1] == id(module):
                self.called.pop()

        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]  # no hooks
        hooks = [module.register_forward_pre_hook(enter, prepend=True) for module in modules]
        hooks += [module.register_forward_hook(leave, always_call=True) for module in modules]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# Questions about a tensor's own form, which tensors of irregular form answer themselves.
_ASKS = frozenset(
    f"aten::{name}"
    for name in (
        *("size", "sym_size", "stride", "sym_stride", "numel", "sym_numel", "dim", "storage_offset"),
        *("sym_storage_offset", "is_contiguous", "sym_is_contiguous", "is_strides_like_format"),
        "is_non_overlapping_and_dense",
    )
) | {"prim::layout"}


class _NothingLearns(ValueError):
    """Not a failure of shapes: values would not change it."""


def _trace(model: nn.Module, args: Any, kwargs: Any, backward: bool) -> tuple[_Counter, str]:
    """A run on shapes; where that fails, for any reason, one on values: an error of the model's own comes again."""
    with _as_it_was(model):
        try:
            return _run_on_shapes(model, args, kwargs, backward), "shapes"
        except _NothingLearns:
            raise
        except Exception as problem:
            if any(x.is_meta for x in (*_tensors((args, kwargs)), *model.parameters())):
                what = f"{type(problem).__name__}: {str(problem).strip().splitlines()[0] if str(problem) else ''}"
                raise ValueError(f"the model does not run on shapes alone; give real inputs ({what})") from problem
        copied, args, kwargs = _copied((model, args, kwargs))
        return _run(copied, args, kwargs, backward), "values"


def _run_on_shapes(model: nn.Module, args: Any, kwargs: Any, backward: bool) -> _Counter:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(fake):
        copied, args, kwargs = _copied((model, args, kwargs))
    device = next((p.device for _, p in _named(model)), torch.device("cpu"))

    def placed(x: Any) -> Any:
        """``meta`` is nowhere: such inputs go where the model is; a model that is nowhere takes all inputs there."""
        if not isinstance(x, Tensor) or "meta" not in (x.device.type, device.type):
            return x
        there = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        return there.requires_grad_(x.requires_grad)

    with fake:
        args, kwargs = tree_map(placed, (args, kwargs))
        return _run(copied, args, kwargs, backward)


def _run(model: nn.Module, args: Any, kwargs: Any, backward: bool) -> _Counter:
    seen = _Counter(model)
    with torch.set_grad_enabled(backward), seen, seen.following(model):
        out = model(*args, **kwargs)
        if backward:
            roots = [x for x in _tensors(out) if x.requires_grad]
            if not roots:
                raise _NothingLearns("backward=True, but no output depends on anything that wants a gradient")
            seen.returning = True
            with _gradients_kept(roots):
                torch.autograd.backward(roots, [torch.ones_like(x) for x in roots])
    return seen


@contextmanager
def _gradients_kept(roots: list[Tensor]) -> Iterator[None]:
    """Leave every ``grad`` as it was: a model may reach, through a function it calls, what was not copied with it."""
    nodes: list[Any] = [x.grad_fn for x in roots]
    met, leaves = set(nodes), [x for x in roots if x.is_leaf]
    while nodes:
        node = nodes.pop()
        leaves += [node.variable] if hasattr(node, "variable") else []
        new = {each for each, _ in getattr(node, "next_functions", ()) if each is not None} - met
        met |= new
        nodes += new
    before = [x.grad for x in leaves]
    try:
        for x in leaves:
            x.grad = None
        yield
    finally:
        for x, grad in zip(leaves, before, strict=True):
            x.grad = grad


def _copied(given: Any) -> Any:
    try:
        return copy.deepcopy(given)
    except Exception as problem:
        raise TypeError(f"count runs a copy of model and inputs, and these cannot be copied: {problem}") from problem


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
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Random generators kept; compiled parts run as written, and torch.nn's one-call layers as their parts.

    The products are the same, and each can be booked on the module that takes it.
    """
    cards = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    log = logging.getLogger("torch._subclasses.fake_tensor")  # it prints the traceback of what is then done for real
    with ExitStack() as after:
        after.callback(setattr, log, "disabled", log.disabled)
        after.callback(random.setstate, random.getstate())
        after.callback(np.random.set_state, np.random.get_state())
        after.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        after.enter_context(torch.random.fork_rng(devices=cards))
        after.enter_context(torch.compiler.set_stance("force_eager"))
        after.enter_context(torch.inference_mode(False))  # a copy made in it could have no gradients
        torch.backends.mha.set_fastpath_enabled(False)
        log.disabled = True
        yield
