"""The recorder: how every head evolves while a model learns, in a share of the time that the user sets.

    recorder = Recorder(model, "run/evolution", tokenizer)
    recorder.step(0)
    for step in range(1, steps + 1):
        ...                     # the user's own step
        recorder.step(step)
    recorder.finish(steps)

``regard.training.evolution`` opens the folder.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.models import ImageModel
from regard.observables import Observe
from regard.positions.common import check_kind
from regard.shapes import integer
from regard.training import records
from regard.training.measured import Call, measure
from regard.training.ring import Ring
from regard.watching.heads import run, vocabulary
from regard.watching.probes import Probe, Reader, natural, repeated

__all__ = ["Recorder"]

Steps = Callable[[int], bool] | Sequence[int] | None
TOKENS, BLOCK, TIMES, TEXTS = 256, 48, 3, 2  # of the probes, as in ``atlas``


class Recorder:
    """Records what all heads do at some steps of a training: one small file a step, nothing of size n × n.

    - ``probes`` are those of ``regard.watching.heads.atlas``: natural, repeated and random text, made with
      ``tokenizer`` (the model's own, ``model.text``, unless given); ``images [B, C, height, width]`` with ``grid``,
      (height, width) of the patches; or ``probes=`` of your own. ``call(model, inputs)`` runs the model on one, where
      ``model(inputs)`` is not how.
    - ``steps``: 0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32 … (2^(k/2), rounded) unless given: a list, or a function of a step.
      0 and the last one are always recorded.
    - ``share``: a record waits as long as it would bring the time spent on recording above this share of the time
      since the first call, and is taken at the first later step where it fits; None or 1 never waits.
    - ``total``: how many steps there will be, where that is known. Then early records need not wait: the share is of
      the time that all steps will take, dealt out evenly over the records.
    - ``map=g`` cells a side of pooled maps, ``profile=r`` offsets to either side.
    - ``group``: under torch.distributed every process runs its share of the probes, sums are added up, and the first
      one writes; all make the same calls.

    The model is in eval mode meanwhile and back afterwards, random states, gradients and weights are left as they are.
    A folder with records is gone on with: ``back_to`` a checkpoint's step first.

    >>> from tempfile import TemporaryDirectory
    >>> from regard.models.text import Bytes
    >>> model = regard.nn.Decoder(8, heads=2, layers=1, vocab=256)
    >>> with TemporaryDirectory() as folder:
    ...     recorder = Recorder(model, folder, Bytes(), share=None)
    ...     recorded = [step for step in range(10) if recorder.step(step)]  # in a training loop, after each step
    ...     recorder.finish(9)
    ...     seen = regard.training.evolution(folder)
    >>> recorded, seen.steps, seen.value("entropy").shape
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
        total: int | None = None,
        map: int = 32,
        profile: int = 16,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        check_kind("model", model, nn.Module)
        self.model, self.folder = _inner(model), Path(folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} is a file; records need a folder")
        integer("map", map, least=1)
        integer("profile", profile)
        self.limit = 1.0 if share is None else share
        if not isinstance(self.limit, int | float) or not 0 <= self.limit <= 1:
            raise ValueError(f"share is {share!r}; it must be a number from 0 to 1, or None for no limit")
        self.total = None if total is None else integer("total", total, least=1)
        self._observe = Observe(map=map, profile=profile, grid=grid, keep=True)
        self._probes = _probes(self.model, tokenizer, probes, images, grid)
        self._call = run if call is None else call
        self._steps = steps if steps is None or callable(steps) else _sorted(steps)
        self._ring = Ring.of(group)
        self._start: float | None = None  # of the clock, at the first call of this process
        self._called: tuple[int, float] | None = None  # the last step, and when it was over
        self._fastest, self._warm = math.inf, False  # seconds of a step
        self._open(None)

    def step(self, step: int) -> bool:
        """Say that a step is done (0: before the first one); whether it was recorded."""
        new, now = self._new(step), perf_counter()
        if self._called is not None and step == self._called[0] + 1 and self._warm:
            self._fastest = min(self._fastest, now - self._called[1])
        self._warm = self._called is not None  # the first step of a process is slower than all others
        recorded = new and self._is_due(step) and self._fits(step)
        if recorded:
            self._record(step)
        self._called = step, perf_counter()
        return recorded

    def finish(self, step: int) -> None:
        """Record the last step, however long it takes."""
        if self._new(step):
            self._record(step)

    def back_to(self, step: int) -> None:
        """Remove the records after a step: a run that was killed goes on from its checkpoint."""
        self._open(integer("step", step))

    @property
    def share(self) -> float:
        """The time spent on recording over the time since the first call, over all starts of a run."""
        elapsed = self._elapsed()
        return self._spent / elapsed if elapsed else 0.0

    def _open(self, until: int | None) -> None:
        """Take up the folder's records, perhaps without those after a step: one process reads, and tells the others."""
        last, said = [-1, 0, 0, 0], ""
        if self._ring.rank == 0:
            try:
                records.clear(self.folder, 2**60 if until is None else until)
                found = records.files(self.folder)
                if found:
                    known = records.read(found[max(found)])
                    micro = (round(known.seconds[x] * 1e6) for x in ("cost", "spent", "elapsed"))
                    last = [known.step, *micro]
            except (ValueError, OSError) as error:
                last, said = [-2, 0, 0, 0], str(error)
        if self._ring.size > 1:
            last = self._ring.gather(last, self._device())[0]
        if last[0] == -2:
            raise ValueError(said or f"the records in {self.folder} cannot be read: see the first process")
        self._last, self._pending = last[0], False
        self._cost, self._spent, self._before = (x / 1e6 for x in last[1:])
        self._start = None if self._start is None else perf_counter()

    def _new(self, step: int) -> bool:
        """Whether a step is not recorded yet; starts the clock."""
        if integer("step", step) < self._last:
            raise ValueError(
                f"step is {step}, but {self.folder} has records up to step {self._last}; "
                "go on from a checkpoint with back_to(step), or give a new folder"
            )
        if self._start is None:
            self._start = perf_counter()
        return step > self._last

    def _is_due(self, step: int) -> bool:
        if step == 0:
            return True
        if callable(self._steps):
            self._pending = self._pending or bool(self._steps(step))
            return self._pending
        if self._steps is None:
            return _next(self._last) <= step
        at = bisect_right(self._steps, self._last)
        return at < len(self._steps) and self._steps[at] <= step

    def _fits(self, step: int) -> bool:
        """Whether a record, at what the last one took, stays within the share; the first process decides for all."""
        if step == 0 or self.limit == 1:
            return True
        fits = self._spent + self._cost <= self._allowed(step)
        return fits if self._ring.size == 1 else bool(self._ring.gather([int(fits)], self._device())[0][0])

    def _allowed(self, step: int) -> float:
        """Seconds that all records until a step may take."""
        if self.total is None or step >= self.total or not math.isfinite(self._fastest):
            return self.limit * (self._elapsed() + self._cost)
        learning = self._fastest * self.total  # seconds that the whole training will take at least
        whole = self.limit / (1 - self.limit) * learning - self._cost  # the last record is taken whatever it costs
        return whole * self._part(step)

    def _part(self, step: int) -> float:
        """The part of all records that is due until a step."""
        assert self.total is not None
        if self._steps is None:
            return math.log1p(step) / math.log1p(self.total)
        if callable(self._steps):
            return step / self.total
        many = bisect_right(self._steps, self.total)
        return bisect_right(self._steps, step) / many if many else 1.0

    def _elapsed(self) -> float:
        return self._before + (0.0 if self._start is None else perf_counter() - self._start)

    def _record(self, step: int) -> None:
        device = self._device()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # work of the training that is under way is not the recorder's
        began = perf_counter()
        with undisturbed(self.model, device):
            found = measure(
                self.model, self._probes, self._asked, self._observe, rank=self._ring.rank, ranks=self._ring.size
            )
        self._add_up(found.tensors(), device)
        if self._ring.rank == 0:
            tensors, names = found.values()
            cost = perf_counter() - began
            seconds = {"cost": cost, "spent": self._spent + cost, "elapsed": self._elapsed()}
            model, places, grid = type(self.model).__name__, tuple(found.places.values()), self._observe.grid
            records.write(self.folder, records.Record(step, model, places, tensors, names, seconds, grid))
        self._cost = perf_counter() - began
        self._spent += self._cost
        self._last, self._pending = step, False

    def _asked(self, model: nn.Module, inputs: Tensor) -> Any:
        return self._call(model, inputs.to(self._device()))

    def _add_up(self, sums: list[Tensor], device: torch.device) -> None:
        """Σ over the processes, in place."""
        if self._ring.size == 1:
            return
        flat = torch.cat([x.flatten() for x in sums]).to(device)
        dist.all_reduce(flat, group=self._ring.group)
        for x, total in zip(sums, flat.cpu().split([x.numel() for x in sums]), strict=True):
            x.copy_(total.reshape(x.shape))

    def _device(self) -> torch.device:
        return next((x.device for x in self.model.parameters()), torch.device("cpu"))


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Within: eval mode, no gradients, one seed; afterwards every module's mode and the random states as before."""
    modes = [(module, module.training) for module in model.modules()]
    cards = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cards), torch.no_grad():
        # A model that draws numbers even in eval mode draws the same ones at every record.
        for generator in (torch.default_generator, *(torch.cuda.default_generators[i] for i in cards)):
            generator.manual_seed(0)
        model.eval()
        try:
            yield
        finally:
            model.train(modes[0][1])  # for modules that do something when they are told; then each as it was
            for module, training in modes:
                module.training = training


