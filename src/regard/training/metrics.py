"""What a run tells, one JSON object a line, and in TensorBoard where that is installed."""

from __future__ import annotations

import json
import math
import os
import socket
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.files import renamed

__all__ = ["Metrics", "read_metrics"]


class Metrics:
    """``metrics.jsonl``: a line a step (loss, rate, gradient norm, predictions a second) and a line an evaluation.

    A run that goes on from step s drops the lines after s, and one that was cut off.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.file = folder / "metrics.jsonl"
        lines = [line for line in read_metrics(self.file) if line["step"] <= step]
        with renamed(self.file) as temporary:
            temporary.write_text("".join(map(_line, lines)), encoding="utf-8")
        self.opened = self.file.open("a", encoding="utf-8")
        self.board = None if find_spec("tensorboard") is None else _Board(folder / "tensorboard", step)

    def write(self, step: int, numbers: Mapping[str, float], *, held_out: bool = False) -> None:
        """The numbers of a step, or of an evaluation (``held_out``)."""
        self.opened.write(_line({"step": step, **({"held_out": True} if held_out else {}), **numbers}))
        if self.board is not None:
            self.board.write(step, {f"{'held out' if held_out else 'training'}/{k}": x for k, x in numbers.items()})

    def flush(self) -> None:
        """Hand over to the system what was written."""
        try:
            self.opened.flush()
            if self.board is not None:
                self.board.opened.flush()
        except OSError as error:
            raise OSError(f"{self.file} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Write what is left."""
        for opened in (self.opened, *(() if self.board is None else (self.board.opened,))):
            try:
                opened.close()
            except OSError as error:
                raise OSError(f"{self.file} cannot be written: {error.strerror}") from None


class _Board:
    """TensorBoard's own records, written here and now: its writer has a thread, which a full disk ends with a trace."""

    def __init__(self, folder: Path, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event, self.summary = Event, Summary
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.opened = (folder / name).open("wb")
        self.records = RecordWriter(self.opened)
        self._write(file_version="brain.Event:2")
        # What an earlier start wrote after this step did not happen.
        self._write(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        values = [self.summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._write(step=step, summary=self.summary(value=values))

    def _write(self, **told: Any) -> None:
        self.records.write(self.event(wall_time=time.time(), **told).SerializeToString())


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The lines of a ``metrics.jsonl``; a last one that was cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else []:
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if isinstance(told, dict) and isinstance(told.get("step"), int):
            found.append(told)
    return found


def _line(told: Mapping[str, Any]) -> str:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in told.items()}
    return json.dumps(finite, ensure_ascii=False) + "\n"
