"""``AttentionMonitor``: entropy and largest logit of every head at every step of a training, with warnings."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor, nn

from regard._checks import check_instance, check_integer, check_positive, check_probability
from regard._errors import RegardError
from regard._files import json_safe
from regard._hooks import AttentionCall, Observer
from regard._observables import Observation, Observe
from regard.interp._register_observers import in_backward, matches_layers, observing
from regard.interp._watch import Layers
from regard.training._loop import Listener
from regard.training._recorder import unwrap_model
from regard.training._task import Task


class AttentionWarning(UserWarning):
    """The attention of a model that is being trained saturates: its entropy collapses, or its logits grow.

    >>> import warnings
    >>> warnings.simplefilter("error", AttentionWarning)  # stop the training at the first one
    >>> warnings.simplefilter("default", AttentionWarning)
    """


@dataclass(frozen=True)
class MonitorRecord:
    """The heads at one training step; each value has one number per head, by module path.

    - ``entropy``: the mean over the counted rows, in nats.
    - ``spread``: the mean entropy divided by the mean ln(visible keys): 0 is one key, 1 is all keys alike.
    - ``logit_max``: the largest logit of all rows.

    >>> model = regard.nn.Decoder(8, heads=2, layers=1, vocab=16)
    >>> with AttentionMonitor(model) as monitor:
    ...     logits = model(torch.zeros(1, 5, dtype=torch.int64))
    ...     record = monitor.step(0)
    >>> list(record.logit_max), len(record.spread["blocks.0.attention"])
    (['blocks.0.attention'], 2)
    """

    step: int
    entropy: dict[str, list[float]]
    spread: dict[str, list[float]]
    logit_max: dict[str, list[float]]


class AttentionMonitor(Listener):
    """Measure every head at every step of a training, and warn before the loss shows that attention saturates.

    The heads are measured in the training's own forward passes, by the kernel that computes them: entropy and largest
    logit of each row, of which one mean and one maximum per head remain. Runs in eval mode are not measured.

    - ``model``: the model; the wrappers of DDP and ``torch.compile`` are accepted. None: ``attach`` gives it later.
    - ``file``: a file to which one line of JSON is appended per step; None writes nothing.
    - ``every``: measure every k-th step; the model runs unobserved in the others.
    - ``layers``: only these module paths, as in ``regard.watch``.
    - ``collapse``: a layer's entropy has collapsed if at least half of its heads have a spread below this number.
    - ``logit_limit``, ``logit_growth``: the logits of a layer have grown too far if its largest logit exceeds both
      ``logit_limit`` and ``logit_growth`` times that of the first step.
    - ``keep``: how many records ``records`` holds, the newest ones.

    Each layer causes at most one ``AttentionWarning`` of each kind; ``warned`` holds them as (step, kind, path).
    A compiled model runs without its graphs in the steps that are measured.

    Use it in a training loop, as ``listener=`` of ``regard.training.train``, or as a callback of a Trainer
    (``regard.training.huggingface.MonitorCallback``).

    >>> model = regard.nn.Decoder(8, heads=2, layers=1, vocab=16)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> ids = torch.randint(16, (4, 11))
    >>> with AttentionMonitor(model) as monitor:
    ...     for step in range(3):
    ...         loss = regard.interp._ablation.next_token_loss(model, ids)
    ...         loss.backward()
    ...         optimizer.step()
    ...         record = monitor.step(step)
    >>> record.step, len(record.entropy["blocks.0.attention"]), monitor.warned
    (2, 2, [])
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        file: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        layers: Layers = None,
        collapse: float = 0.02,
        logit_limit: float = 100.0,
        logit_growth: float = 4.0,
        keep: int = 1000,
    ) -> None:
        self.every = check_integer("every", every, least=1)
        self.layers = layers
        self.collapse = check_probability("collapse", collapse)
        self.logit_limit = check_positive("logit_limit", logit_limit)
        self.logit_growth = check_positive("logit_growth", logit_growth)
        self.file = Path(file) if file is not None else None
        self.records: deque[MonitorRecord] = deque(maxlen=check_integer("keep", keep, least=1))
        self.warned: list[tuple[int, str, str]] = []
        self._first_logits: dict[str, float] = {}
        self._observer: _RowSums | None = None
        self._context: ExitStack | None = None
        self._steps = 0
        if model is not None:
            self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Observe a model until ``close``."""
        check_instance("model", model, nn.Module)
        self.close()
        self._observer = _RowSums(unwrap_model(model), self.layers)
        self._steps = 0
        self._observe()

    def close(self) -> None:
        """Stop observing; the records stay."""
        if self._context is not None:
            self._context.close()
        self._context = None
        self._observer = None

    def step(self, step: int) -> MonitorRecord | None:
        """End a training step; return its record, or None if it was not measured."""
        if self._observer is None:
            raise RegardError("this monitor observes no model; give it one, or call attach(model)")
        record = self._observer.take_record(step)
        self._steps += 1
        if self.every > 1:
            self._observe_if_due()
        if record is None:
            return None
        self.records.append(record)
        if self.file is not None:
            line = json.dumps(json_safe(vars(record)))
            with self.file.open("a", encoding="utf-8") as opened:
                opened.write(line + "\n")
        self._check(record)
        return record

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- as a listener of regard.training.train ---

    def on_start(self, task: Task, model: nn.Module, step: int) -> None:
        self.attach(model)

    def on_step(self, step: int, values: dict[str, float]) -> None:
        self.step(step)

    def on_end(self) -> None:
        self.close()

    def _observe(self) -> None:
        assert self._observer is not None
        self._context = ExitStack()
        self._context.enter_context(observing(self._observer))

    def _observe_if_due(self) -> None:
        """Observe the next step if it is due, and leave the model alone if it is not."""
        due = self._steps % self.every == 0
        if due and self._context is None:
            self._observe()
        elif not due and self._context is not None:
            self._context.close()
            self._context = None

    def _check(self, record: MonitorRecord) -> None:
        for path in record.logit_max:
            largest = max(record.logit_max[path])
            first = self._first_logits.setdefault(path, largest)
            # NaN is not larger than anything, and must warn too.
            if not largest <= max(self.logit_limit, self.logit_growth * abs(first)):
                self._warn(
                    *(record.step, "logit growth", path),
                    f"the largest logit of {path or 'the model'} is {largest:.4g}, at the first step it was "
                    f"{first:.4g}: attention saturates; lower the learning rate, or normalise queries and keys",
                )
            spreads = record.spread[path]
            collapsed = [spread for spread in spreads if spread < self.collapse]
            if 2 * len(collapsed) >= len(spreads):
                self._warn(
                    *(record.step, "entropy collapse", path),
                    f"{len(collapsed)} of {len(spreads)} heads of {path or 'the model'} attend to almost one key only: "
                    f"their mean entropy is below {self.collapse:.2%} of the largest possible; lower the learning rate",
                )

    def _warn(self, step: int, kind: str, path: str, text: str) -> None:
        if any(entry[1:] == (kind, path) for entry in self.warned):
            return
        self.warned.append((step, kind, path))
        warnings.warn(f"{kind} at step {step}: {text}", AttentionWarning, stacklevel=4)


class _RowSums(Observer):
    """Sums and maxima of the row values of each head, over the calls of one step."""

    def __init__(self, model: nn.Module, layers: Layers) -> None:
        super().__init__(model)
        self.layers = layers
        # By path: the sums of entropy, ln(visible) and 1 over the counted rows, and the largest logit; [4, H].
        self.sums: dict[str, Tensor] = {}

    def select(self, path: str) -> bool:
        return matches_layers(self.layers, path)

    def before(self, call: AttentionCall) -> Observe | None:
        if not self.model.training:
            return None
        return replace(_ROW_VALUES, queries=call.queries) if call.queries is not None else _ROW_VALUES

    def after(self, call: AttentionCall, out: Tensor, observation: Observation | None) -> Tensor:
        # Gradient checkpointing runs layers a second time.
        if observation is None or in_backward():
            return out
        assert observation.counted is not None and observation.entropy is not None
        assert observation.visible is not None and observation.logit_max is not None
        counted = observation.counted
        values = torch.stack(
            [observation.entropy, observation.visible.clamp(min=1).to(observation.entropy.dtype).log()]
        )
        sums = torch.where(counted, values, 0.0).sum((1, 3))
        # float64 counts any number of rows exactly.
        largest = torch.where(counted, observation.logit_max, -math.inf).amax((0, 2))
        part = torch.cat([sums, counted.sum((0, 2))[None], largest[None]]).double()
        known = self.sums.get(call.path)
        if known is not None:
            part = torch.cat([known[:3] + part[:3], torch.maximum(known[3:], part[3:])])
        self.sums[call.path] = part
        return out

    def take_record(self, step: int) -> MonitorRecord | None:
        """The record of the calls since the last one; None if there were none."""
        if not self.sums:
            return None
        record = MonitorRecord(step, {}, {}, {})
        for path, sums in self.sums.items():
            entropy, possible, rows, largest = sums
            record.entropy[path] = (entropy / rows).tolist()
            # Rows with a single visible key have no entropy to lose.
            record.spread[path] = torch.where(possible > 0, entropy / possible, 1.0).tolist()
            record.logit_max[path] = largest.tolist()
        self.sums = {}
        return record


_ROW_VALUES = Observe()
