"""A run's folder: whose it is, by which recipe, and that one run alone is in it.

recipe.toml      the recipe, as --config takes it        metrics.jsonl   a line a step
run.json         the same, for programs                  checkpoints/    a folder a step
data/            what the task prepared                  evolution/      what the heads did
model/           the best weights, at the end: a folder that regard.models.load and transformers read
"""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from regard.config import read_json
from regard.files import renamed
from regard.training.recipe import Recipe

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
        """Raise unless the folder is new, empty, or of this recipe's run."""
        if not self.path.exists():
            return
        others = self.path.is_dir() and any(file.name != LOCK for file in self.path.iterdir())
        if not self.path.is_dir() or (others and not (self.path / NAME).is_file()):
            raise FileExistsError(f"{self.path} is there and holds no run; train into a new or an empty folder")
        if (self.path / NAME).is_file():
            before = _flat(read_run(self.path))
            for name, value in _flat(self.recipe.to_dict()).items():
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
            told = {"kind": KIND, "format": FORMAT, "recipe": self.recipe.to_dict()}
            told["versions"] = {"regard": version("regard"), "torch": torch.__version__}
            for name, text in ((NAME, json.dumps(told, indent=1) + "\n"), ("recipe.toml", self.recipe.to_toml())):
                with renamed(self.path / name) as temporary:
                    temporary.write_text(text, encoding="utf-8")
        except OSError as error:
            self.__exit__()
            if isinstance(error, BlockingIOError) or error.strerror is None:
                raise
            raise type(error)(f"{self.path} cannot be written: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        if self.lock is not None:
            os.close(self.lock)  # which gives the lock back, as does being killed
            self.lock = None


def read_run(path: Path) -> dict[str, Any]:
    """The recipe of the run in a folder, as plain data."""
    if not (path / NAME).is_file():
        raise FileNotFoundError(f"{path} holds no run: it has no {NAME}")
    told = read_json(path / NAME)
    if told.get("kind") != KIND or told.get("format") != FORMAT or not isinstance(told.get("recipe"), dict):
        raise ValueError(f"{path / NAME} is of no run, or of another version's")
    return dict(told["recipe"])


def _flat(recipe: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in recipe.items():
        flat |= {f"{name}.{inner}": x for inner, x in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _locked(handle: int, path: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows has none: there, two runs in one folder are not kept apart
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BlockingIOError(f"another process is training in {path}") from None
