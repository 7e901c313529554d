"""Replace heads that behave like convolutions by convolutions, and measure the error and the speedup."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._devices import synchronize, widest
from regard._errors import RegardError, RegardTypeError
from regard._observables import Observe
from regard.convolution._convolved_attention import ConvolvedAttention
from regard.convolution._to_convolution import HeadConvolution, to_convolution
from regard.interp import Recording, watch
from regard.interp._probes import run_model
from regard.nn import MultiHeadAttention

Call = Callable[[nn.Module, Tensor], Any]


@dataclass(frozen=True)
class Comparison:
    """Differences and times of two models on the same inputs.

    - ``error``: the largest absolute difference of outputs.
    - ``relative``: √(Σ (y' − y)² / Σ y²).
    - ``before``, ``after``: seconds per call, the best of several interleaved calls.

    >>> Comparison(error=0.01, relative=0.001, before=0.5, after=0.125).speedup
    4.0
    """

    error: float
    relative: float
    before: float
    after: float

    @property
    def speedup(self) -> float:
        """``before / after``; if it is above 1, the second model is faster."""
        return self.before / self.after


@dataclass(frozen=True)
class Replacement:
    """The result of ``replace``.

    - ``model``: a copy of the model with the heads of ``replaced`` as convolutions.
    - ``candidates``: the nearest convolution of every head, by the path of its layer.
    - ``replaced``: the candidates that were used, also by path.
    - ``comparison``: the copy against the original model.

    >>> near = regard.Quadratic(4, 4, heads=2, centers=[[0.0, 1.0], [-1.0, 0.0]], alpha=30.0)
    >>> layer = MultiHeadAttention(6, 2, scale=0.0, position=near)
    >>> result = replace(layer, inputs=torch.randn(1, 16, 6), radius=1, grid=(4, 4))
    >>> type(result.model).__name__, [round(x, 2) for x in result.candidates[""][0].centre]  # rows down, columns right
    ('ConvolvedAttention', [0.0, 1.0])
    """

    model: nn.Module
    candidates: Mapping[str, Sequence[HeadConvolution]]
    replaced: Mapping[str, Sequence[HeadConvolution]]
    comparison: Comparison

    @property
    def heads(self) -> tuple[int, int]:
        """The number of replaced heads, and the number of all heads."""
        return sum(map(len, self.replaced.values())), sum(map(len, self.candidates.values()))


def replace(
    model: nn.Module,
    threshold: float = 0.9,
    *,
    inputs: Tensor,
    radius: int = 2,
    grid: tuple[int, int] | None = None,
    call: Call = run_model,
) -> Replacement:
    """Copy a model and replace every head whose nearest convolution has ``fit ≥ threshold`` by that convolution.

    - ``model``: any module with ``regard.nn.MultiHeadAttention`` layers; only self-attention is replaced. On a grid
      every token must have a cell. A model with class tokens is refused: their rows are not a convolution.
    - ``threshold``: between 0 and 1.
    - ``inputs``: token ids or images, on which the heads are observed and both models are compared and timed.
    - ``radius``: r; kernels have 2r + 1 taps per axis.
    - ``grid``: (height, width) if rows are the cells of an image.
    - ``call(model, inputs)``: how to call the model; by default ``model(inputs)``. Only the first tensor is compared.

    >>> import regard
    >>> near = regard.Quadratic(4, 4, heads=2, centers=[[0.0, 1.0], [-1.0, 0.0]], alpha=30.0)
    >>> layer = MultiHeadAttention(6, 2, scale=0.0, position=near)
    >>> result = replace(layer, inputs=torch.randn(1, 16, 6), radius=1, grid=(4, 4))
    >>> result.heads, result.comparison.error < 1e-5
    ((2, 2), True)
    """
    if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
        raise RegardError(f"threshold must be a number between 0 and 1, got {threshold!r}")
    if not any(isinstance(module, MultiHeadAttention) for module in model.modules()):
        raise RegardError(f"model must contain a regard.nn.MultiHeadAttention, got {type(model).__name__} without one")
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), watch(model, Observe(grid=grid, keep=True)) as recording:
            call(model, inputs)

        candidates = {}
        replaced = {}
        for path in _self_attention_paths(model, recording, grid):
            candidates[path] = to_convolution(recording[path], radius=radius)
            close = [one for one in candidates[path] if one.fit >= threshold]
            if close:
                replaced[path] = close

        other = swap(model, replaced, grid=grid)
        comparison = compare(model, other.eval(), inputs, call=call)
        return Replacement(other.train(training), candidates, replaced, comparison)
    finally:
        model.train(training)


def swap(
    model: nn.Module, heads: Mapping[str, Sequence[HeadConvolution]], *, grid: tuple[int, int] | None = None
) -> nn.Module:
    """Copy a model and replace these heads by convolutions.

    - ``heads``: ``Replacement.replaced`` of this model, or of a model with the same layers for images of another size.
    - ``grid``: (height, width) if rows are the cells of an image.

    >>> model, x = regard.nn.Encoder(6, heads=3, layers=2), torch.randn(1, 16, 6)
    >>> result = replace(model, threshold=0.0, inputs=x)  # every head, whatever its fit
    >>> other = swap(model, {"blocks.1.attention": result.replaced["blocks.1.attention"]})
    >>> [type(block.attention).__name__ for block in other.blocks]
    ['MultiHeadAttention', 'ConvolvedAttention']
    """
    copy = deepcopy(model)
    for path, convolutions in heads.items():
        layer = copy.get_submodule(path)
        if not isinstance(layer, MultiHeadAttention):
            raise RegardTypeError(f"{path} must be a regard.nn.MultiHeadAttention, got {type(layer).__name__}")
        mixed = ConvolvedAttention(layer, convolutions, grid)
        if not path:
            return mixed
        parent, _, name = path.rpartition(".")
        setattr(copy.get_submodule(parent), name, mixed)
    return copy


def compare(
    model: nn.Module, other: nn.Module, inputs: Tensor, *, call: Call = run_model, repeat: int = 5
) -> Comparison:
    """Compare the outputs of two models on the same inputs, and time both models alternately.

    - ``call(model, inputs)``: how to call a model.
    - ``repeat``: how often each model is timed; the best time counts.

    >>> model = regard.nn.Encoder(6, heads=3, layers=1)
    >>> compare(model, model, torch.randn(1, 16, 6), repeat=1).error
    0.0
    """
    with torch.inference_mode():
        # These first calls also warm up.
        y = _first_tensor(call(model, inputs))
        difference = widest(_first_tensor(call(other, inputs)) - y)
        best = [math.inf, math.inf]
        for _ in range(repeat):
            for index, one in enumerate((model, other)):
                synchronize(y.device)
                start = time.perf_counter()
                call(one, inputs)
                synchronize(y.device)
                best[index] = min(best[index], time.perf_counter() - start)

    error = float(difference.abs().max()) if y.numel() else 0.0
    norm = float(widest(y).norm())
    relative = float(difference.norm())
    if norm:
        relative /= norm
    return Comparison(error, relative, *best)


def _self_attention_paths(model: nn.Module, recording: Recording, grid: tuple[int, int] | None) -> list[str]:
    paths = []
    for path in recording:
        if not isinstance(model.get_submodule(path), MultiHeadAttention):
            continue
        n = recording[path].n
        if n != recording[path].m:
            continue  # cross-attention
        if grid is not None and n != grid[0] * grid[1]:
            raise RegardError(
                f"grid must have one cell per row, got {grid[0]} × {grid[1]} for {n} rows of {path or 'the layer'}; "
                "class tokens are not part of a convolution"
            )
        paths.append(path)
    if not paths:
        raise RegardError(f"model must use self-attention, got {type(model).__name__} with cross-attention only")
    return paths


def _first_tensor(result: Any) -> Tensor:
    values = [result]
    if isinstance(result, Mapping):
        values = list(result.values())
    elif isinstance(result, list | tuple):
        values = list(result)
    for value in values:
        if isinstance(value, Tensor):
            return value
    raise RegardTypeError(f"call must return a tensor, or a collection with one, got {type(result).__name__}")
