"""Ablate heads: run a model without some of its heads, and measure how much its loss grows.

The output of a head before W_O, ``out [*B, n, E]``, is replaced by 0 or by its mean over the rows of a reference input.
Mean ablation removes what differs between rows and keeps the constant part; zero ablation removes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._checks import check_instance, describe_value
from regard._devices import widest
from regard._errors import RegardError, RegardTypeError
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation, Observe
from regard.interp._register_observers import NO_VISIBLE_ATTENTION, Head, HeadSelection, count_forwards, observing

Input = Tensor | Callable[[], Any]
MOST_NAMED = 8  # heads that the text of an ablation names


@dataclass(frozen=True)
class LossChange:
    """The loss with all heads (``before``) and without the ablated ones (``after``).

    >>> print(LossChange(before=1.5, after=2.25))
    loss 1.5000 → 2.2500 (+0.7500)
    """

    before: float
    after: float

    @property
    def change(self) -> float:
        """``after − before``: how much the loss grows without the heads."""
        return self.after - self.before

    def __str__(self) -> str:
        return f"loss {self.before:.4f} → {self.after:.4f} ({self.change:+.4f})"


def ablate(
    model: nn.Module, heads: Iterable[Head], *, by: Literal["zero", "mean"] = "zero", over: Input | None = None
) -> Ablation:
    """Ablate heads of a model: ``with ablate(model, [(3, 0)]): …`` or ``ablate(model, [(3, 0)]).loss_change(ids)``.

    - ``model``: any model that ``regard.watch`` takes.
    - ``heads``: pairs ``(layer, head)``; a layer is a module path or its number in the order of the attention calls.
    - ``by``: replace the output of a head by 0 (``"zero"``) or by its mean (``"mean"``).
    - ``over``: the input of the means, token ids or a function that runs the model; ``loss_change`` uses its own input
      by default.

    Returns an ``Ablation``. At the end of its context it raises ``RegardError`` if a layer of ``heads`` was not called.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.tokenizer.encode("Return the number of items in a list. " * 2)])
    >>> loss = ablate(model, [(1, 0)]).loss_change(ids)  # without the previous-token head
    >>> round(loss.before, 1), round(loss.after, 1)
    (1.5, 2.4)
    """
    return Ablation(model, heads, by, over)


class Ablation:
    """Heads of a model that are ablated within the context; it can be entered several times. ``ablate`` makes it.

    >>> model = regard.nn.MultiHeadAttention(6, heads=1, out_bias=False)
    >>> ablation, x = ablate(model, [("", 0)]), torch.randn(1, 5, 6)
    >>> with ablation:
    ...     print(model(x).abs().max().item())  # its only head gives 0
    0.0
    >>> ablation
    Ablation of 1 head of MultiHeadAttention, by zero: ('', 0)
    """

    def __init__(self, model: nn.Module, heads: Iterable[Head], by: str, over: Input | None) -> None:
        check_instance("model", model, nn.Module)
        if by not in ("zero", "mean"):
            raise RegardError(f"by must be 'zero' or 'mean', got {by!r}")
        if over is not None and by == "zero":
            raise RegardError("over is the input of the means, but by='zero' uses no means; leave over out")
        self.model = model
        self.heads = HeadSelection(heads)
        self.by = by
        self.over = over
        self._contexts: list[ExitStack] = []

    def __repr__(self) -> str:
        pairs = [f"({layer!r}, {head})" for layer, head in self.heads.pairs]
        if len(pairs) > MOST_NAMED:
            pairs = [*pairs[:MOST_NAMED], "…"]
        count = f"{len(self.heads.pairs)} head{'s' if len(self.heads.pairs) > 1 else ''}"
        return f"Ablation of {count} of {type(self.model).__name__}, by {self.by}: {', '.join(pairs)}"

    def __enter__(self) -> Ablation:
        if self.by == "mean" and self.over is None:
            raise RegardError("by='mean' needs over=: token ids, or a function that runs the model")
        context = ExitStack()
        context.enter_context(self._ablated(self.over))
        self._contexts.append(context)
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    @torch.no_grad()
    def loss_change(self, inputs: Input) -> LossChange:
        """The loss with all heads and without the ablated ones, in eval mode.

        - ``inputs``: token ids ``[B, n]``, for the next-token cross-entropy, or a function that returns a loss.
        """
        training = self.model.training
        self.model.eval()
        try:
            # Both runs use regard's kernels, so that only the heads differ.
            with observing(Observer(self.model)):
                before = _loss(self.model, inputs)
            with self._ablated(self.over if self.over is not None else inputs) as ablator:
                after = _loss(self.model, inputs)
        finally:
            self.model.train(training)
        if not ablator.reached:
            raise RegardError(f"{type(self.model).__name__} {NO_VISIBLE_ATTENTION}")
        return LossChange(before, after)

    @contextmanager
    def _ablated(self, over: Input | None) -> Iterator[_Ablator]:
        # The means are measured first, in a run of their own with all heads.
        means = None
        if self.by == "mean":
            assert over is not None
            averages = _MeanOutputs(self.model)
            with torch.no_grad(), observing(averages):
                if callable(over):
                    over()
                else:
                    self.model(_on_device_of(self.model, over))
            means = averages.means()
        ablator = _Ablator(self.model, self.heads, means)
        with observing(ablator), count_forwards(self.model) as forwards:
            yield ablator
        if forwards[0] and not ablator.reached:
            raise RegardError(f"{type(self.model).__name__} {NO_VISIBLE_ATTENTION}; nothing was ablated")
        for path in ablator.unseen:
            if path in ablator.reached and self.heads.at(path, ablator.reached[path]):
                raise RegardError(
                    f"{path!r} also computes attention that regard does not recognise, so its heads were "
                    "ablated only partly"
                )
        self.heads.check(ablator.reached)


class _Ablator(Observer):
    """Replaces the output of the selected heads by 0 or by a mean."""

    def __init__(self, model: nn.Module, heads: HeadSelection, means: dict[str, Tensor] | None) -> None:
        super().__init__(model)
        self.heads = heads
        self.means = means

    def replaces(self, path: str, number: int) -> bool:
        return bool(self.heads.at(path, number))

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        heads = self.heads.at(call.path, call.number)
        if not heads:
            return out
        H = out.shape[-3]
        if max(heads) >= H:
            raise RegardError(f"heads names head {max(heads)} of {call.path!r}, which has heads 0 … {H - 1}")

        # Select with ``where``, do not multiply by 0: the output may hold NaN.
        ablated = torch.zeros(H, 1, 1, dtype=torch.bool, device=out.device)
        ablated[list(heads)] = True
        replacement = torch.zeros((), dtype=out.dtype, device=out.device)
        if self.means is not None:
            if call.path not in self.means:
                raise RegardError(f"over never reached {call.path}, so there is no mean for its heads")
            replacement = self.means[call.path].to(out.dtype).unsqueeze(-2)
        return torch.where(ablated, replacement, out)


class _MeanOutputs(Observer):
    """Averages the output of every head over the counted rows (real queries that see at least one key)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sums: dict[str, Tensor] = {}  # [H, E] by path
        self._counts: dict[str, Tensor] = {}  # [H] by path

    def before(self, call: AttentionCall) -> Observe:
        return Observe(queries=call.queries)

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        assert observation is not None and observation.counted is not None
        counted_BHN = observation.counted
        out_BHNE = widest(out.reshape(-1, *out.shape[-3:]))
        total = torch.where(counted_BHN.unsqueeze(-1), out_BHNE, 0.0).sum((0, 2))
        self._sums[call.path] = self._sums.get(call.path, 0.0) + total
        self._counts[call.path] = self._counts.get(call.path, 0.0) + counted_BHN.sum((0, 2))
        return out

    def means(self) -> dict[str, Tensor]:
        """``[H, E]`` by module path."""
        return {path: total / self._counts[path].clamp(min=1).unsqueeze(-1) for path, total in self._sums.items()}


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each token of ``ids [B, n]`` given the tokens before it.

    >>> model = regard.models.load(regard.models.bundled())
    >>> once, twice = (torch.tensor([model.tokenizer.encode("Return the number of items. " * i)]) for i in (1, 2))
    >>> bool(next_token_loss(model, twice) < next_token_loss(model, once))  # a repetition is easier to predict
    True
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        raise RegardError(f"ids must be whole numbers [B, n] with n ≥ 2, got {describe_value(ids)}")
    # Ids are often made on the CPU, while the model may be on another device.
    ids = _on_device_of(model, ids)
    result = model(ids)
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise RegardError(
            f"{type(model).__name__} returns no logits [B, n, vocabulary] for ids; give a function that returns a loss"
        )
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _on_device_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """``inputs`` on the device of the model's first parameter."""
    parameter = next(model.parameters(), None)
    return inputs if parameter is None else inputs.to(parameter.device)


def _loss(model: nn.Module, inputs: Input) -> float:
    if callable(inputs):
        loss = inputs()
    else:
        loss = next_token_loss(model, inputs)
    if not isinstance(loss, int | float | Tensor) or (isinstance(loss, Tensor) and loss.numel() != 1):
        raise RegardTypeError(f"the function must return one number, the loss, got {describe_value(loss)}")
    return float(loss)
