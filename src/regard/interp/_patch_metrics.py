"""What patching measures: a loss, a logit, a difference of two logits, or any number of a model's output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_integer, describe_value
from regard._errors import RegardError, RegardTypeError

Ids = int | Sequence[int]  # one for all entries of the batch, or one for each


@dataclass(frozen=True)
class Logit:
    """The logit of one token, a metric for patching; the mean over the batch.

    - ``position``: the row of the logits; negative ones count from the end.
    - ``id``: the token.

    Both may be lists with one number per batch entry.

    >>> model = regard.nn.Decoder(6, heads=3, layers=2, vocab=11).eval()
    >>> ids = torch.tensor([[3, 1, 4]])
    >>> bool(Logit(-1, 7)(model(ids)) == model(ids)[0, -1, 7])
    True
    """

    position: Ids
    id: Ids

    def __call__(self, output: Any) -> Tensor:
        logits = logits_of(output)
        return _chosen(logits, self.position, self.id).mean()

    def __str__(self) -> str:
        return f"logit {self.id} at {self.position}"


@dataclass(frozen=True)
class LogitDifference:
    """The logit of a right token minus that of a wrong one, a metric for patching; the mean over the batch.

    - ``position``: the row of the logits; negative ones count from the end.
    - ``right``, ``wrong``: the tokens.

    Each may be a list with one number per batch entry.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("import os.")])
    >>> right, wrong = model.tokenizer.encode("pz")[-2:]
    >>> LogitDifference(-1, right, wrong)(model(ids)).item() > 0  # os.path
    True
    """

    position: Ids
    right: Ids
    wrong: Ids

    def __call__(self, output: Any) -> Tensor:
        logits = logits_of(output)
        right = _chosen(logits, self.position, self.right)
        return (right - _chosen(logits, self.position, self.wrong)).mean()

    def __str__(self) -> str:
        return f"logit {self.right} − {self.wrong} at {self.position}"


Metric = str | Logit | LogitDifference | Callable[[Any], Any]


def logits_of(output: Any) -> Tensor:
    """The logits ``[B, n, vocabulary]`` in the output of a model."""
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and logits:
        logits = logits[0]
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise RegardError(f"metric needs logits [B, n, vocabulary], but the model returned {describe_value(logits)}")
    return logits


def check_metric(metric: Any) -> Metric:
    """Raise unless this is a metric."""
    if metric == "loss" or (callable(metric) and not isinstance(metric, str | nn.Module)):
        return metric
    raise RegardTypeError(
        "metric must be 'loss', a LogitDifference, a Logit or a function of the model's output, "
        f"got {describe_value(metric)}"
    )


def metric_tensor(metric: Metric, output: Any, inputs: Any) -> Tensor:
    """The metric of an output as a tensor of one element.

    - ``inputs``: what the measured run reads. The loss of any run is that of predicting *its* tokens, so that runs on
      different texts can be compared. If it is a function, the loss is what the function returned.
    """
    if metric == "loss":
        value = output
        if isinstance(inputs, Tensor):
            value = _next_token_loss(output, inputs)
    else:
        assert callable(metric)
        value = metric(output)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=torch.float64)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise RegardTypeError(f"the metric must be one number, got {describe_value(value)}")
    return value.reshape(())


def metric_number(metric: Metric, output: Any, inputs: Any) -> float:
    """The metric of an output as a float."""
    return float(metric_tensor(metric, output, inputs).detach())


def source_number(metric: Metric, output: Any, inputs: Any) -> float | None:
    """The metric of the source's run; None if it cannot be compared.

    That is a loss of which the base run has the targets, on logits of other lengths, or if a function runs the base.
    """
    if metric == "loss":
        logits = getattr(output, "logits", output)
        has_logits = isinstance(logits, Tensor) and logits.ndim == 3
        if has_logits and not (isinstance(inputs, Tensor) and logits.shape[:2] == inputs.shape):
            return None
    return metric_number(metric, output, inputs)


def normalised_effect(before: float, after: float, source: float | None) -> float | None:
    """``(after − before) / (source − before)``: 0 changes nothing, 1 is all of the way. None if it has no value."""
    if source is None or source == before:
        return None
    effect = (after - before) / (source - before)
    return effect if math.isfinite(effect) else None


def describe_metric(metric: Metric) -> str:
    """A metric in words, for titles and files."""
    if isinstance(metric, str | Logit | LogitDifference):
        return str(metric)
    return str(getattr(metric, "__qualname__", type(metric).__name__))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a model in eval mode within the context."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def _next_token_loss(output: Any, ids: Tensor) -> Tensor:
    logits = logits_of(output)
    if ids.is_floating_point():
        raise RegardTypeError(f"the loss needs token ids, got {describe_value(ids)}; give a metric of the output")
    if logits.shape[:2] != ids.shape or ids.shape[1] < 2:
        raise RegardError(
            f"the loss needs logits of every token of ids {list(ids.shape)} with at least 2, got {list(logits.shape)}"
        )
    targets = ids.to(logits.device)[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), targets)


def _chosen(logits: Tensor, position: Ids, id: Ids) -> Tensor:
    """``[B]``: one logit of each batch entry."""
    B, n, vocabulary = logits.shape
    rows = _one_per_entry("position", position, B, -n, n - 1)
    tokens = _one_per_entry("id", id, B, 0, vocabulary - 1)
    # Differences in a low precision would hide small effects.
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return torch.stack([logits[b, rows[b], tokens[b]].to(dtype) for b in range(B)])


def _one_per_entry(name: str, value: Ids, B: int, least: int, most: int) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value] * B
    if len(values) != B:
        raise RegardError(f"{name} must be one number or {B}, one per batch entry, got {len(values)}")
    return [check_integer(name, number, least=least, most=most) for number in values]
