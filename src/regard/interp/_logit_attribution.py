"""Direct logit attribution: a logit as a sum over embeddings, heads, feed-forward networks and constants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_instance, check_integer, describe_value
from regard._errors import RegardError, RegardTypeError
from regard._hooks import AttentionCall, Observer, own_computation
from regard._observables import Observation, Observe
from regard.interp._linear_paths import LinearPaths
from regard.interp._logit_parts import KINDS, HeadReading, LogitPart, LogitParts
from regard.interp._model_blocks import (
    CONSTANT,
    FEED_FORWARD,
    HEAD,
    OTHER,
    TOKENS,
    UNSEEN,
    exact_and_frozen,
)
from regard.interp._path_sources import Source
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, count_forwards, list_paths, observing

Inputs = Tensor | Callable[[], Any]
Target = int | tuple[int, int]

TOLERANCE = 1e-4  # of the sum of the parts, relative to the logit or to the largest part


def logit_attribution(model: nn.Module, inputs: Inputs, target: Target, position: int = -1) -> LogitParts:
    """Split a logit over what the parts of a model add to the residual stream, with the scale of every norm frozen.

        logit = Σ_c ⟨x_c, ∂logit/∂x_c⟩      c = embeddings, heads, feed-forward networks, constants

    Only the direct path from a part to the logits counts: what a head changes in later heads belongs to these.

    - ``model``: a model of regard or of ``transformers``, or another PyTorch model with a residual stream, whose output
      is logits ``[1, n, V]``.
    - ``inputs``: token ids ``[n]`` or ``[1, n]``, or a function that runs the model and returns its output.
    - ``target``: a token id; or a pair (id, other id) for the difference of two logits.
    - ``position``: the row of the logits; the last one by default.

    Returns ``LogitParts``. Their sum is compared with the logit of an ordinary run: it must agree to 10⁻⁴, relative to
    the logit or to the largest part. If the model caps its logits (Gemma 2), the logit before the cap is split.

    Raises ``RegardError`` if the parts do not sum to the logit; the message names what could not be seen, for example
    the nonlinear prediction head of BERT.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor(model.tokenizer.encode("import os; import o"))
    >>> parts = logit_attribution(model, ids, target=model.tokenizer.encode("s")[-1])
    >>> bool(abs(parts.sum() - parts.logit) <= 1e-4 * abs(parts.largest()))
    True
    >>> len(parts.of("head")), len(parts.of("feed-forward")), len(parts.of("token embedding"))
    (12, 3, 1)
    """
    check_instance("model", model, nn.Module)
    ids = checked_ids(inputs)
    with torch.inference_mode(False), exact_and_frozen(model):
        plain = plain_run(model, inputs, ids)
        row = _checked_row(plain.logits, position)
        first, second = _checked_target(target, plain.logits.shape[-1])
        observer = _HeadSources(model, row - plain.logits.shape[1])
        paths = LinearPaths(
            *(model, observer.paths, list(plain.attention)), vocabulary=plain.logits.shape[-1], ids=plain.ids
        )
        observer.linear = paths
        logits = logits_of(model, run_linear(model, inputs, plain.ids, paths, observer))
        with torch.enable_grad():
            value = _chosen(logits, row, first, second)
        logit = _chosen(plain.logits, row, first, second)
        contributions = paths.sources.contributions(value)

    reasons = reasons_unseen(paths, contributions, logits)
    softcap = None
    if paths.uncapped is not None:
        softcap = _softcap(logits, plain.logits, paths.uncapped)
        logit = value.detach()
    result = LogitParts(
        logit=float(logit),
        target=(first, second),
        position=row,
        softcap=softcap,
        parts=tuple(_parts(contributions)),
        readings={path: observer.reading(path, contributions, paths) for path in plain.attention},
        layers=dict(plain.attention),
    )
    if not reasons:
        _check_run(model, logits, plain.logits, softcap, paths)
        error = abs(result.sum() - result.logit)
        if error <= TOLERANCE * max(abs(result.logit), result.largest()):
            return result
        reasons.append(f"something adds {result.logit - result.sum():.3g} to the residual stream that was not seen")
    raise RegardError(
        f"a logit of {type(model).__name__} ({result.logit:.6g}) is not the sum of parts that can be seen "
        f"({result.sum():.6g}): {'; '.join(reasons)}"
    )


def _chosen(logits: Tensor, row: int, first: int, second: int | None) -> Tensor:
    """A logit, or the difference of two."""
    if second is None:
        return logits[0, row, first]
    return logits[0, row, first] - logits[0, row, second]


@dataclass(frozen=True, eq=False)
class PlainRun:
    """An ordinary run of a model.

    - ``logits [1, n, V]``; ``ids [1, n]``, if they are known.
    - ``attention``: the paths at which attention was computed, with their numbers.
    """

    logits: Tensor
    ids: Tensor | None
    attention: dict[str, int]


def plain_run(model: nn.Module, inputs: Inputs, ids: Tensor | None, *, needs_logits: bool = True) -> PlainRun:
    """Run a model once, as it is, to learn its logits and where it computes attention.

    - ``needs_logits``: False for any model; ``logits`` is then empty.
    """
    parameter = next(model.parameters(), None)
    if ids is not None and parameter is not None:
        ids = ids.to(parameter.device)
    observer = Observer(model)
    with torch.no_grad(), count_forwards(model) as forwards, observing(observer):
        result = call_model(model, inputs, ids)
    logits = logits_of(model, result) if needs_logits else torch.empty(0)
    if forwards[0] != 1:
        raise RegardError(f"inputs must run the model once, but it ran {forwards[0]} times")
    if observer.unseen:
        raise RegardError(
            f"{type(model).__name__} computes attention that regard does not recognise: {list_paths(observer.unseen)}"
        )
    if not observer.reached:
        raise RegardError(f"{type(model).__name__} {NO_VISIBLE_ATTENTION}")
    return PlainRun(logits, ids, dict(observer.reached))


def run_linear(model: nn.Module, inputs: Inputs, ids: Tensor | None, paths: LinearPaths, observer: Observer) -> Any:
    """The output of a run with linear paths."""
    try:
        # The mode stands outside of the observer's own, so that it sees attention only after it was recognised.
        with torch.enable_grad(), paths, observing(observer):
            return call_model(model, inputs, ids)
    except RuntimeError as error:
        # The same inputs worked in the ordinary run.
        raise RegardError(f"the linear paths of {type(model).__name__} cannot be followed: {error}") from error


def call_model(model: nn.Module, inputs: Inputs, ids: Tensor | None) -> Any:
    """The output of a model for ids, or what the function returns."""
    if callable(inputs):
        return inputs()
    return model(ids)


def logits_of(model: nn.Module, result: Any) -> Tensor:
    """The logits ``[1, n, V]`` in the output of a model."""
    logits = getattr(result, "logits", result)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[0] != 1 or not logits.is_floating_point():
        raise RegardError(
            f"{type(model).__name__} must return logits [1, n, vocabulary] of one text, got {describe_value(logits)}"
        )
    return logits


def checked_ids(inputs: Any) -> Tensor | None:
    """Ids as ``[1, n]``; None if the inputs are a function."""
    if isinstance(inputs, Tensor) and not inputs.is_floating_point() and inputs.ndim in (1, 2):
        ids = inputs.reshape(-1, inputs.shape[-1])
        if ids.shape[0] == 1 and ids.shape[1] > 0:
            return ids
    elif callable(inputs) and not isinstance(inputs, nn.Module):
        return None
    raise RegardTypeError(
        f"inputs must be token ids [n] or [1, n], or a function that runs the model; got {describe_value(inputs)}"
    )


def _checked_row(logits: Tensor, position: int) -> int:
    n = logits.shape[1]
    return check_integer("position", position, least=-n, most=n - 1) % n


def _checked_target(target: Any, vocabulary: int) -> tuple[int, int | None]:
    ids = target if isinstance(target, tuple | list) else (target,)
    if len(ids) not in (1, 2):
        raise RegardError(f"target must be a token id, or a pair (id, other id), got {target!r}")
    for token in ids:
        check_integer("target", token, least=0, most=vocabulary - 1)
    if len(ids) == 1:
        return ids[0], None
    return ids[0], ids[1]


class _HeadSources(Observer):
    """Makes the output of every head a source, and keeps what one row of it read.

    - ``row``: the row, counted from the end (a negative number).
    """

    linear: LinearPaths

    def __init__(self, model: nn.Module, row: int) -> None:
        super().__init__(model)
        self.row = row
        # The row that was read, its weights and its values.
        self._readings: dict[Source, tuple[int, Tensor, Tensor]] = {}

    def before(self, call: AttentionCall) -> Observe:
        return Observe(keep=True)

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        begun, source = self.linear.begin_at_heads(call.path, out)
        row = out.shape[-2] + self.row
        if observation is not None and row >= 0 and observation.saved_calls:
            with own_computation(), torch.no_grad():
                weights_HM = torch.stack([observation.weights(h, row)[0] for h in observation.heads])
                v_GME = call.v.detach().reshape(-1, *call.v.shape[-3:])[0]
            self._readings[source] = (row, weights_HM, v_GME)
        return begun

    def reading(self, path: str, contributions: dict[Source, Tensor], paths: LinearPaths) -> HeadReading | None:
        """What the heads of a path read, with the direction of the logit; None if it is not known."""
        calls = [source for source in contributions if source.kind == HEAD and source.path == path]
        if len(calls) != 1 or calls[0] not in self._readings or calls[0] not in paths.sources.head_gradients:
            return None
        row, weights_HM, v_GME = self._readings[calls[0]]
        used_row, direction_HE = paths.sources.head_gradients[calls[0]]
        if row != used_row:
            return None
        return HeadReading(row, weights_HM, v_GME, direction_HE)


def _parts(contributions: dict[Source, Tensor]) -> list[LogitPart]:
    """The parts of a logit, by kind."""
    values: dict[tuple[str, str, int | None], float] = {}
    for source, value in contributions.items():
        if source.kind == HEAD:
            for head, number in enumerate(value.tolist()):
                key = (HEAD, source.path, head)
                values[key] = values.get(key, 0.0) + number
        else:
            plain_key = (source.kind, source.path, None)
            values[plain_key] = values.get(plain_key, 0.0) + float(value)
    parts = [LogitPart(kind, path, head, value) for (kind, path, head), value in values.items()]
    # Within a kind, parts keep the order in which the model made them.
    return sorted(parts, key=lambda part: KINDS.index(part.kind) if part.kind in KINDS else len(KINDS))


def _softcap(logits: Tensor, capped: Tensor, inside: Tensor) -> float:
    """The cap c of c·tanh(logit / c), from the logits before and after it, and the argument of tanh."""
    where = inside.abs().argmax()
    cap = float(logits.detach().reshape(-1)[where] / inside.reshape(-1)[where])
    return cap


def reasons_unseen(paths: LinearPaths, contributions: dict[Source, Tensor], value: Tensor) -> list[str]:
    """Why the sources that were found are not all of ``value``, in words; empty if nothing is known to be missing."""
    reasons = []
    label = paths.label_of(value)
    if label is not None:
        reasons.append(f"it is not linear in the residual stream, because of {label}")
        return reasons
    for source, number in contributions.items():
        if source.kind == UNSEEN and bool((number != 0).any()):
            reasons.append(f"what {source.path or 'the model itself'} adds is not linear in the residual stream")
    # The heads of an encoder have no direct path to the logits of its decoder, and none is expected.
    connected = {source.path for source in contributions if source.kind == HEAD}
    stacks = {paths.model_blocks.stack_of(source.path) for source in contributions if source.kind != CONSTANT}
    for path, problem in paths.problems.items():
        if path not in connected and paths.model_blocks.stack_of(path) in stacks:
            reasons.append(f"{path} has no direct path, because {problem}")
    if not reasons and not any(source.kind == TOKENS for source in contributions):
        cut = [source.path for source in contributions if source.kind in (FEED_FORWARD, OTHER)]
        reasons.append(f"no linear path leads to it from the token embedding, only from {list_paths(cut) or 'nothing'}")
    return reasons


def _check_run(model: nn.Module, logits: Tensor, plain: Tensor, softcap: float | None, paths: LinearPaths) -> None:
    """Raise if the run with linear paths gave other logits than the ordinary one, or if they are no logits."""
    logits = logits.detach()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if logits.shape != plain.shape or not bool((logits - plain).abs().max() <= 1e-3 * (1 + plain.abs().max())):
        raise RegardError(f"{type(model).__name__} gives other logits when its linear paths are followed")
    if not paths.has_vocabulary_layer:
        raise RegardError(
            f"{type(model).__name__} has no linear layer outside of its blocks that makes its {plain.shape[-1]} "
            "outputs; they may be vectors, but a model with logits is needed"
        )
