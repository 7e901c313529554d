"""Where patched values come from: a run that was captured, a function of the value, or given weights."""

from __future__ import annotations

import functools
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import describe_value
from regard._errors import RegardError, RegardTypeError
from regard._saved_call import SavedCall
from regard.interp._patch_capture import Captured, CapturedQuery, Value, capture_run
from regard.interp._patch_heads import HeadInputs, has_query_tables
from regard.interp._patch_sites import PARTS, Site, SiteSelection, resolve_positions

SourceLike = Tensor | Captured | Callable[..., Any]


@dataclass(frozen=True)
class Target:
    """One head of one call whose part is replaced. ``number`` counts the calls of the module in the patched run."""

    site: Site
    path: str
    head: int
    number: int


class Source(ABC):
    """Gives the new value of a part of a head."""

    @abstractmethod
    def replace(self, old: Tensor, target: Target) -> Tensor:
        """The output, k or v of a head, ``[B, rows, width]``, with new numbers at the positions of the site."""

    @abstractmethod
    def replace_query(self, inputs: HeadInputs, target: Target) -> HeadInputs:
        """The inputs of one head, with new queries at the positions of the site."""

    @abstractmethod
    def pattern_output(self, old: Tensor, v: Tensor, target: Target) -> Tensor:
        """The output of a head ``[B, n, e]`` with another pattern over its values ``v [B, m, e]``."""


class CapturedSource(Source):
    """Values of another run."""

    def __init__(self, captured: Captured) -> None:
        self.captured = captured

    def replace(self, old: Tensor, target: Target) -> Tensor:
        value = self._value(target)
        assert isinstance(value, Tensor)
        return _put(old, value, target)

    def replace_query(self, inputs: HeadInputs, target: Target) -> HeadInputs:
        value = self._value(target)
        assert isinstance(value, CapturedQuery)
        q = _put(inputs.q[:, 0], value.q, target)
        patched = HeadInputs(q.unsqueeze(1), inputs.k, inputs.scores)
        if not has_query_tables(inputs):
            return patched
        # q also enters a relative bias, so that its rows change, too.
        tables: list[Tensor | None] = []
        for old, new in zip(inputs.query_tables(), value.tables, strict=True):
            if old is None or new is None:
                tables.append(None)
                continue
            width = min(old.shape[-1], new.shape[-1])
            if width < max(old.shape[-1], new.shape[-1]):
                raise RegardError(f"the relative bias of {target.path!r} has another width in the source")
            tables.append(_put(old[:, 0], new[:, 0], target).unsqueeze(1))
        return patched.with_query_tables(tables)

    def pattern_output(self, old: Tensor, v: Tensor, target: Target) -> Tensor:
        saved = self._value(target)
        assert isinstance(saved, SavedCall)
        m = saved.k.shape[2]
        if m != v.shape[1]:
            raise RegardError(
                f"the pattern of {target.path!r} has {m} keys in the source and {v.shape[1]} in this run; "
                "both runs must have the same length"
            )
        _check_batch(saved.q, v, target)
        out = HeadInputs(saved.q, saved.k, saved.scores).output(v.unsqueeze(1))[:, 0]
        return _put(old, out.to(old.dtype), target)

    def _value(self, target: Target) -> Value:
        calls = self.captured.calls(target.path, target.head, target.site.part)
        # The patched run may be repeated in one context.
        return calls[target.number % len(calls)]


