"""The target of an attribution: one number of a model's output, and the model run that computes only what it needs."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard._checks import check_integer, describe_value
from regard._errors import RegardError, RegardTypeError
from regard.interp import huggingface
from regard.interp._ablation import Input, _on_device_of
from regard.models import TextDecoder
from regard.nn import Decoder

Target = int | tuple[int, int] | tuple[int, int, int] | Callable[[Any], Tensor]


@dataclass(frozen=True)
class TokenTarget:
    """A logit at a position, or the difference of two logits there; summed over the batch."""

    position: int
    token: int
    other: int | None = None

    def number(self, logits: Tensor, index: int) -> Tensor:
        """The number from ``logits [B, rows, V]``, of which row ``index`` belongs to the position."""
        for token in (self.token, self.other):
            if token is not None and token >= logits.shape[-1]:
                raise RegardError(f"target names token {token}, but there are {logits.shape[-1]} logits")
        row = logits[:, index]
        number = row[:, self.token]
        if self.other is not None:
            number = number - row[:, self.other]
        return number.sum()


def parse_target(target: Target) -> TokenTarget | Callable[[Any], Tensor]:
    """Check a target. A token id alone is the logit at the last position."""
    if callable(target):
        return target
    numbers = target if isinstance(target, tuple) else (-1, target)
    if len(numbers) not in (2, 3):
        raise RegardTypeError(
            "target must be a token id, (position, id), (position, id, other id), or a function of the model's output, "
            f"got {describe_value(target)}"
        )
    position = check_integer("target position", numbers[0], least=None)
    tokens = [check_integer("target token id", number) for number in numbers[1:]]
    return TokenTarget(position, *tokens)


def run_to_target(model: nn.Module, inputs: Input, target: TokenTarget | Callable[[Any], Tensor]) -> Tensor:
    """Run the model and return the target's number, a tensor without dimensions."""
    if not isinstance(target, TokenTarget):
        value = target(inputs() if callable(inputs) else model(_on_device_of(model, inputs)))
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.is_floating_point():
            raise RegardTypeError(
                f"the target function must return one number as a tensor, got {describe_value(value)}"
            )
        return value.reshape(())
    if callable(inputs):
        return _number_of_output(model, inputs(), target)

    # Without the logits of other positions: in long texts they are most of the memory.
    ids = _on_device_of(model, inputs)
    position = _position(target.position, ids.shape[1])
    if isinstance(model, TextDecoder | Decoder):
        tokens = model.output_head() if isinstance(model, TextDecoder) else model.tokens
        if tokens is not None and tokens.has_head:
            hidden = model.hidden_states(ids)
            assert isinstance(hidden, Tensor)
            return target.number(tokens.logits(hidden[:, position : position + 1]), 0)
    options: dict[str, Any] = {}
    if huggingface.is_pretrained(model):
        names = inspect.signature(model.forward).parameters
        if "logits_to_keep" in names:
            options["logits_to_keep"] = torch.tensor([position], device=ids.device)
        if "use_cache" in names:
            options["use_cache"] = False
    output = model(ids, **options)
    if "logits_to_keep" in options and output.logits.shape[1] == 1:
        return target.number(output.logits, 0)
    return _number_of_output(model, output, target)


def _number_of_output(model: nn.Module, output: Any, target: TokenTarget) -> Tensor:
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple | list) and logits:
        logits = logits[0]
    if isinstance(logits, Tensor) and logits.ndim == 2:
        # A classifier has one row of logits per batch entry.
        logits = logits.unsqueeze(1)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise RegardError(
            f"{type(model).__name__} returns no logits [B, n, vocabulary] or [B, classes], but "
            f"{describe_value(output)}; give a function of its output as the target"
        )
    return target.number(logits, _position(target.position, logits.shape[1]))


def _position(position: int, n: int) -> int:
    if not -n <= position < n:
        raise RegardError(f"target position must be between {-n} and {n - 1}, got {position}")
    return position % n
