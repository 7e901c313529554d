"""A run's folder: whose it is, by which recipe, and that one run alone is in it.

recipe.toml      the recipe, as --config takes it        metrics.jsonl   a line a step
run.json         the same, for programs                  checkpoints/    a folder a step
data/            what the task prepared                  evolution/      what the heads did
model/           the best weights, at the end: a folder that regard.models.load and transformers read
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from regard.config import read_json
from regard.files import renamed
from regard.training.checkpoints import Checkpoints
from regard.training.recipe import Recipe, flat
from regard.version import __version__

__all__ = ["RunFolder", "read_run"]

KIND, FORMAT = "regard run", 1
NAME, LOCK = "run.json", ".lock"
# What may differ when a run goes on: none of it changes what is learned.
FREE = ("save", "keep", "record", "record_every", "parallel")


class RunFolder:
    """The folder of one run; ``with RunFolder(path, recipe)`` makes it, or goes on in it, and keeps others out."""

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe) -> None:
        self.path, self.recipe = Path(path), recipe
        self.lock: int | None = None

    def check(self) -> None:
        """Raise unless the folder is new, empty, or of this recipe's run.

        One whose run never came to a checkpoint is taken over: a typing mistake should not cost a folder.
        """
        if not self.path.exists():
            return
        # Names with a dot are ours: the lock, and files that somebody who was killed did not finish.
        others = self.path.is_dir() and any(not file.name.startswith(".") for file in self.path.iterdir())
        if not self.path.is_dir() or (others and not (self.path / NAME).is_file()):
            raise FileExistsError(f"{self.path} is there and holds no run; train into a new or an empty folder")
        if (self.path / NAME).is_file() and Checkpoints(self.path / "checkpoints").steps():
            task, recipe = read_run(self.path)
            before = flat({"task": task, **recipe})
            for name, value in flat(self.recipe.to_dict()).items():
                there = before.get(name)
                if name not in FREE and there != value:
                    raise ValueError(
                        f"{self.path} holds a run with {name} = {there!r}, and {value!r} is asked for now; train into "
                        "another folder, or ask for the same"
                    )

    def __enter__(self) -> RunFolder:
        self.check()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
            _locked(self.lock, self.path)
            self.check()  # again: now nobody else changes it
            self._clean()
            told = {"kind": KIND, "format": FORMAT, "recipe": self.recipe.to_dict()}
            told["versions"] = {"regard": __version__, "torch": torch.__version__}
            for name, text in ((NAME, json.dumps(told, indent=1) + "\n"), ("recipe.toml", self.recipe.to_toml())):
                with renamed(self.path / name) as temporary:
                    temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            self.__exit__()
            if isinstance(error, BlockingIOError) or error.strerror is None:
                raise
            raise type(error)(f"{self.path} cannot be written: {error.strerror}") from None
        return self

    def _clean(self) -> None:
        """Remove what somebody who was killed left half-written, and the data of a recipe that is replaced."""
        for file in (*self.path.glob(".*.??*"), *(self.path / "data").glob(".*.??*")):
            if file.is_file() and file.name != LOCK:
                file.unlink()
        if not Checkpoints(self.path / "checkpoints").steps() and (self.path / NAME).is_file():
            task, recipe = read_run(self.path)
            if {"task": task, **recipe} != self.recipe.to_dict():
                for name in ("data", "evolution"):
                    shutil.rmtree(self.path / name, ignore_errors=True)

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            os.close(self.lock)  # which gives the lock back, as does being killed
            self.lock = None


def read_run(path: Path) -> tuple[str, dict[str, Any]]:
    """The task and the recipe of the run in a folder; ``Recipe.changed`` takes the latter."""
    if not (path / NAME).is_file():
        raise FileNotFoundError(f"{path} holds no run: it has no {NAME}")
    told = read_json(path / NAME)
    recipe = told.get("recipe")
    if told.get("kind") != KIND or told.get("format") != FORMAT or not isinstance(recipe, dict) or "task" not in recipe:
        raise ValueError(f"{path / NAME} is of no run, or of another version's")
    return str(recipe["task"]), {name: value for name, value in recipe.items() if name != "task"}


def _locked(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has none: there, two runs in one folder are not kept apart
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another process is training in {path}") from None
