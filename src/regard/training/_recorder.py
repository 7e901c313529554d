"""The recorder: measures how every head evolves during training, within a limited share of the training time.

    recorder = Recorder(model, "run/evolution", tokenizer)
    recorder.step(0)
    for step in range(1, steps + 1):
        ...                     # your own training step
        recorder.step(step)
    recorder.finish(steps)

``regard.training.evolution`` reads the folder.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard._checks import check_instance, check_integer
from regard._devices import move_to, preserved_random_state, synchronize
from regard._errors import RegardError
from regard._observables import Observe
from regard.interp._probes import Probe, image_probe, run_model, text_probes
from regard.interp._records import (
    Record,
    list_records,
    read_record,
    remove_record,
    remove_unfinished_records,
    write_record,
)
from regard.models import ImageModel
from regard.parallel._group import Ring
from regard.training._head_measurements import Call, measure_heads
from regard.training._record_schedule import (
    MIN_RECORDS,
    RECENT_COSTS,
    RecordSchedule,
    Steps,
    TimeBudget,
    check_share,
    format_steps,
    read_left_out,
    write_left_out,
)

GIVE_TOKENIZER = "give one: Recorder(model, folder, tokenizer), or RecorderCallback(folder, tokenizer) with a Trainer"


class Recorder:
    """Record all heads of a model at some steps of a training: one small file per step, nothing of size n × n.

    - ``model``: the model; the wrappers of DDP and ``torch.compile`` are accepted.
    - ``folder``: where the records are written. To continue the records of an interrupted training, call
      ``resume_from`` with the step of its checkpoint.
    - ``tokenizer``: encodes the text probes of ``regard.interp.atlas``; ``model.tokenizer`` by default.
    - ``images [B, C, height, width]``, ``grid``: the probe of an image model, and (height, width) of its patches.
    - ``probes``: probes of your own, instead of ``tokenizer`` or ``images``.
    - ``call(model, inputs)``: runs the model on a probe; by default ``model(inputs)``.
    - ``steps``: a list of steps, or a function that says whether to record a step. By default 0, 1, 2, 3, 4, 6, 8, 11,
      16, 23, 32 … (2^(k/2), rounded). Step 0 and the last one are always recorded.
    - ``share``: the largest share of the time since the first call that recording may take, 0.05 by default. A record
      that would exceed it waits for the first later step where it fits, and is left out if the next scheduled step
      comes first. None or 1 disables the limit; 0 leaves only step 0 and the last one.
    - ``min_records``: how many records are made even if they exceed the share, 12 by default. They are spread over the
      scheduled steps if ``total`` is given or ``steps`` is a list. Otherwise they are the first ones, and later one
      more each time the number of steps has doubled.
    - ``total``: the number of steps of the training, if it is known. Then early records need not wait: the limit is a
      share of the expected time of all steps, distributed evenly over the records.
    - ``map``: cells per side of the pooled maps, 32 by default.
    - ``profile``: the largest offset of the profiles, to either side of the query; 16 by default.
    - ``group``: a ``torch.distributed`` group. Every process runs its share of the probes, the sums are added, and the
      first process writes. All processes must make the same calls.

    Recording runs the model in eval mode. It changes no mode, random state, gradient or weight of the training. The
    first record that is left out causes a warning; ``left_out`` lists the scheduled steps of all of them.

    >>> from tempfile import TemporaryDirectory
    >>> from regard.models._tokenizer import ByteTokenizer
    >>> model = regard.nn.Decoder(8, heads=2, layers=1, vocab=256)
    >>> with TemporaryDirectory() as folder:
    ...     recorder = Recorder(model, folder, ByteTokenizer(), share=None)
    ...     recorded = [step for step in range(10) if recorder.step(step)]  # in a training loop, after each step
    ...     recorder.finish(9)
    ...     records = regard.training.evolution(folder)
    >>> recorded, records.steps, records.value("entropy").shape
    ([0, 1, 2, 3, 4, 6, 8], [0, 1, 2, 3, 4, 6, 8, 9], torch.Size([8, 2]))
    """

    def __init__(
        self,
        model: nn.Module,
        folder: str | os.PathLike[str],
        tokenizer: Any = None,
        *,
        probes: Sequence[Probe] | None = None,
        call: Call | None = None,
        images: Tensor | None = None,
        grid: tuple[int, int] | None = None,
        steps: Steps = None,
        share: float | None = 0.05,
        min_records: int = MIN_RECORDS,
        total: int | None = None,
        map: int = 32,
        profile: int = 16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_instance("model", model, nn.Module)
        self.model = unwrap_model(model)
        self.folder = Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise RegardError(f"folder is {self.folder}, which is a file; it must be a folder")
        check_integer("map", map, least=1)
        check_integer("profile", profile)
        self.limit = check_share(share)
        if total is not None:
            check_integer("total", total, least=1)
        self.total = total
        self._observe = Observe(map=map, profile=profile, grid=grid, keep=True)
        self._probes = _choose_probes(self.model, tokenizer, probes, images, grid)
        self._call = run_model if call is None else call
        self._schedule = RecordSchedule(steps, total, min_records)
        self._ring = Ring.from_group(group)
        self._warned = False
        self._budget = TimeBudget(self.limit)
        self._last_recorded = -1
        self._previous_step = -1  # of the last call
        self._record_count = 0
        self._waiting: list[int] = []  # scheduled steps since the last record; their records did not fit
        self._left_out: list[int] = []  # in the first process only
        self._superseded: set[int] = set()  # recorded steps after that of resume_from; in the first process only
        self._open_folder()

    def step(self, step: int) -> bool:
        """Tell the recorder that a step is done (0: before the first one); return whether it was recorded."""
        is_new = self._is_new(step)
        self._budget.on_step(step, perf_counter())
        recorded = False
        if is_new:
            if self._schedule.is_scheduled(step, self._previous_step):
                self._waiting.append(step)
            recorded = self._schedule.is_due(step, self._last_recorded) and self._is_affordable(step)
        if recorded:
            self._record(step)
        elif len(self._waiting) > 1:
            self._warn()
        self._previous_step = step
        return recorded

    def finish(self, step: int) -> None:
        """Record the last step, however long it takes."""
        if self._is_new(step):
            # This record does not count as the late record of a step that waits: that step is left out.
            if self._waiting and self._waiting[-1] < step:
                self._waiting.append(step)
            self._record(step)
        if self.left_out:
            self._warn()

    def resume_from(self, step: int, *, remove: bool = True) -> None:
        """Continue after a step, as if there were no later records: a training resumes from its checkpoint.

        - ``step``: the step of the checkpoint.
        - ``remove``: whether later records are removed now. If not, they stay until ``remove_superseded`` is called or
          a new record replaces them; call it when the training has written its next checkpoint.
        """
        self._open_folder(check_integer("step", step))
        if remove:
            self.remove_superseded()

    def remove_superseded(self) -> None:
        """Remove the records that were left by an earlier training after the step of ``resume_from``."""
        if self._ring.rank:
            return
        for step in self._superseded:
            remove_record(self.folder, step)
        self._superseded.clear()
        if self._left_out != read_left_out(self.folder):
            write_left_out(self.folder, self._left_out)

    @property
    def share(self) -> float:
        """The time spent on recording divided by the time since the first call, over all starts of a run."""
        elapsed = self._budget.elapsed(perf_counter())
        return self._budget.spent / elapsed if elapsed else 0.0

    @property
    def left_out(self) -> list[int]:
        """The scheduled steps whose records were left out to keep to the share, over all starts of a run."""
        # The newest scheduled step may still be recorded a little later.
        return [*self._left_out, *self._waiting[:-1]]

    def _open_folder(self, last_step: int = 2**60) -> None:
        """Continue the records of the folder up to ``last_step``, without later ones; one process reads for all."""
        summary = [-1, 0, 0, 0]  # the last recorded step, the number of records, then spent and elapsed in microseconds
        message = ""
        costs: list[float] = []
        self._left_out = []
        if self._ring.rank == 0:
            try:
                remove_unfinished_records(self.folder)
                files = list_records(self.folder)
                self._superseded = {step for step in files if step > last_step}
                for step in self._superseded:
                    del files[step]
                self._left_out = read_left_out(self.folder, min(last_step, max(files, default=-1)))
                for step in sorted(files)[-RECENT_COSTS:]:
                    record = read_record(files[step])
                    costs.append(record.seconds["cost"])
                    # The record with the longest elapsed time has the times of all; it may be that of an earlier step.
                    times = [round(record.seconds[name] * 1e6) for name in ("spent", "elapsed")]
                    summary = [step, len(files), *max(times, summary[2:], key=lambda pair: pair[1])]
            except (ValueError, OSError) as error:
                summary = [-2, 0, 0, 0]  # tells the other processes that reading failed
                message = str(error)
        # Processes exchange integers only, which is why times are in microseconds.
        if self._ring.size > 1:
            summary = self._ring.gather(summary, self._device())[0]
        if summary[0] == -2:
            raise RegardError(message or f"the records in {self.folder} cannot be read: see the first process")
        self._last_recorded = summary[0]
        self._record_count = summary[1]
        self._previous_step = self._last_recorded
        if last_step < 2**60:
            self._previous_step = last_step
        self._waiting = []
        self._schedule.reset()
        # The time until now belongs to records that no longer count, so the clock starts again at the next call.
        self._budget = TimeBudget(self.limit, summary[2] / 1e6, summary[3] / 1e6, costs)

    def _is_new(self, step: int) -> bool:
        """Whether a step is not recorded yet. The first call starts the clock."""
        if check_integer("step", step) < self._last_recorded:
            raise RegardError(
                f"step is {step}, but {self.folder} has records up to step {self._last_recorded}; "
                "call resume_from(step) to resume from a checkpoint, or give a new folder"
            )
        self._budget.start(perf_counter())
        return step > self._last_recorded

    def _is_affordable(self, step: int) -> bool:
        """Whether a due record is guaranteed or stays within the share; the first process decides for all."""
        if step == 0 or self.limit == 1:
            return True
        guaranteed = self._schedule.is_guaranteed(step, self._last_recorded, self._record_count)
        if guaranteed and self.limit > 0:
            return True
        fits = self._budget.fits(step, perf_counter(), self._schedule)
        if self._ring.size == 1:
            return fits
        return bool(self._ring.gather([int(fits)], self._device())[0][0])

    def _warn(self) -> None:
        """Warn once that records are left out."""
        if self._warned or self._ring.rank:
            return
        self._warned = True
        cost = self._budget.expected_cost()
        reason = f"recording may take {100 * self.limit:.3g}% of the time"
        if cost is not None:
            reason += f", and a record takes {cost:.2g} s"
        # Blame the caller's line, outside of this package.
        level = 2
        while _frame_module(level).startswith("regard."):
            level += 1
        warnings.warn(
            f"no record of {format_steps(self.left_out)}: {reason}; give a larger share for more records",
            stacklevel=level,
        )

    def _record(self, step: int) -> None:
        """Measure the heads and write a record."""
        device = self._device()
        synchronize(device)  # do not count pending training work as recording time
        start = perf_counter()
        with evaluation_mode(self.model, device):
            ranks = {"rank": self._ring.rank, "ranks": self._ring.size}
            sums = measure_heads(self.model, self._probes, self._run_probe, self._observe, **ranks)
        self._add_over_processes(sums.tensors(), device)
        if self._ring.rank == 0:
            tensors, names = sums.means()
            cost = perf_counter() - start
            elapsed = self._budget.elapsed(perf_counter())
            seconds = {"cost": cost, "spent": self._budget.spent + cost, "elapsed": elapsed}
            model = type(self.model).__name__
            layers = tuple(sums.layers.values())
            write_record(self.folder, Record(step, model, layers, tensors, names, seconds, self._observe.grid))
            self._superseded.discard(step)
            # The last waiting step is this one, or one that is recorded late; those before it are left out.
            if len(self._waiting) > 1:
                self._left_out = self.left_out
                write_left_out(self.folder, self._left_out)
        # Measure the cost again, because writing the file takes time too.
        self._budget.add_record(perf_counter() - start)
        self._last_recorded = step
        self._record_count += 1
        self._waiting.clear()
        self._schedule.reset()

    def record_model(self, model: nn.Module, step: int) -> None:
        """Record other weights of the run, for example its best ones, as the record of their step.

        One process calls this, after the end or the stop of the training.
        """
        start = perf_counter()
        with evaluation_mode(model, self._device()):
            sums = measure_heads(model, self._probes, self._run_probe, self._observe)
        tensors, names = sums.means()
        cost = perf_counter() - start
        self._budget.spent += cost
        seconds = {"cost": cost, "spent": self._budget.spent, "elapsed": self._budget.elapsed(perf_counter())}
        layers = tuple(sums.layers.values())
        name = type(self.model).__name__
        write_record(self.folder, Record(step, name, layers, tensors, names, seconds, self._observe.grid))
        self._superseded.discard(step)
        if step in self._waiting:
            self._waiting.remove(step)
        if step in self._left_out:
            self._left_out.remove(step)
            write_left_out(self.folder, self._left_out)

    def _run_probe(self, model: nn.Module, inputs: Tensor) -> Any:
        return self._call(model, inputs.to(self._device()))

    def _add_over_processes(self, sums: list[Tensor], device: torch.device) -> None:
        """Add tensors over the processes, in place, with one message for all of them."""
        if self._ring.size == 1:
            return
        flat = move_to(torch.cat([x.flatten() for x in sums]), device)
        self._ring.sum_over_all(flat)
        totals = flat.cpu().split([x.numel() for x in sums])
        for x, total in zip(sums, totals, strict=True):
            x.copy_(total.reshape(x.shape))

    def _device(self) -> torch.device:
        return next((x.device for x in self.model.parameters()), torch.device("cpu"))


@contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within the context: eval mode, no gradients, seed 0. Afterwards modes and random states are as before."""
    modes = [(module, module.training) for module in model.modules()]
    # A model that draws random numbers even in eval mode draws the same ones at every record.
    with preserved_random_state(device, seed=0), torch.no_grad():
        model.eval()
        try:
            yield
        finally:
            # First call train(), which a module may override; then restore the mode of each module.
            model.train(modes[0][1])
            for module, training in modes:
                module.training = training


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside the wrappers of ``torch.compile`` and of data parallelism."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _frame_module(level: int) -> str:
    """Return the name of the module of a calling function; an empty string if there are fewer callers."""
    try:
        return str(sys._getframe(level).f_globals.get("__name__", ""))
    except ValueError:
        return ""


