"""A training run's folder while it grows: records of heads and lines of metrics, of which only what is new is read."""

from __future__ import annotations

import json
import math
import threading
import time
from pathlib import Path
from typing import Any

from regard.config import read_json
from regard.training import records
from regard.training.evolution import Evolution
from regard.training.records import Record

__all__ = ["Growing"]

POINTS = 300  # of a curve, at most
FRESH = 30.0  # seconds since something was written, in which another program's run counts as going on


class Growing:
    """One folder; safe to ask from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._records: dict[Path, tuple[tuple[int, int], Record]] = {}
        self._evolution: Evolution | None = None
        self._read, self._rest, self._lines = 0, b"", list[dict[str, Any]]()
        self._file = 0  # which file these are of

    def evolution(self) -> Evolution | None:
        """All records that are there now; None before the first."""
        with self._lock:
            found, changed = {}, False
            for file in records.files(self.folder / "evolution").values():
                try:
                    status = file.stat()
                    version = (status.st_mtime_ns, status.st_size)
                    known = self._records.get(file)
                    if known is None or known[0] != version:
                        known, changed = (version, records.read(file)), True
                    found[file] = known
                except FileNotFoundError:  # a run that goes back to a checkpoint removes what came after it
                    continue
            if changed or len(found) != len(self._records):
                self._records = found
                self._evolution = Evolution([record for _, record in found.values()]) if found else None
            return self._evolution

    def metrics(self) -> tuple[int, list[dict[str, Any]]]:
        """How many bytes of ``metrics.jsonl`` were read so far, and its lines."""
        file = self.folder / "metrics.jsonl"
        with self._lock:
            there = file.stat() if file.is_file() else None
            size = 0 if there is None else there.st_size
            anew = there is not None and there.st_ino != self._file
            if size < self._read or anew:  # by a run that went back
                self._read, self._rest, self._lines = 0, b"", []
            self._file = 0 if there is None else there.st_ino
            if size > self._read:
                with file.open("rb") as opened:
                    opened.seek(self._read)
                    data = opened.read(size - self._read)
                self._read += len(data)
                *whole, self._rest = (self._rest + data).split(b"\n")
                self._lines.extend(line for line in map(_line, whole) if line is not None)
            return self._read, list(self._lines)

    def result(self) -> dict[str, Any] | None:
        """How the run ended, once it has."""
        try:
            return read_json(self.folder / "result.json")
        except (OSError, ValueError):
            return None

    def is_fresh(self) -> bool:
        """Whether something was written a moment ago, by whatever program trains here."""
        newest = 0.0
        for name in ("metrics.jsonl", "evolution", "checkpoints"):
            file = self.folder / name
            newest = max(newest, file.stat().st_mtime if file.exists() else 0.0)
        return time.time() - newest < FRESH


def curves(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """The loss by step, averaged over stretches as long as each other on a logarithmic axis; and held-out numbers."""
    loss = [(line["step"], line["loss"]) for line in lines if not line.get("held_out") and _is_number(line.get("loss"))]
    held = [line for line in lines if line.get("held_out")]
    names = [name for name in (held[0] if held else {}) if name not in ("step", "held_out")]
    last = max((line["step"] for line in lines), default=1)
    bins: dict[int, list[tuple[int, float]]] = {}
    for step, value in loss:
        bins.setdefault(int(POINTS * math.log1p(step) / math.log1p(max(last, 1))), []).append((step, value))
    middle = [(part[len(part) // 2][0], sum(x for _, x in part) / len(part)) for _, part in sorted(bins.items())]
    few = held[:: max(1, -(-len(held) // POINTS))]
    return {
        "loss": {"steps": [step for step, _ in middle], "values": [value for _, value in middle]},
        "held_out": {
            "steps": [line["step"] for line in few],
            **{"values": {name: [line.get(name) for line in few] for name in names}},
        },
        "last": loss[-1] if loss else None,
    }


def _line(text: bytes) -> dict[str, Any] | None:
    try:
        told = json.loads(text)
    except ValueError:
        return None
    good = isinstance(told, dict) and isinstance(told.get("step"), int) and 0 <= told["step"] < 2**53
    return told if good else None


def _is_number(x: object) -> bool:
    return isinstance(x, int | float) and math.isfinite(x)
