"""The loop: learn, evaluate, watch, save; and go on after whatever stopped it.

The examples and the random numbers of a step are functions of the recipe and the step, so that weights, the optimizer's
memory and the number of the step are all that a run must remember. Stopped at any moment and started again, it ends
with the same weights, bit for bit (in one process, on one machine, with as many threads).
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from regard.training.checkpoints import Checkpoints
from regard.training.folder import RunFolder
from regard.training.metrics import Metrics
from regard.training.optimizer import adamw, moments, put, remember, weights, whole
from regard.training.processes import Processes
from regard.training.recorder import Recorder
from regard.training.schedule import rate
from regard.training.stopping import Stopping
from regard.training.task import Batch, Task, drawn

__all__ = ["Listener", "Loop", "State"]

# What random numbers are for: apart, so that no two purposes share any.
WEIGHTS, LEARNING = 1, 2


class Listener:
    """Whom a run tells what it does; this one says nothing. Only the first process tells.

    >>> class Losses(Listener):
    ...     def learned(self, step, numbers):
    ...         print(step, sorted(numbers))
    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = regard.training.train("repeats", f"{folder}/run", small, listener=Losses())
    1 ['loss', 'norm', 'predictions', 'rate']
    2 ['loss', 'norm', 'predictions', 'rate']
    """

    def began(self, task: Task, model: nn.Module, step: int) -> None:
        """A run begins, or goes on from a step."""

    def learned(self, step: int, numbers: dict[str, float]) -> None:
        """A step was done: ``loss``, ``rate``, ``norm`` of the gradient, ``predictions`` a second."""

    def scored(self, step: int, scores: dict[str, float], best: bool) -> None:
        """The held-out examples were looked at."""

    def saved(self, step: int) -> None:
        """A checkpoint was written."""

    def recorded(self, step: int) -> None:
        """The heads were watched."""

    def stopping(self) -> None:
        """Somebody asked to stop: after this step, and its checkpoint."""


@dataclass
class State:
    """What a run knows of itself beside its weights; written into every checkpoint."""

    step: int = 0
    best: dict[str, Any] | None = None  # {"step": …, "scores": {…}}
    last: dict[str, float] = field(default_factory=dict)  # the newest held-out numbers
    waited: int = 0  # evaluations since the best one
    seconds: float = 0.0


class Loop:
    """One run in its folder, from where it stands to its end."""

    def __init__(self, task: Task, folder: RunFolder, processes: Processes, listener: Listener) -> None:
        self.task, self.recipe, self.processes, self.listener = task, folder.recipe, processes, listener
        self.path, self.checkpoints = folder.path, Checkpoints(folder.path / "checkpoints")
        pieces = self.recipe.batch // self.recipe.accumulate
        if pieces < processes.world:
            raise ValueError(
                f"a batch of {self.recipe.batch} in {self.recipe.accumulate} pieces is {pieces} examples a piece, "
                f"fewer than the {processes.world} processes; make batch larger or accumulate smaller"
            )
        torch.manual_seed(drawn(self.recipe.seed, WEIGHTS).initial_seed())
        self.model = task.model().train()
        found = self.checkpoints.newest()
        processes.wait()  # all have read it before the first one removes what is later
        if processes.first:
            self.checkpoints.back_to(0 if found is None else int(found.state["step"]))
        self.state = State() if found is None else State(**{k: found.state[k] for k in vars(State())})
        if found is not None:
            put(self.model, found.weights)
        self.called = processes.spread(self.model, self.recipe.parallel)
        self.optimizer = adamw(self.model, self.recipe)
        if found is not None:
            remember(self.model, self.optimizer, found.moments)
        self.checks = list(task.checks())
        self.recorder = self._recorder()
        self.began = time.perf_counter()

    @property
    def ended(self) -> str | None:
        """Why there is nothing left to do: all ``steps`` are done, or ``patience`` is at its end."""
        if self.recipe.patience and self.state.waited >= self.recipe.patience:
            return "patience"
        return "steps" if self.state.step >= self.recipe.steps else None

    def run(self) -> str:
        """Go to the end, or until somebody asks to stop; says which: ``steps``, ``patience`` or ``stopped``."""
        if self.ended is None and not self._go_on():
            return "stopped"
        assert self.ended is not None
        if self.recorder is not None:
            with Stopping():  # also where a run ended before it came to this: what is recorded ends with the run
                self.recorder.finish(self.state.step)
        return self.ended

    def _go_on(self) -> bool:
        """Step by step to the end, or, False, until somebody asks to stop."""
        listener = self.listener if self.processes.first else Listener()
        listener.began(self.task, self.model, self.state.step)
        if self.recorder is not None and self.state.step == 0 and self.recorder.step(0):
            listener.recorded(0)
        with self._metrics() as metrics, Stopping() as stopping:
            while self.ended is None:
                numbers, stop = self._learn(stopping.asked)
                if stop:
                    listener.stopping()
                done = self.state.step
                metrics.write(done, numbers)
                listener.learned(done, numbers)
                if self.recorder is not None and self.recorder.step(done):
                    listener.recorded(done)
                better = False
                if done % self.recipe.evaluate == 0 or done == self.recipe.steps:
                    better = self._evaluate()
                    metrics.write(done, self.state.last, held_out=True)
                    listener.scored(done, self.state.last, better)
                if better or stop or done % self.recipe.save == 0 or self.ended is not None:
                    metrics.flush()
                    self._save()
                    listener.saved(done)
                if stop and self.ended is None:
                    return False
        return True

    def _learn(self, asked: bool) -> tuple[dict[str, float], bool]:
        """One step; and whether any process was asked to stop."""
        recipe, step, world = self.recipe, self.state.step, self.processes.world
        began = time.perf_counter()
        batch = self.task.batch(step)
        total = self.task.count(batch)
        loss = 0.0
        for k, piece in enumerate(_cut(batch, recipe.accumulate)):
            part, weight = self.processes.part(piece)
            torch.manual_seed(drawn(recipe.seed, LEARNING, step, k, self.processes.rank).initial_seed())
            with self.processes.exchanging(self.called, k == recipe.accumulate - 1):
                with self._precision():
                    summed = self.task.loss(self.called, part)
                # Gradients are averaged over processes; the loss is one mean over all predictions.
                (summed * (weight * world / total)).backward()
            loss += float(summed.detach()) / total if weight else 0.0
        norm = _norm(self.model, recipe.clip)
        eta = rate(recipe, step)
        for group in self.optimizer.param_groups:
            group["lr"] = eta
        sums = self.processes.added({"loss": loss, "asked": float(asked)})
        if not math.isfinite(sums["loss"]) or not math.isfinite(norm):
            raise RuntimeError(
                f"the loss is {sums['loss']} and the gradient's norm {norm} at step {step}: this run does not learn; "
                f"a smaller rate than {recipe.rate:g} or a longer warmup may"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        speed = total / (time.perf_counter() - began)
        numbers = {"loss": sums["loss"], "rate": eta, "norm": norm, "predictions": speed}
        return numbers, sums["asked"] > 0

    def _evaluate(self) -> bool:
        """Take the held-out score, and say whether it is the best so far."""
        sums: dict[str, float] = {}
        self.model.eval()
        with torch.no_grad(), self._precision():
            for batch in self.checks:
                part, weight = self.processes.part(batch)
                for name, value in self.task.check(self.model, part).items():
                    sums[name] = sums.get(name, 0.0) + (value if weight else 0.0)
        self.model.train()
        state, name = self.state, self.task.score
        state.last = self.task.scores(self.processes.added(sums))
        wrong = [f"{x} is {value}" for x, value in state.last.items() if not math.isfinite(value)]
        if wrong:
            raise RuntimeError(f"the held-out {wrong[0]} at step {state.step}: this run does not learn")
        before = None if state.best is None else state.best["scores"][name]
        now = state.last[name]
        better = before is None or (now > before if self.task.higher else now < before)
        state.waited = 0 if better else state.waited + 1
        if better:
            state.best = {"step": state.step, "scores": dict(state.last)}
        return better

    def _save(self) -> None:
        state = self.state
        now = time.perf_counter()
        state.seconds, self.began = state.seconds + now - self.began, now
        # Every process gives its share. Weights first: asking for them shards a model again that FSDP has put together
        # for the evaluation, and what AdamW remembers is of the shards.
        kept = weights(self.model)
        remembered = moments(self.model, self.optimizer)
        if self.processes.first:
            self.checkpoints.write(vars(state), kept, remembered)
            self.checkpoints.keep(self.recipe.keep, None if state.best is None else state.best["step"])
        self.processes.wait()  # nobody goes on from a step that is not written

    def _precision(self) -> Any:
        if self.recipe.precision == "float32":
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16)

    def _recorder(self) -> Recorder | None:
        probes = self.task.probes()
        if self.recipe.record == 0 or not probes:
            return None
        every = self.recipe.record_every
        recorder = Recorder(
            self.model,
            self.path / "evolution",
            probes=probes,
            call=self.task.ask,
            grid=self.task.grid,
            steps=range(0, self.recipe.steps + 1, every) if every else None,
            share=self.recipe.record,
            total=self.recipe.steps,
        )
        recorder.back_to(self.state.step)
        return recorder

    @contextmanager
    def _metrics(self) -> Iterator[Any]:
        if not self.processes.first:
            yield _Silent()
            return
        metrics = Metrics(self.path, self.state.step)
        try:
            yield metrics
        except BaseException:
            with suppress(OSError):  # what went wrong first is what is told
                metrics.close()
            raise
        metrics.close()


class _Silent:
    """What the other processes write: nothing."""

    def write(self, *_: Any, **__: Any) -> None:
        pass

    def flush(self) -> None:
        pass


def _cut(batch: Batch, pieces: int) -> Iterator[Batch]:
    """A batch in pieces of as many examples each."""
    many = len(next(iter(batch.values()))) // pieces
    for k in range(pieces):
        yield {name: x[k * many : (k + 1) * many] for name, x in batch.items()}


def _norm(model: nn.Module, clip: float) -> float:
    """The norm of the whole gradient, which is then scaled down to ``clip`` where it is larger."""
    return float(whole(clip_grad_norm_(model.parameters(), clip if clip > 0 else math.inf)))
