"""Capture the attention weights of a model that runs on the eager attention of ``transformers``.

This is how the comparison gets weights that regard did not compute: from the eager attention function of the model's
own file, from what its attention modules return, and from the softmax that it calls.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

# Model files have copies of the function, also under names such as `eager_attention_forward_with_bias`.
EAGER_FUNCTION = re.compile(r"(?:\w+_)?eager\w*_forward\w*|eager_attention\w*")
SOFTMAXES = frozenset({torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax})
# Sums of float32 and bfloat16 weights are near 1 only.
SUM_TOLERANCE = 1e-3


@dataclass
class Reference:
    """The weights of each module, by path, in the order of its calls.

    - ``attention``: weights that are certainly attention: of eager attention functions and of torch's own attention.
    - ``returned``: tensors of weights that a module returned beside its output.
    - ``softmaxes``: what each softmax in a module returned, whatever it is for.
    - ``attention_softmaxes``: the paths in ``softmaxes`` whose modules are attention by their names.
    """

    attention: dict[str, list[Tensor]] = field(default_factory=dict)
    returned: dict[str, list[Tensor]] = field(default_factory=dict)
    softmaxes: dict[str, list[Tensor]] = field(default_factory=dict)
    attention_softmaxes: set[str] = field(default_factory=set)

    def candidates(self, path: str) -> list[list[Tensor]]:
        """The lists of weights that may be those of the calls recorded at a path, the surest first."""
        lists = [source[path] for source in (self.attention, self.returned, self.softmaxes) if path in source]
        # The softmax may be in a module around the one that multiplies the weights with values, or inside it, or beside
        # it in the same module.
        parent = path.rpartition(".")[0]
        for source in (self.returned, self.softmaxes):
            for other, weights in source.items():
                if is_around(path, other) or parent == other.rpartition(".")[0] != "":
                    lists.append(weights)
        return lists


def is_around(path: str, other: str) -> bool:
    """Whether one of two modules is inside the other one."""
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")


@contextmanager
def captured(model: nn.Module) -> Iterator[Reference]:
    """Capture the weights of every attention call of an eager model within the context."""
    reference = Reference()
    paths = {module: path for path, module in model.named_modules()}
    running: list[nn.Module] = []
    with ExitStack() as stack:
        for module in paths:
            stack.callback(module.register_forward_pre_hook(lambda module, _: running.append(module)).remove)
            stack.callback(module.register_forward_hook(_returned_weights(reference, paths, running)).remove)
        inside: list[bool] = []
        stack.enter_context(_eager_functions_wrapped(reference, paths, inside))
        stack.enter_context(_TorchCalls(reference, paths, running, inside))
        yield reference


def _returned_weights(reference: Reference, paths: dict[nn.Module, str], running: list[nn.Module]) -> Any:
    """A hook that collects the weights that a module returns beside its output, from the innermost module only."""

    # The same tensor is often returned by several modules; it stays alive, so that its id stays its own.
    known: dict[int, Tensor] = {}

    def hook(module: nn.Module, _: Any, out: Any) -> None:
        running.pop()
        if not isinstance(out, tuple) or not _is_attention(module):
            return
        for x in out[1:]:
            if isinstance(x, Tensor) and id(x) not in known and _may_be_weights(x):
                known[id(x)] = x
                reference.returned.setdefault(paths[module], []).append(x.detach())

    return hook


def _is_attention(module: nn.Module) -> bool:
    """Whether a module is attention of queries and keys, by the name of its class.

    Deformable attention samples an image at a few points. Additive and linear attention has no weight for each query
    and each key.
    """
    name = type(module).__name__.lower()
    return "att" in name and not any(other in name for other in ("deformable", "additive", "linear", "gru"))


def attention_classes(model: nn.Module) -> list[str]:
    """The classes of a model's modules that are called attention, of whatever kind."""
    names = {type(module).__name__ for module in model.modules()}
    return sorted(name for name in names if "attention" in name.lower())


def _may_be_weights(x: Tensor) -> bool:
    if x.ndim not in (3, 4, 5) or not x.is_floating_point() or x.numel() == 0:
        return False
    sums = x.detach().double().sum(-1)
    return bool((x >= 0).all()) and bool((sums <= 1 + SUM_TOLERANCE).all())


@contextmanager
def _eager_functions_wrapped(reference: Reference, paths: dict[nn.Module, str], inside: list[bool]) -> Iterator[None]:
    """Collect what the eager attention functions of all loaded model files return."""
    # The functions are looked up in their files at every call, so replacing them there is enough.
    originals = []
    for name, file in list(sys.modules.items()):
        if not name.startswith("transformers.") or file is None:
            continue
        for attribute, function in list(vars(file).items()):
            if EAGER_FUNCTION.fullmatch(attribute) and callable(function):
                originals.append((file, attribute, function))
                setattr(file, attribute, _collecting(function, reference, paths, inside))
    try:
        yield
    finally:
        for file, attribute, function in originals:
            setattr(file, attribute, function)


def _collecting(function: Any, reference: Reference, paths: dict[nn.Module, str], inside: list[bool]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        inside.append(True)
        try:
            out = function(*args, **kwargs)
        finally:
            inside.pop()
        module = args[0] if args else kwargs.get("module")
        # One eager function may call another one.
        if not inside and isinstance(out, tuple) and isinstance(out[1], Tensor) and module in paths:
            weights = out[1].detach()
            if isinstance(getattr(module, "sinks", None), Tensor):
                weights = _with_sinks(weights, *args, **kwargs)
            reference.attention.setdefault(paths[module], []).append(weights)
        return out

    return call


def _with_sinks(
    weights: Tensor,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **options: Any,
) -> Tensor:
    """The share of learned sinks removed from the weights, if the eager function applies it to the output instead."""
    if bool((weights.sum(-1) < 1 - SUM_TOLERANCE).any()):
        return weights
    k = key.double().repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = query.double() @ k.mT * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    share = (scores.logsumexp(-1) - module.sinks.detach().double().view(1, -1, 1)).sigmoid()
    return weights * share.unsqueeze(-1)


class _TorchCalls(TorchFunctionMode):
    """Collects the weights of torch's own attention functions, and of every softmax."""

    def __init__(
        self, reference: Reference, paths: dict[nn.Module, str], running: list[nn.Module], inside: list[bool]
    ) -> None:
        super().__init__()
        self.reference = reference
        self.paths = paths
        self.running = running
        self.inside = inside

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        # The softmax of an eager function is part of what that function returns.
        if not self.running or self.inside:
            return out
        path = self.paths[self.running[-1]]
        if func is F.scaled_dot_product_attention:
            self.reference.attention.setdefault(path, []).append(_sdpa_weights(*args, **kwargs))
        elif func is F.multi_head_attention_forward:
            weights = func(*args, **{**kwargs, "need_weights": True, "average_attn_weights": False})[1]
            assert weights is not None
            self.reference.attention.setdefault(path, []).append(weights)
        elif func in SOFTMAXES and out.ndim >= 3 and out.numel():
            # A copy: models set weights of hidden keys to 0 in place.
            self.reference.softmaxes.setdefault(path, []).append(out.detach().clone())
            if _is_attention(self.running[-1]):
                self.reference.attention_softmaxes.add(path)
        return out


def _sdpa_weights(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The weights of a call of torch's attention function, by its formula."""
    q = query.detach().double()
    k = key.detach().double()
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # A row that sees no key has no weights.
    return scores.softmax(-1).nan_to_num(0.0)
