"""Compare what ``regard.watch`` recorded of a model with the weights of the same model on eager attention."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from regard._observables import Observation
from regard.interp._recording import Recording
from regard.zoo._plain_formulas import MAP_SIZE, plain_observables
from regard.zoo._reference import Reference, is_around

# Relative to 1 plus the largest number. Both sides compute in float32, and later layers repeat the rounding of earlier
# ones; a key that is wrongly visible or hidden changes numbers by far more.
TOLERANCE = 2e-4


def output_difference(expected: Any, actual: Any, real: Tensor | None) -> str | None:
    """The first tensor of a model's output that differs, in one line; None if all are equal but for rounding.

    - ``real [B, tokens]``: the tokens that are compared; None for all of them.
    """
    names = dict(tensors_in(expected))
    others = dict(tensors_in(actual))
    for name, x in names.items():
        y = others.get(name)
        if y is None or x.shape != y.shape:
            return f"output {name} has another shape"
        if real is not None and x.ndim > 1 and x.shape[0] == real.shape[0]:
            # Some models add a class token after the text.
            compared = real
            if x.shape[1] == real.shape[1] + 1:
                compared = torch.nn.functional.pad(real, (0, 1), value=True)
            if x.shape[:2] == compared.shape:
                x = x[compared]
                y = y[compared]
        error = relative_error(x, y)
        if not error <= TOLERANCE:
            return f"output {name} differs by {error:.1e}"
    return None


def tensors_in(value: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """The floating-point tensors of a model's output with their names, except attention weights and caches."""
    if isinstance(value, Tensor):
        return [(name or "0", value)] if value.is_floating_point() else []
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    found = []
    for key, entry in items:
        if "attentions" not in str(key):
            found += tensors_in(entry, f"{name}.{key}".lstrip("."))
    return found


def relative_error(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to 1 plus the largest number; places where both are not finite are equal."""
    x = expected.detach().double()
    y = actual.detach().double()
    # Detection models return infinite logits of boxes outside of the image.
    finite = x.isfinite() | y.isfinite()
    x = x[finite]
    y = y[finite]
    if not x.numel():
        return 0.0
    difference = (x - y).abs().max() / (1 + x.abs().max())
    return float(difference.nan_to_num(torch.inf))


def recording_difference(
    recording: Recording, reference: Reference, real: Tensor | None, unseen: list[str]
) -> str | None:
    """The first observable that differs from the plain formula on eager weights, in one line.

    - ``real [B, tokens]``: which tokens are not padding; None if all are.
    - ``unseen``: the result of ``unseen_places``. Modules with calls that are missing are not compared.
    """
    for path, calls in recording.calls.items():
        if path in unseen:
            continue
        # One of the candidates must agree in all calls and all observables, which no other weights do by chance.
        candidates = reference.candidates(path)
        if not candidates:
            return f"{path} was recorded, but the eager model computes no weights there"
        problems = [_calls_difference(path, calls, weights, real) for weights in candidates]
        if all(problem is not None for problem in problems):
            return problems[0]
    return None


def _calls_difference(path: str, calls: list[Observation], weights: list[Tensor], real: Tensor | None) -> str | None:
    if len(calls) != len(weights):
        return f"{path} was called {len(weights)} times, and {len(calls)} calls were recorded"
    # Calls are recorded when weights meet values, so a module with several softmaxes may use them in another order.
    unused = list(weights)
    for observation in calls:
        problems = []
        for eager in unused:
            problems.append(_call_difference(path, observation, eager, real))
            if problems[-1] is None:
                break
        if problems[-1] is not None:
            return problems[0]
        unused.pop(len(problems) - 1)
    return None


def _call_difference(path: str, observation: Observation, eager: Tensor, real: Tensor | None) -> str | None:
    counted = observation.counted
    assert counted is not None
    arrangements = heads_first(eager, (*counted.shape, observation.m or 0))
    if not arrangements:
        shape = [*counted.shape, observation.m]
        return f"{path}: recorded weights have shape {shape}, eager ones {list(eager.shape)}"
    compared = counted
    if real is not None and real.shape == counted[:, 0].shape:
        compared = counted & real.unsqueeze(1)
        # The rows of self-attention are the tokens. In cross-attention nothing says which rows are padding.
        if observation.n == observation.m and not torch.equal(compared, counted):
            return f"{path}: padded rows are counted"
    problem = None
    for arranged in arrangements:
        problem = _weights_difference(path, observation, arranged, compared)
        if problem is None:
            return None
    return problem


def heads_first(weights: Tensor, shape: tuple[int, ...]) -> list[Tensor]:
    """The weights as ``[B, H, n, m]``, in every way in which their axes can be arranged so."""
    B, H, n, m = shape
    sizes = tuple(weights.shape)
    # Keys that no query may see are left out by transformers' own function.
    if sizes[:-1] == shape[:-1] and sizes[-1] < m:
        weights = torch.nn.functional.pad(weights, (0, m - sizes[-1]))
        sizes = shape
    if sizes == shape:
        return [weights]
    arrangements = []
    # Lengths are chosen so that few arrangements fit; equal sizes leave several, of which one must agree.
    for order in itertools.permutations(range(weights.ndim)):
        moved = weights.permute(order)
        # The batch and the heads may be one axis or several.
        if moved.ndim >= 3 and tuple(moved.shape[-2:]) == (n, m) and moved.shape[:-2].numel() == B * H:
            arrangements.append(moved.reshape(shape))
    return arrangements


def _weights_difference(path: str, observation: Observation, eager: Tensor, compared: Tensor) -> str | None:
    # A row that sees no key has equal weights in eager attention, and does not count.
    assert observation.counted is not None
    has_padding = not torch.equal(compared, observation.counted)
    for name, expected in plain_observables(eager, compared).items():
        actual = getattr(observation, name)
        if expected.ndim == 3 and name != "map":
            actual = torch.where(compared, actual.double(), 0.0)
        elif has_padding:
            # Means over rows that are partly padding, which both sides compute differently.
            continue
        error = relative_error(expected, actual)
        if not error <= TOLERANCE:
            return f"{path}: {name} differs by {error:.1e}"
    return None


def unseen_places(recording: Recording, reference: Reference) -> list[str]:
    """The paths at which the eager model computes attention that is not in the recording, or not every call of it."""
    paths = list(reference.attention)
    # What an attention module returns beside its output, and its softmax, may be recorded at a module in or around it.
    for path in reference.returned:
        if not any(is_around(path, other) for other in (*reference.attention, *recording.calls)):
            paths.append(path)
    for path in sorted(reference.attention_softmaxes):
        if not any(is_around(path, other) for other in (*reference.returned, *recording.calls)):
            paths.append(path)
    missing = [path for path in dict.fromkeys(paths) if path not in recording.calls]
    for path, calls in recording.calls.items():
        candidates = reference.candidates(path)
        if candidates and len(candidates[0]) > len(calls):
            missing.append(path)
    return missing


__all__ = ["MAP_SIZE", "TOLERANCE", "output_difference", "recording_difference", "unseen_places"]
