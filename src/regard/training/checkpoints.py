"""Checkpoints: a folder a step, which appears whole or not at all.

    step-00000300/weights.safetensors     parameters and buffers by name
                  optimizer.safetensors   what AdamW remembers
                  state.json              the step, the best score so far: plain numbers

A checkpoint is written under another name and renamed, so that whoever is stopped at any moment (kill −9, a full disk)
leaves the ones before it as they were.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.config import read_json
from regard.files import lasting, save_tensors

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
            save_tensors(weights, temporary / "weights.safetensors")
            save_tensors(moments, temporary / "optimizer.safetensors")
            told = {"kind": KIND, "format": FORMAT, **state}
            text = json.dumps(told, indent=1, allow_nan=False) + "\n"
            (temporary / "state.json").write_text(text, encoding="utf-8")
            lasting(temporary)
            temporary.rename(self.path(step))
            lasting(self.folder)
        except OSError as error:
            raise OSError(f"the checkpoint of step {step} cannot be written: {error.strerror or error}") from None
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
            _check(state)
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
        """Remove all but the ``last`` newest and the best one."""
        for step in self.steps()[:-last]:
            if step != best:
                shutil.rmtree(self.path(step))

    def back_to(self, step: int) -> None:
        """Remove those after a step, which cannot be read, and what somebody who was killed left half-written."""
        for path in self.folder.glob(f"{WRITING}*") if self.folder.is_dir() else ():
            shutil.rmtree(path, ignore_errors=True)
        for later in self.steps():
            if later > step:
                shutil.rmtree(self.path(later))

    def left(self) -> str:
        """What is there to go on from, in words."""
        steps = self.steps()
        return f"the last checkpoint is {self.path(steps[-1])}" if steps else "there is no checkpoint yet"


def _check(state: dict[str, Any]) -> None:
    """What a run takes from a state is there, and of its kind: the file may come from anybody."""
    kinds: dict[str, Any] = {
        "step": int,
        "waited": int,
        "seconds": (int, float),
        "last": dict,
        "best": (dict, type(None)),
    }
    for name, kind in kinds.items():
        if name not in state or not isinstance(state[name], kind):
            raise ValueError(f"state.json: {name} is {state.get(name)!r}")
    best = state["best"]
    if best is not None and not (isinstance(best.get("step"), int) and isinstance(best.get("scores"), dict)):
        raise ValueError(f"state.json: best is {best!r}")
