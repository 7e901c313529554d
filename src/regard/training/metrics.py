"""What a run tells, one JSON object a line, and in TensorBoard where that is installed."""

from __future__ import annotations

import json
import math
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
        self.board: Any = None
        if find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def write(self, step: int, numbers: Mapping[str, float], *, held_out: bool = False) -> None:
        """The numbers of a step, or of an evaluation (``held_out``)."""
        self.opened.write(_line({"step": step, **({"held_out": True} if held_out else {}), **numbers}))
        if self.board is not None:
            for name, value in numbers.items():
                self.board.add_scalar(f"{'held out' if held_out else 'training'}/{name}", value, step)

    def flush(self) -> None:
        """Hand over to the system what was written."""
        self.opened.flush()

    def close(self) -> None:
        """Write what is left."""
        self.opened.close()
        if self.board is not None:
            self.board.close()


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