def _inner(model: nn.Module) -> nn.Module:
    """The model itself, of one that is wrapped for compilation or for data parallelism."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def _next(after: int) -> int:
    """The next of 0 and round(2^(k/2)): 0, 1, 2, 3, 4, 6, 8, 11, 16 …"""
    k = 2 * max(after, 1).bit_length() - 2  # 2^(k/2) ≤ after
    return 0 if after < 0 else next(x for x in (round(2 ** (more / 2)) for more in range(k, k + 4)) if x > after)


def _sorted(steps: Sequence[int]) -> list[int]:
    if isinstance(steps, str) or not isinstance(steps, Sequence | range):
        raise TypeError(f"steps must be a list of steps or a function of a step, got {steps!r}")
    return sorted(integer("steps", step) for step in steps)


def _probes(
    model: nn.Module, tokenizer: Any, probes: Sequence[Probe] | None, images: Tensor | None, grid: Any
) -> list[Probe]:
    if sum(x is not None for x in (tokenizer, probes, images)) > 1:
        raise ValueError("give one of tokenizer, probes and images: they all say what the heads are asked")
    if probes is not None:
        found = list(probes)
        for probe in found:
            check_kind("probes", probe, Probe)
        if not found or len({probe.name for probe in found}) < len(found) or any(not len(x.ids) for x in found):
            raise ValueError("probes must be one or more, of different names, with at least one text each")
        return found
    if (images is None) != (grid is None):
        raise ValueError("images and grid go together: grid is (height, width) of the patches")
    if images is not None:
        if images.ndim != 4 or not len(images):
            raise ValueError(f"images has shape {list(images.shape)}; it must be [batch, channels, height, width]")
        return [Probe("natural", images, torch.zeros(0, dtype=torch.bool))]
    if isinstance(model, ImageModel) or getattr(model, "main_input_name", "") == "pixel_values":
        raise ValueError(f"{type(model).__name__} reads pictures: give images=… and grid=(height, width)")
    return _texts(model, getattr(model, "text", None) if tokenizer is None else tokenizer)


def _texts(model: nn.Module, tokenizer: Any) -> list[Probe]:
    """The probes of ``atlas``, as long as the model reads and as its vocabulary allows."""
    if tokenizer is None or isinstance(tokenizer, str) or not hasattr(tokenizer, "encode"):
        raise ValueError(f"{type(model).__name__} brings no tokenizer; give one: Recorder(model, folder, tokenizer)")
    reader = Reader(tokenizer)
    tokens = min(TOKENS, _longest(model))
    known = vocabulary(model, reader)
    ordinary = known - sum(i < known for i in reader.special)
    inside = tokens - len(reader.before) - len(reader.after)
    block = min(BLOCK, inside // TIMES, ordinary // TIMES)
    return [natural(reader, tokens, TEXTS), *repeated(reader, block, TIMES, TEXTS, known)]


def _longest(model: nn.Module) -> int:
    """How many tokens the model reads, where its config says so."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    told = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    found = [told.get(name) for name in ("max_position_embeddings", "n_positions")]
    return min((x for x in found if isinstance(x, int) and x > 0), default=TOKENS)
