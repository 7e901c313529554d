"""Heads that are convolutions in all but name, replaced by them: what it changes, and what it saves."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.convolution.convolved import ConvolvedAttention
from regard.convolution.to_convolution import HeadConvolution, to_convolution
from regard.nn import MultiHeadAttention
from regard.observables import Observe
from regard.watching import watch
from regard.watching.heads import run

__all__ = ["Replaced", "compare", "replace", "swap"]

Call = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Comparison:
    """One model against another on the same inputs.

    ``error`` is the largest difference of outputs, ``relative`` √(Σ (y' − y)² / Σ y²); ``before`` and ``after`` are
    seconds of a call, the best of several taken in turn, and ``speedup`` is their ratio.

    >>> Comparison(error=0.01, relative=0.001, before=0.5, after=0.125).speedup
    4.0
    """

    error: float
    relative: float
    before: float
    after: float

    @property
    def speedup(self) -> float:
        """``before / after``: above 1 the other model is faster."""
        return self.before / self.after


@dataclass(frozen=True)
class Replaced:
    """``model``: a copy in which the heads of ``swapped`` are convolutions; ``found``: the nearest of every head.

    >>> near = regard.Quadratic(4, 4, heads=2, centers=[[0.0, 1.0], [-1.0, 0.0]], alpha=30.0)
    >>> layer = MultiHeadAttention(6, 2, scale=0.0, position=near)
    >>> done = replace(layer, inputs=torch.randn(1, 16, 6), radius=1, grid=(4, 4))
    >>> type(done.model).__name__, [round(x, 2) for x in done.found[""][0].centre]  # rows down, columns right
    ('ConvolvedAttention', [0.0, 1.0])
    """

    model: nn.Module
    found: Mapping[str, Sequence[HeadConvolution]]
    swapped: Mapping[str, Sequence[HeadConvolution]]
    comparison: Comparison

    @property
    def heads(self) -> tuple[int, int]:
        """How many heads were replaced, of how many."""
        many, of = (sum(map(len, x.values())) for x in (self.swapped, self.found))
        return many, of


def replace(
    model: nn.Module,
    threshold: float = 0.9,
    *,
    inputs: Tensor,
    radius: int = 2,
    grid: tuple[int, int] | None = None,
    call: Call = run,
) -> Replaced:
    """Every head whose nearest convolution has ``fit ≥ threshold`` on ``inputs``, replaced by it in a copy of a model.

    - ``inputs``: token ids or pictures, on which heads are looked at, and both models compared and timed.
    - ``radius``: kernels have 2r + 1 taps an axis. ``grid``: (height, width), where rows are the cells of a picture.
    - ``call(model, inputs)`` where ``model(inputs)`` is not how; the tensor that it returns, or the first, is compared.

    Heads of ``regard.nn.MultiHeadAttention`` in self-attention are looked at, whatever the model is otherwise. Tokens
    that stand before the grid (class tokens) are refused: their rows are no convolution.

    >>> import regard
    >>> near = regard.Quadratic(4, 4, heads=2, centers=[[0.0, 1.0], [-1.0, 0.0]], alpha=30.0)
    >>> layer = MultiHeadAttention(6, 2, scale=0.0, position=near)
    >>> done = replace(layer, inputs=torch.randn(1, 16, 6), radius=1, grid=(4, 4))
    >>> done.heads, done.comparison.error < 1e-5
    ((2, 2), True)
    """
    if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold!r}; it must be a number from 0 to 1")
    if not any(isinstance(module, MultiHeadAttention) for module in model.modules()):
        raise ValueError(f"{type(model).__name__} has no regard.nn.MultiHeadAttention, whose heads could be replaced")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), watch(model, Observe(grid=grid, keep=True)) as seen:
            call(model, inputs)
        found = {path: to_convolution(seen[path], radius=radius) for path in _looked_at(model, seen, grid)}
        swapped = {
            path: good for path, heads in found.items() if (good := [one for one in heads if one.fit >= threshold])
        }
        other = swap(model, swapped, grid=grid)
        return Replaced(other.train(training), found, swapped, compare(model, other.eval(), inputs, call=call))
    finally:
        model.train(training)


def swap(
    model: nn.Module, heads: Mapping[str, Sequence[HeadConvolution]], *, grid: tuple[int, int] | None = None
) -> nn.Module:
    """A copy of a model with these heads, by the path of their layer, replaced.

    They are ``Replaced.swapped`` of this model, or of another one with the same layers, which may read smaller
    pictures.

    >>> model, x = regard.nn.Encoder(6, heads=3, layers=2), torch.randn(1, 16, 6)
    >>> done = replace(model, threshold=0.0, inputs=x)  # every head, however well it fits
    >>> other = swap(model, {"blocks.1.attention": done.swapped["blocks.1.attention"]})
    >>> [type(block.attention).__name__ for block in other.blocks]
    ['MultiHeadAttention', 'ConvolvedAttention']
    """
    copy = deepcopy(model)
    for path, found in heads.items():
        layer = copy.get_submodule(path)
        if not isinstance(layer, MultiHeadAttention):
            raise TypeError(f"{path} is a {type(layer).__name__}; heads of a regard.nn.MultiHeadAttention are replaced")
        instead = ConvolvedAttention(layer, found, grid)
        if not path:
            return instead
        parent, _, name = path.rpartition(".")
        setattr(copy.get_submodule(parent), name, instead)
    return copy


def compare(model: nn.Module, other: nn.Module, inputs: Tensor, *, call: Call = run, repeat: int = 5) -> Comparison:
    """How far the outputs of two models are apart on the same inputs, and the time of both, taken in turn.

    >>> model = regard.nn.Encoder(6, heads=3, layers=1)
    >>> compare(model, model, torch.randn(1, 16, 6), repeat=1).error
    0.0
    """
    pair = (model, other)
    with torch.inference_mode():
        y, z = (_tensor(call(one, inputs)) for one in pair)  # the first calls warm up
        best = [math.inf, math.inf]
        for _ in range(repeat):
            for which, one in enumerate(pair):
                began = time.perf_counter()
                call(one, inputs)
                best[which] = min(best[which], time.perf_counter() - began)
    apart, whole = (z - y).double(), y.double()
    error = float(apart.abs().max()) if y.numel() else 0.0
    size = float(whole.norm())
    return Comparison(error, float(apart.norm()) / size if size else float(apart.norm()), *best)


def _looked_at(model: nn.Module, seen: Any, grid: tuple[int, int] | None) -> list[str]:
    paths = []
    for path in seen:
        if not isinstance(model.get_submodule(path), MultiHeadAttention):
            continue
        n, m = seen[path].n, seen[path].m
        if n != m:
            continue  # cross-attention
        if grid is not None and n != grid[0] * grid[1]:
            raise ValueError(
                f"{path or 'the layer'} has {n} rows, and a grid of {grid[0]} × {grid[1]} as many cells as "
                f"{grid[0] * grid[1]}; tokens that stand on no cell are no part of a convolution"
            )
        paths.append(path)
    if not paths:
        raise ValueError(
            f"{type(model).__name__} attended to nothing but contexts; heads of self-attention are replaced"
        )
    return paths


def _tensor(result: Any) -> Tensor:
    if isinstance(result, Tensor):
        return result
    values = result.values() if isinstance(result, Mapping) else result if isinstance(result, list | tuple) else ()
    found = next((x for x in values if isinstance(x, Tensor)), None)
    if found is None:
        raise TypeError(f"the model returned {type(result).__name__}; a call= must return a tensor to compare")
    return found
