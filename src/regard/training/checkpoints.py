"""Checkpoints: a folder a step, which appears whole or not at all.

    step-00000300/weights.safetensors     parameters and buffers by name
                  optimizer.safetensors   what AdamW remembers
                  state.json              the step, the best score so far: plain numbers

A checkpoint is written under another name and renamed, so that whoever is stopped at any moment (kill −9, a full disk)
leaves the ones before it as they were.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.config import read_json
from regard.files import lasting

__all__ = ["Checkpoint", "Checkpoints"]

KIND, FORMAT = "regard checkpoint", 1
WRITING = ".writing-"


@dataclass(frozen=True)
class Checkpoint:
    """What a run needs to go on from a step: the state's numbers, the weights, and what the optimizer remembers."""

    state: dict[str, Any]
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """The steps there are checkpoints of, the first first."""
        if not self.folder.is_dir():
            return []
        names = (re.fullmatch(r"step-(\d{8,})", path.name) for path in self.folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def write(self, state: Mapping[str, Any], weights: dict[str, Tensor], moments: dict[str, Tensor]) -> None:
        """Write the checkpoint of ``state["step"]``; on failure nothing is left of it and the others stay."""
        step = int(state["step"])
        temporary: Path | None = None
        try:
            if self.path(step).exists():  # it could not be read, or the run would have gone on from it
                shutil.rmtree(self.path(step))
            self.folder.mkdir(parents=True, exist_ok=True)
            temporary = Path(tempfile.mkdtemp(prefix=WRITING, dir=self.folder))
            temporary.chmod(0o755)
            save_file(weights, temporary / "weights.safetensors")
            save_file(moments, temporary / "optimizer.safetensors")
            told = {"kind": KIND, "format": FORMAT, **state}
            (temporary / "state.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
            lasting(temporary)
            temporary.rename(self.path(step))
            lasting(self.folder)
        except (OSError, SafetensorError) as error:
            raise OSError(f"the checkpoint of step {step} cannot be written: {_why(error)}") from None
        finally:
            if temporary is not None and temporary.exists():
                shutil.rmtree(temporary, ignore_errors=True)

    def read(self, step: int) -> Checkpoint:
        """The checkpoint of a step; one that is not whole is refused."""
        path = self.path(step)
        try:
            state = read_json(path / "state.json")
            if state.get("kind") != KIND or state.get("format") != FORMAT or state.get("step") != step:
                raise ValueError(f"state.json is not that of step {step}, or of another version")
            tensors = [load_file(path / f"{name}.safetensors") for name in ("weights", "optimizer")]
        except (OSError, ValueError, SafetensorError) as error:
            raise ValueError(f"{path} is no whole checkpoint: {error}") from None
        return Checkpoint(state, *tensors)

    def newest(self) -> Checkpoint | None:
        """The last checkpoint that can be read; None if there is none at all."""
        broken = None
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except ValueError as error:
                warnings.warn(f"{error}; the one before it is tried", stacklevel=2)
                broken = error
        if broken is not None:
            raise broken
        return None

    def keep(self, last: int, best: int | None) -> None:
        """Remove all but the ``last`` newest and the best one, and what was left half-written."""
        steps = self.steps()
        for step in steps[:-last]:
            if step != best:
                shutil.rmtree(self.path(step))
        self.clean()

    def clean(self) -> None:
        """Remove what somebody who was killed left half-written."""
        if self.folder.is_dir():
            for path in self.folder.glob(f"{WRITING}*"):
                shutil.rmtree(path, ignore_errors=True)

    def left(self) -> str:
        """What is there to go on from, in words."""
        steps = self.steps()
        return f"the last checkpoint is {self.path(steps[-1])}" if steps else "there is no checkpoint yet"


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    found = re.search(r"\(os error (\d+)\)", str(error))  # as safetensors says it
    return os.strerror(int(found[1])) if found else str(error)
