"""Checkpoints of a run: one folder per step, which appears complete or not at all.

    step-00000300/weights.safetensors     parameters and buffers by name
                  optimizer.safetensors   the state of AdamW
                  state.json              the step and the best score so far, as plain numbers

A checkpoint is written under a temporary name and then renamed. A run that is stopped at any moment (kill −9, a full
disk) therefore leaves the earlier checkpoints intact.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard._config_json import read_json
from regard._errors import RegardError
from regard._files import TEMPORARY_FOLDER, atomic_folder, check_regular_file, save_tensors
from regard._shapes import DTYPES
from regard.models._load import check_finite

KIND = "regard checkpoint"
FORMAT = 1


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to resume: the state's numbers, the weights and the optimizer's state."""

    state: dict[str, Any]
    weights: dict[str, Tensor]
    optimizer_state: dict[str, Tensor]


class Checkpoints:
    """The checkpoints of one run, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, in order."""
        if not self.folder.is_dir():
            return []
        steps = []
        for path in self.folder.iterdir():
            match = re.fullmatch(r"step-(\d{8,})", path.name)
            if match:
                steps.append(int(match[1]))
        return sorted(steps)

    def path(self, step: int) -> Path:
        """Return the folder of a step's checkpoint."""
        return self.folder / f"step-{step:08d}"

    def write(self, state: Mapping[str, Any], weights: dict[str, Tensor], optimizer_state: dict[str, Tensor]) -> None:
        """Write the checkpoint of ``state["step"]``; after a failure nothing of it is left."""
        step = int(state["step"])
        try:
            # An existing folder of this step was unreadable, or the run would have resumed from it.
            with atomic_folder(self.path(step), replace=True) as temporary:
                save_tensors(weights, temporary / "weights.safetensors")
                save_tensors(optimizer_state, temporary / "optimizer.safetensors")
                header = {"kind": KIND, "format": FORMAT, **state}
                text = json.dumps(header, indent=1, allow_nan=False) + "\n"
                (temporary / "state.json").write_text(text, encoding="utf-8")
        except OSError as error:
            raise OSError(f"the checkpoint of step {step} cannot be written: {error.strerror or error}") from None

    def read(self, step: int) -> Checkpoint:
        """Read and check the checkpoint of a step; an incomplete one raises ``RegardError``."""
        path = self.path(step)
        try:
            state = read_json(path / "state.json")
            if state.get("kind") != KIND or state.get("format") != FORMAT or state.get("step") != step:
                raise RegardError(f"state.json is not a {KIND} of step {step} in format {FORMAT}")
            _check_state(state)
            weights = _read_tensors(path / "weights.safetensors")
            optimizer_state = _read_tensors(path / "optimizer.safetensors")
        except (OSError, ValueError, SafetensorError) as error:
            raise RegardError(f"{path} is not a complete checkpoint: {error}") from None
        return Checkpoint(state, weights, optimizer_state)

    def read_newest(self) -> Checkpoint | None:
        """Return the last readable checkpoint, or None if there is no checkpoint at all."""
        last_error = None
        for step in reversed(self.steps()):
            try:
                return self.read(step)
            except ValueError as error:
                warnings.warn(f"{error}; trying the checkpoint before it", stacklevel=2)
                last_error = error
        # There are checkpoints, but none is readable: starting again from step 0 would overwrite them.
        if last_error is not None:
            raise last_error
        return None

    def remove_old(self, keep_last: int, best: int | None) -> None:
        """Remove all checkpoints except the ``keep_last`` newest and that of the step ``best``."""
        self.remove(step for step in self.steps()[:-keep_last] if step != best)

    def remove(self, steps: Iterable[int]) -> None:
        """Remove the checkpoints of some steps, as far as they exist."""
        for step in steps:
            if self.path(step).exists():
                shutil.rmtree(self.path(step))

    def remove_unfinished(self) -> None:
        """Remove the temporary folders of a process that was killed."""
        for path in self.folder.glob(f"{TEMPORARY_FOLDER}*"):
            shutil.rmtree(path, ignore_errors=True)

    def describe_newest(self) -> str:
        """Return the sentence of an error message that says from which step the run can resume."""
        steps = self.steps()
        if not steps:
            return "there is no checkpoint yet"
        return f"the last checkpoint is {self.path(steps[-1])}"


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file. No training can go on with numbers that are NaN or infinite: they are refused."""
    check_regular_file(file)  # safetensors would wait for the writer of a pipe
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if tensor.is_complex() or (tensor.is_floating_point() and tensor.dtype not in DTYPES):
            accepted = ", ".join(map(str, DTYPES))
            raise RegardError(f"{file.name}: {name} is {tensor.dtype}; floating-point numbers must be {accepted}")
    check_finite(tensors.items(), Path(file.name))
    return tensors


def _check_state(state: dict[str, Any]) -> None:
    """Check the entries of a state and their types; the file is not trusted."""
    types: dict[str, Any] = {"step": int, "waited": int, "seconds": int | float, "last": dict, "best": dict | None}
    for name, accepted in types.items():
        if name not in state or not isinstance(state[name], accepted):
            raise RegardError(f"state.json: {name} is {state.get(name)!r}")
    best = state["best"]
    if best is not None and not (isinstance(best.get("step"), int) and isinstance(best.get("scores"), dict)):
        raise RegardError(f"state.json: best is {best!r}")
    all_scores = [state["last"]]
    if best is not None:
        all_scores.append(best["scores"])
    for scores in all_scores:
        for name, score in scores.items():
            if type(score) not in (int, float) or not abs(score) < math.inf:
                raise RegardError(f"state.json: the score {name} is {score!r}; it must be a finite number")
