"""The training loop: learn, evaluate, record, save, and resume from the last checkpoint.

The examples and the random numbers of a step depend only on the recipe and the step. A run therefore has to store only
its weights, the optimizer's state and the number of the step. If it is stopped at any moment and started again, it ends
with the same weights, bit for bit (in one process, on one machine, with the same number of threads).
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

from regard._errors import RegardError
from regard.training import _optimizer
from regard.training._checkpoints import Checkpoints
from regard.training._metrics_file import Metrics, check_metrics_size
from regard.training._processes import Processes
from regard.training._record_schedule import steps_with_interval
from regard.training._recorder import Recorder
from regard.training._run_folder import RunFolder
from regard.training._stop_signals import StopSignals
from regard.training._task import Batch, Task, seeded_generator, slice_batch

# Stream ids for seeded_generator: each purpose uses different random numbers.
INITIAL_WEIGHTS = 1
LEARNING = 2


class Listener:
    """Base class of listeners to a run: override the methods you need. Only the first process calls them.

    >>> class Losses(Listener):
    ...     def on_step(self, step, values):
    ...         print(step, sorted(values))
    >>> from tempfile import TemporaryDirectory
    >>> small = {"steps": 2, "warmup": 1, "batch": 4, "record": 0, "model.d": 8, "data.checks": 4}
    >>> with TemporaryDirectory() as folder:
    ...     result = regard.training.train("repeats", f"{folder}/run", small, listener=Losses())
    1 ['loss', 'norm', 'predictions', 'rate']
    2 ['loss', 'norm', 'predictions', 'rate']
    """

    def on_start(self, task: Task, model: nn.Module, step: int) -> None:
        """A run starts, or resumes at ``step``."""

    def on_step(self, step: int, values: dict[str, float]) -> None:
        """A step was done: its ``loss``, ``rate``, gradient ``norm`` and ``predictions`` per second."""

    def on_evaluation(self, step: int, scores: dict[str, float], best: bool) -> None:
        """The held-out examples were evaluated; ``best``: whether the score is the best so far."""

    def on_checkpoint(self, step: int) -> None:
        """A checkpoint was written."""

    def on_record(self, step: int) -> None:
        """The heads were recorded."""

    def on_stop(self) -> None:
        """A stop was requested: the run ends after this step and its checkpoint."""

    def on_end(self) -> None:
        """The steps of this start are over: the run has ended, was stopped, or raised."""


@dataclass
class State:
    """The numbers of a run besides its weights; every checkpoint contains them."""

    step: int = 0
    best: dict[str, Any] | None = None  # {"step": …, "scores": {…}}
    last: dict[str, float] = field(default_factory=dict)  # the newest held-out scores
    waited: int = 0  # evaluations since the score improved; a lower loss at an equal score does not reset it
    seconds: float = 0.0


class Loop:
    """One run in its folder, from its current step to its end."""

    def __init__(self, task: Task, folder: RunFolder, processes: Processes, listener: Listener | None) -> None:
        self.task = task
        self.recipe = folder.recipe
        self.processes = processes
        # Only the first process reports, so the others get a listener that does nothing.
        self.listener = Listener()
        if listener is not None and processes.is_first:
            self.listener = listener
        self.path = folder.path
        self.checkpoints = Checkpoints(folder.path / "checkpoints")
        piece = self.recipe.batch // self.recipe.accumulate
        if piece < processes.world_size:
            sizes = f"batch is {self.recipe.batch} and accumulate {self.recipe.accumulate}, so {piece} per piece"
            raise RegardError(f"{sizes}; a piece must have an example for each of {processes.world_size} processes")
        torch.manual_seed(seeded_generator(self.recipe.seed, INITIAL_WEIGHTS).initial_seed())
        self.model = task.model().train()
        checkpoint = self.checkpoints.read_newest()
        self.state = State()
        if checkpoint is not None:
            self.state = State(**{name: checkpoint.state[name] for name in vars(State())})
            best = self.state.best
            if best is not None and task.score not in best["scores"]:
                raise RegardError(f"the checkpoint of step {self.state.step} lacks {task.score} in its best scores")
            _optimizer.load_weights(self.model, checkpoint.weights)

        # All processes must have read the same checkpoint; the folder might not be shared between machines.
        processes.agree({"step of the checkpoint": self.state.step})
        self.training_model = processes.wrap(self.model, self.recipe.parallel)
        self.optimizer = _optimizer.create_optimizer(self.model, self.recipe)
        if checkpoint is not None:
            _optimizer.load_optimizer_state(self.model, self.optimizer, checkpoint.optimizer_state)
        # Checkpoints that could not be read. They stay until a new one is written: if this run fails before that, for
        # example because the older checkpoint is damaged too, nothing is lost.
        self.superseded: list[int] = []
        if processes.is_first:
            check_metrics_size(self.path / "metrics.jsonl")
            self.checkpoints.remove_unfinished()
            self.superseded = [step for step in self.checkpoints.steps() if step > self.state.step]
        self.held_out_batches = list(task.held_out_batches())
        self.recorder = self._create_recorder()
        self.clock = time.perf_counter()

    @property
    def ended(self) -> str | None:
        """Why the run has ended: "patience" or "steps"; None if it has not."""
        if self.recipe.patience and self.state.waited >= self.recipe.patience:
            return "patience"
        return "steps" if self.state.step >= self.recipe.steps else None

    def run(self) -> str:
        """Train to the end or until a stop is requested; return "steps", "patience" or "stopped"."""
        if self.ended is None:
            try:
                completed = self._train()
            finally:
                self.listener.on_end()
            if not completed:
                return "stopped"
        assert self.ended is not None
        if self.recorder is not None:
            # Also completes a run that was stopped before its last record. A stop signal waits until that is written.
            with StopSignals():
                self.recorder.finish(self.state.step)
        return self.ended

    def _train(self) -> bool:
        """Do the remaining steps; return False if a stop was requested before the end."""
        self.listener.on_start(self.task, self.model, self.state.step)
        if self.state.step == 0:
            self._record()
        with self._open_metrics() as metrics, StopSignals() as signals:
            while self.ended is None:
                values, stop = self._learn(signals.requested)
                if stop:
                    self.listener.on_stop()
                step = self.state.step
                metrics.write(step, values)
                self.listener.on_step(step, values)
                self._record()

                better = False
                if step % self.recipe.evaluate == 0 or step == self.recipe.steps:
                    better = self._evaluate()
                    metrics.write(step, self.state.last, held_out=True)
                    self.listener.on_evaluation(step, self.state.last, better)
                if better or stop or step % self.recipe.save == 0 or self.ended is not None:
                    metrics.flush()
                    self._save()
                    self.listener.on_checkpoint(step)
                if stop and self.ended is None:
                    return False
        return True

    def _learn(self, stop_requested: bool) -> tuple[dict[str, float], bool]:
        """Do one step; return its values, and whether a stop was requested in any process."""
        recipe = self.recipe
        step = self.state.step
        start = time.perf_counter()
        batch = self.task.batch(step)
        total = self.task.count_predictions(batch)
        loss = 0.0
        for k, piece in enumerate(_split(batch, recipe.accumulate)):
            part, weight = self.processes.select(piece)
            generator = seeded_generator(recipe.seed, LEARNING, step, k, self.processes.rank)
            torch.manual_seed(generator.initial_seed())
            with self.processes.gradient_sync(self.training_model, k == recipe.accumulate - 1):
                with self._autocast():
                    summed = self.task.loss(self.training_model, part)
                # The loss is the mean over all predictions. DDP and FSDP average gradients, so multiply by world_size.
                (summed * (weight * self.processes.world_size / total)).backward()
            if weight:
                loss += float(summed.detach()) / total

        # The reported norm is the one before clipping.
        limit = recipe.clip if recipe.clip > 0 else math.inf
        norm = float(_optimizer.full_tensor(clip_grad_norm_(self.model.parameters(), limit)))
        rate = _optimizer.learning_rate(recipe, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = self.processes.sum_over_all({"loss": loss, "stop": float(stop_requested)})
        if not math.isfinite(sums["loss"]) or not math.isfinite(norm):
            raise RuntimeError(
                f"the loss is {sums['loss']} and the gradient's norm {norm} at step {step}: the run diverged; "
                f"use a rate below {recipe.rate:g} or a longer warmup"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.state.step += 1
        speed = total / (time.perf_counter() - start)
        values = {"loss": sums["loss"], "rate": rate, "norm": norm, "predictions": speed}
        return values, sums["stop"] > 0

    def _evaluate(self) -> bool:
        """Compute the held-out scores; return whether these weights are the best so far."""
        sums: dict[str, float] = {}
        self.model.eval()
        with torch.no_grad(), self._autocast():
            for batch in self.held_out_batches:
                part, weight = self.processes.select(batch)
                for name, value in self.task.evaluate_batch(self.model, part).items():
                    sums.setdefault(name, 0.0)
                    # A process without an example computed one only because FSDP needs every process: skip it.
                    if weight:
                        sums[name] += value
        self.model.train()

        state = self.state
        state.last = self.task.scores(self.processes.sum_over_all(sums))
        for name, value in state.last.items():
            if not math.isfinite(value):
                raise RuntimeError(f"the held-out {name} is {value} at step {state.step}: the run diverged")
        score = state.last[self.task.score]
        better = True
        # Accuracies are often equal, for example at the start or when they reach 1. Then the lower loss decides which
        # weights are the best. It does not reset the patience, which waits for a better score.
        lower_loss = False
        if state.best is not None:
            best_score = state.best["scores"][self.task.score]
            better = score > best_score if self.task.higher_is_better else score < best_score
            if score == best_score and "loss" in state.last:
                lower_loss = state.last["loss"] < state.best["scores"].get("loss", -math.inf)
        if better or lower_loss:
            state.best = {"step": state.step, "scores": dict(state.last)}
        state.waited = 0 if better else state.waited + 1
        return better or lower_loss

    def _save(self) -> None:
        """Write a checkpoint; every process contributes its share of the tensors."""
        state = self.state
        now = time.perf_counter()
        state.seconds = state.seconds + now - self.clock
        self.clock = now
        # Read the weights first. FSDP had gathered the model for the evaluation; reading the weights shards it again,
        # and the optimizer's state needs the shards.
        weights = _optimizer.weight_tensors(self.model)
        moments = _optimizer.optimizer_state(self.model, self.optimizer)
        if self.processes.is_first:
            self.checkpoints.write(vars(state), weights, moments)
            self._remove_superseded()
            best_step = None if state.best is None else state.best["step"]
            self.checkpoints.remove_old(self.recipe.keep, best_step)
        # No process may continue from a step that is not written yet.
        self.processes.wait()

    def _remove_superseded(self) -> None:
        """Remove the checkpoints and records that an earlier start wrote after the step from which this run resumed."""
        self.checkpoints.remove(step for step in self.superseded if step != self.state.step)
        self.superseded = []
        if self.recorder is not None:
            self.recorder.remove_superseded()

    def _record(self) -> None:
        if self.recorder is not None and self.recorder.step(self.state.step):
            self.listener.on_record(self.state.step)

    def _autocast(self) -> Any:
        if self.recipe.precision == "float32":
            return nullcontext()
        return torch.autocast("cpu", torch.bfloat16)

    def _create_recorder(self) -> Recorder | None:
        probes = self.task.probes()
        if self.recipe.record == 0 or not probes:
            return None
        recorder = Recorder(
            self.model,
            self.path / "evolution",
            probes=probes,
            call=self.task.run_probe,
            grid=self.task.grid,
            steps=steps_with_interval(self.recipe.steps, self.recipe.record_every),
            share=self.recipe.record,
            total=self.recipe.steps,
        )
        recorder.resume_from(self.state.step, remove=False)
        return recorder

    @contextmanager
    def _open_metrics(self) -> Iterator[Any]:
        if not self.processes.is_first:
            yield _NoMetrics()
            return
        metrics = Metrics(self.path, self.state.step)
        try:
            yield metrics
        except BaseException:
            # The first error is the one to report, not a second one from closing the file.
            with suppress(OSError):
                metrics.close()
            raise
        metrics.close()


class _NoMetrics:
    """The metrics of all processes but the first: nothing is written."""

    def write(self, *_: Any, **__: Any) -> None:
        pass

    def flush(self) -> None:
        pass


def _split(batch: Batch, pieces: int) -> Iterator[Batch]:
    """Split a batch into pieces of equal size."""
    size = len(next(iter(batch.values()))) // pieces
    for k in range(pieces):
        yield slice_batch(batch, slice(k * size, (k + 1) * size))