def _choose_probes(
    model: nn.Module, tokenizer: Any, probes: Sequence[Probe] | None, images: Tensor | None, grid: Any
) -> list[Probe]:
    """Return the user's probes, or one probe of the images, or the text probes of ``atlas``."""
    if sum(x is not None for x in (tokenizer, probes, images)) > 1:
        raise RegardError("tokenizer, probes and images exclude each other; give one of them")
    if probes is not None:
        by_name: dict[str, Probe] = {}
        for probe in probes:
            check_instance("probes", probe, Probe)
            if len(probe.ids):
                by_name[probe.name] = probe
        if not probes or len(by_name) < len(probes):
            raise RegardError("probes must be one or more with different names, each with at least one text")
        return list(probes)
    if (images is None) != (grid is None):
        raise RegardError("images and grid must be given together; grid is (height, width) of the patches")
    if images is not None:
        if images.ndim != 4 or not len(images):
            raise RegardError(f"images has shape {list(images.shape)}; it must be [batch, channels, height, width]")
        return [image_probe(images)]
    if isinstance(model, ImageModel) or getattr(model, "main_input_name", "") == "pixel_values":
        raise RegardError(f"{type(model).__name__} is an image model; give images=… and grid=(height, width)")
    if tokenizer is None:
        tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None or isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
        raise RegardError(f"{type(model).__name__} has no tokenizer with an encode method; {GIVE_TOKENIZER}")
    return list(text_probes(model, tokenizer).probes)
