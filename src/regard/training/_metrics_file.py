"""Write and read the metrics of a run: one JSON object per line, and TensorBoard events if it is installed."""

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

from regard._errors import RegardError
from regard._files import write_text

LARGEST_METRICS = 2**29  # bytes; a line has about 160
LONGEST_LINE = 2**16


class Metrics:
    """``metrics.jsonl``: one line per step (loss, rate, gradient norm, predictions per second) and per evaluation.

    A run that resumes at step s first removes the lines of steps after s, and any incomplete line.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.file = folder / "metrics.jsonl"
        lines = [_format_line(line) for line in read_metrics(self.file) if line["step"] <= step]
        # Rewritten as a whole, so that a crash here loses no line.
        write_text("".join(lines), self.file)
        self.stream = self.file.open("a", encoding="utf-8")
        self.streams: list[Any] = [self.stream]
        self.board: _TensorBoard | None = None
        if find_spec("tensorboard") is not None:
            self.board = _TensorBoard(folder / "tensorboard", step)
            self.streams.append(self.board.stream)

    def write(self, step: int, values: Mapping[str, float], *, held_out: bool = False) -> None:
        """Write the values of a step, or of an evaluation if ``held_out`` is true."""
        line: dict[str, Any] = {"step": step}
        group = "training"
        if held_out:
            line["held_out"] = True
            group = "held out"
        self.stream.write(_format_line(line | dict(values)))
        if self.board is not None:
            self.board.write(step, group, values)

    def flush(self) -> None:
        """Write all lines to the disk: a checkpoint of a later step must not outlive them."""
        try:
            for stream in self.streams:
                stream.flush()
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise OSError(f"{self.file} cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Flush and close the files."""
        try:
            for stream in self.streams:
                stream.close()
        except OSError as error:
            raise OSError(f"{self.file} cannot be written: {error.strerror}") from None


class _TensorBoard:
    """Writes TensorBoard events synchronously. TensorBoard's own writer uses a thread, which a full disk kills."""

    def __init__(self, folder: Path, step: int) -> None:
        # Imported here because TensorBoard is optional and slow to import.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.event_class = Event
        self.summary_class = Summary
        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self.stream = (folder / name).open("wb")
        self.writer = RecordWriter(self.stream)
        self._write_event(file_version="brain.Event:2")
        # Tells TensorBoard to discard events after this step: an earlier process wrote them, and they are repeated.
        self._write_event(step=step + 1, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, group: str, values: Mapping[str, float]) -> None:
        summary = self.summary_class()
        for name, value in values.items():
            summary.value.add(tag=f"{group}/{name}", simple_value=value)
        self._write_event(step=step, summary=summary)

    def _write_event(self, **fields: Any) -> None:
        self.writer.write(self.event_class(wall_time=time.time(), **fields).SerializeToString())


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a ``metrics.jsonl``, without incomplete and damaged lines."""
    if not file.is_file():
        return []
    check_metrics_size(file)
    lines = []
    with file.open("rb") as stream:
        # A line that is longer was not written by a run; its pieces are not JSON.
        while text := stream.readline(LONGEST_LINE):
            line = parse_metrics_line(text)
            if line is not None:
                lines.append(line)
    return lines


def check_metrics_size(file: Path) -> None:
    """Raise if a ``metrics.jsonl`` is larger than the metrics of any run; reading it would take all memory."""
    if file.is_file() and file.stat().st_size > LARGEST_METRICS:
        raise RegardError(f"{file} has {file.stat().st_size:,} bytes; metrics have at most {LARGEST_METRICS:,}")


def parse_metrics_line(text: bytes) -> dict[str, Any] | None:
    """Return one line of metrics; None if it is damaged, for example because the process died while it wrote it."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("step"), int) or not 0 <= line["step"] < 2**53:
        return None
    return line


def _format_line(line: Mapping[str, Any]) -> str:
    """Return one line of JSON; NaN and infinity, which JSON does not have, become null."""
    values = dict(line)
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = None
    return json.dumps(values) + "\n"