class FunctionSource(Source):
    """A function of the value itself: its mean, zeros, noise."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def replace(self, old: Tensor, target: Target) -> Tensor:
        new = self.function(old)
        if not isinstance(new, Tensor):
            raise RegardTypeError(f"the source function must return a tensor, got {describe_value(new)}")
        try:
            new = new.to(old.dtype).expand_as(old)
        except RuntimeError:
            shapes = f"{list(old.shape)}, got {list(new.shape)}"
            raise RegardError(f"the source function must return a tensor that broadcasts to {shapes}") from None
        return _put(old, new, target)

    def replace_query(self, inputs: HeadInputs, target: Target) -> HeadInputs:
        if has_query_tables(inputs):
            raise RegardError(
                f"q of {target.path!r} also enters a relative bias, which a function of q does not change; "
                "patch q from a run"
            )
        q = self.replace(inputs.q[:, 0], target)
        return HeadInputs(q.unsqueeze(1), inputs.k, inputs.scores)

    def pattern_output(self, old: Tensor, v: Tensor, target: Target) -> Tensor:
        raise RegardError("a function cannot replace a pattern, which is never stored; give a run or weights [n, m]")


class WeightsSource(Source):
    """Given weights, ``[n, m]`` or ``[B, n, m]``; with positions, one row for each of them."""

    def __init__(self, weights: Tensor) -> None:
        self.weights = weights

    def replace(self, old: Tensor, target: Target) -> Tensor:
        raise RegardError(f"weights can only replace a pattern, but a site has part {target.site.part!r}")

    def replace_query(self, inputs: HeadInputs, target: Target) -> HeadInputs:
        raise RegardError("weights can only replace a pattern, but a site has part 'q'")

    def pattern_output(self, old: Tensor, v: Tensor, target: Target) -> Tensor:
        rows = resolve_positions(target.site, target.path, old.shape[1], "this run")
        expected = (old.shape[1] if rows is None else len(rows), v.shape[1])
        if tuple(self.weights.shape[-2:]) != expected or self.weights.ndim not in (2, 3):
            raise RegardError(
                f"weights must be [rows, keys] = {list(expected)}, or [B, rows, keys], got {list(self.weights.shape)}"
            )
        weights = self.weights.to(v.device, v.dtype)
        if weights.ndim == 3:
            _check_batch(weights, v, target)
        out = (weights @ v).to(old.dtype)
        return _put_rows(old, rows, out)


def resolve_source(model: nn.Module, source: SourceLike, selection: SiteSelection) -> tuple[Source, list[Any]]:
    """The source that an argument means. A run is run now, and captured at the selected sites.

    Returns the source, and a list with the output of the run, or an empty list.
    """
    if isinstance(source, Captured):
        return CapturedSource(source), []
    if isinstance(source, Tensor) and source.is_floating_point():
        others = [site.part for site in selection.sites if site.part != "pattern"]
        if others:
            raise RegardError(
                f"source is a tensor of floats, which are weights for part 'pattern', but a site has part {others[0]!r}"
            )
        return WeightsSource(source), []
    if callable(source) and takes_argument(source):
        return FunctionSource(source), []
    if not isinstance(source, Tensor) and not callable(source):
        raise RegardTypeError(
            "source must be token ids, a function, what capture() returned, or weights for a pattern, "
            f"got {describe_value(source)}"
        )
    captured, output = capture_run(model, source, selection)
    return CapturedSource(captured), [output]


def takes_argument(function: Callable[..., Any]) -> bool:
    """Whether a function must be given an argument: it then changes a tensor; else it runs the model."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        # Functions of torch have no signature: torch.zeros_like.
        return True
    for parameter in parameters:
        is_positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_positional and parameter.default is parameter.empty:
            return True
        # ``partial(model, ids)`` has all that the model needs; a module without arguments has not.
        if parameter.kind == parameter.VAR_POSITIONAL and not isinstance(function, functools.partial):
            return True
    return False


def _put(old: Tensor, new: Tensor, target: Target) -> Tensor:
    """``old`` with the rows of ``new`` at the positions of the site, which count in either run."""
    _check_batch(new, old, target)
    site = target.site
    rows = resolve_positions(site, target.path, old.shape[1], "this run")
    if rows is None:
        if new.shape[1] != old.shape[1]:
            raise RegardError(
                f"{site.part!r} of {target.path!r} has {new.shape[1]} {PARTS[site.part]} in the source and "
                f"{old.shape[1]} in this run; texts must have the same length, or sites must name positions"
            )
        return new.expand_as(old).to(old.dtype)
    source_rows = resolve_positions(site, target.path, new.shape[1], "the source")
    return _put_rows(old, rows, new[:, source_rows])


def _put_rows(old: Tensor, rows: list[int] | None, new: Tensor) -> Tensor:
    if rows is None:
        return new.expand_as(old).to(old.dtype)
    index = torch.tensor(rows, device=old.device)
    return old.index_copy(1, index, new.expand(old.shape[0], -1, -1).to(old.dtype))


def _check_batch(new: Tensor, old: Tensor, target: Target) -> None:
    if new.shape[0] not in (1, old.shape[0]):
        raise RegardError(
            f"the source has {new.shape[0]} batch entries at {target.path!r}, and this run {old.shape[0]}; "
            "they must be equal, or one in the source"
        )
