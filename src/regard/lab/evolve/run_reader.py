"""Reads head records and metrics from the folder of a training run while it grows; each time, only what is new."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path
from typing import Any

from regard._config_json import read_json
from regard.interp import _records as records
from regard.interp._atlas_store import RESULT_FILE
from regard.interp._records import Record
from regard.training._checkpoints import Checkpoints
from regard.training._evolution import Evolution
from regard.training._metrics_file import check_metrics_size, parse_metrics_line
from regard.training._record_schedule import read_left_out
from regard.training._run_folder import read_run

MAX_POINTS = 300  # points per curve
FRESH_SECONDS = 30.0  # a run of another program counts as growing if it wrote something in this time


class RunReader:
    """Reads one run's folder. Several threads may use it at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._records: dict[Path, tuple[tuple[int, int], Record]] = {}  # file → (its time and size, its record)
        self._evolution: Evolution | None = None
        self._metrics: list[dict[str, Any]] = []
        self._metrics_bytes = 0  # how much of the metrics file was read
        self._metrics_rest = b""  # a last line that is not complete yet
        self._metrics_inode = 0  # changes if the file is replaced by a new file of the same name

    def evolution(self) -> Evolution | None:
        """Return all records that exist now; None before the first."""
        with self._lock:
            current = {}
            changed = False
            files = records.find_records(self.folder)
            for file in files.values():
                try:
                    status = file.stat()
                    version = (status.st_mtime_ns, status.st_size)
                    known = self._records.get(file)
                    if known is None or known[0] != version:
                        known = (version, records.read_record(file))
                        changed = True
                    current[file] = known
                except FileNotFoundError:  # a run that returns to a checkpoint removes the records after it
                    continue
            if changed or len(current) != len(self._records):
                self._records = current
                self._evolution = None
                if current:
                    left_out = read_left_out(next(iter(current)).parent)
                    self._evolution = Evolution([record for _, record in current.values()], tuple(left_out))
            return self._evolution

    def metrics(self) -> tuple[int, list[dict[str, Any]]]:
        """Return how many bytes of ``metrics.jsonl`` were read so far, and its lines."""
        file = self.folder / "metrics.jsonl"
        check_metrics_size(file)
        with self._lock:
            size = 0
            inode = 0
            if file.is_file():
                status = file.stat()
                size = status.st_size
                inode = status.st_ino

            # A run that returns to a checkpoint writes a new metrics file.
            if size < self._metrics_bytes or (inode and inode != self._metrics_inode):
                self._metrics = []
                self._metrics_bytes = 0
                self._metrics_rest = b""
            self._metrics_inode = inode

            if size > self._metrics_bytes:
                with file.open("rb") as stream:
                    stream.seek(self._metrics_bytes)
                    data = stream.read(size - self._metrics_bytes)
                self._metrics_bytes += len(data)
                *lines, self._metrics_rest = (self._metrics_rest + data).split(b"\n")
                for line in lines:
                    entry = parse_metrics_line(line)
                    if entry is not None:
                        self._metrics.append(entry)
            return self._metrics_bytes, list(self._metrics)

    def result(self) -> dict[str, Any] | None:
        """Return how the run ended or was stopped; None if it did neither."""
        try:
            return read_json(self.folder / RESULT_FILE)
        except (OSError, ValueError):
            return None

    def progress(self) -> tuple[int, int] | None:
        """Return the step from which a run can continue, and the number of all steps; None if it is not a run.

        The folder of a run without checkpoints continues from step 0.
        """
        try:
            _, recipe = read_run(self.folder)
            return max(Checkpoints(self.folder / "checkpoints").steps(), default=0), int(recipe["steps"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def has_started(self) -> bool:
        """Return whether the training has done or recorded anything."""
        return any((self.folder / name).exists() for name in ("metrics.jsonl", "checkpoints", "evolution"))

    def is_fresh(self) -> bool:
        """Return whether a program has written to the folder in the last ``FRESH_SECONDS``, and not stopped since."""
        newest = 0.0
        for name in ("run.json", "metrics.jsonl", "evolution", "checkpoints"):
            newest = max(newest, self._changed(self.folder / name))
        # A recorder may write its records into this folder itself.
        if not (self.folder / "run.json").exists():
            newest = max(newest, self._changed(self.folder))
        # The result is the last file that a run writes.
        return time.time() - newest < FRESH_SECONDS and newest > self._changed(self.folder / RESULT_FILE)

    def _changed(self, file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:
            return 0.0


def training_curves(metrics: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the training loss and the held-out scores by step, with at most about ``MAX_POINTS`` points each.

    The loss is averaged over intervals that have equal lengths on a logarithmic axis.
    """
    losses = []
    held_out = []
    for line in metrics:
        if line.get("held_out"):
            held_out.append(line)
        elif _is_number(line.get("loss")):
            losses.append((line["step"], line["loss"]))

    last_step = max((line["step"] for line in metrics), default=1)
    intervals: dict[int, list[tuple[int, float]]] = {}
    for step, loss in losses:
        interval = int(MAX_POINTS * math.log1p(step) / math.log1p(max(last_step, 1)))
        intervals.setdefault(interval, []).append((step, loss))
    steps = []
    means = []
    for _, points in sorted(intervals.items()):
        steps.append(points[len(points) // 2][0])
        means.append(sum(loss for _, loss in points) / len(points))

    # Scores are not averaged; instead only every k-th score is shown.
    shown = held_out[:: max(1, math.ceil(len(held_out) / MAX_POINTS))]
    scores = {}
    for name in held_out[0] if held_out else ():
        if name not in ("step", "held_out"):
            scores[name] = [line.get(name) for line in shown]
    return {
        "loss": {"steps": steps, "values": means},
        "held_out": {"steps": [line["step"] for line in shown], "values": scores},
        "last": losses[-1] if losses else None,
    }


def _is_number(x: object) -> bool:
    """Whether a value of a file is a number that a float can hold; an integer of 400 digits is none."""
    try:
        return isinstance(x, int | float) and math.isfinite(x)
    except OverflowError:
        return False
