"""The folder of a run: its files, the check that it belongs to the recipe, and the lock against a second run.

recipe.toml      the recipe, as --config reads it        metrics.jsonl   one line per step
run.json         the same for programs                   checkpoints/    one folder per step
data/            the prepared data of the task           evolution/      the records of the heads
model/           the best weights, at the end: a folder that regard.models.load and transformers read
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from regard._config_json import read_json
from regard._errors import RegardError
from regard._files import make_folder, write_text
from regard._version import __version__
from regard.training._checkpoints import Checkpoints
from regard.training._recipe import Recipe, flatten_recipe

KIND = "regard run"
FORMAT = 1
RUN_FILE = "run.json"
LOCK_FILE = ".lock"
# The names of temporary files of atomic_write, for the files of a run and its data.
TEMPORARY_FILE = re.compile(r"\.[\w-]+\.(json|jsonl|toml|safetensors)\.[a-z0-9_]{8}")
# Settings that may change when a run resumes, because none of them changes the weights.
CHANGEABLE = ("save", "keep", "record", "record_every", "parallel")


class RunFolder:
    """Context manager of one run's folder: creates it or resumes in it, and locks it against other runs."""

    def __init__(self, path: str | os.PathLike[str], recipe: Recipe) -> None:
        self.path = Path(path)
        self.recipe = recipe
        # The system releases the lock of a process that ends in any way, also by kill −9.
        self.lock = FileLock(self.path / LOCK_FILE)

    def check(self) -> None:
        """Raise an error unless the folder is new, empty, or belongs to a run with this recipe.

        The folder of a run without checkpoints may be reused with another recipe, for example after a typing mistake.
        """
        if not self.path.exists():
            return
        is_run = (self.path / RUN_FILE).is_file()
        # Names that start with a dot are our own files: the lock, and unfinished files of a process that was killed.
        is_empty = self.path.is_dir() and all(file.name.startswith(".") for file in self.path.iterdir())
        if not self.path.is_dir() or not (is_run or is_empty):
            raise FileExistsError(f"{self.path} exists and is not a run; give a new or an empty folder")
        if not is_run or not self._has_checkpoint():
            return
        task, recipe = read_run(self.path)
        stored = flatten_recipe({"task": task, **recipe})
        for name, value in flatten_recipe(self.recipe.to_dict()).items():
            if name not in CHANGEABLE and stored.get(name) != value:
                run = f"{self.path} is a run with {name} = {stored.get(name)!r}"
                raise RegardError(f"{run}, got {name} = {value!r}; give another folder or the same value")

    def __enter__(self) -> RunFolder:
        self.check()
        try:
            # The lock file must exist in the folder before anything else is written.
            make_folder(self.path)
            self.lock.acquire(blocking=False)
            # Check again: another process may have written to the folder before it was locked.
            self.check()
            self._clean()
            header: dict[str, Any] = {"kind": KIND, "format": FORMAT, "recipe": self.recipe.to_dict()}
            header["versions"] = {"regard": __version__, "torch": torch.__version__}
            write_text(json.dumps(header, indent=1) + "\n", self.path / RUN_FILE)
            write_text(self.recipe.to_toml(), self.path / "recipe.toml")
        except Timeout:
            raise BlockingIOError(f"another process is training in {self.path}") from None
        except OSError as error:
            self.__exit__()
            if error.strerror is None:  # the message already says what is wrong
                raise
            raise type(error)(f"{self.path} cannot be written: {error.strerror}") from None
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def _has_checkpoint(self) -> bool:
        return bool(Checkpoints(self.path / "checkpoints").steps())

    def _clean(self) -> None:
        """Remove unfinished files of a process that was killed, and the data of a recipe that is replaced."""
        for file in (*self.path.glob(".*"), *(self.path / "data").glob(".*")):
            if file.is_file() and TEMPORARY_FILE.fullmatch(file.name):
                file.unlink()
        if not self._has_checkpoint() and (self.path / RUN_FILE).is_file():
            task, recipe = read_run(self.path)
            if {"task": task, **recipe} != self.recipe.to_dict():
                for name in ("data", "evolution"):
                    shutil.rmtree(self.path / name, ignore_errors=True)


def read_run(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the task's name and the recipe of the run in a folder; ``Recipe.with_changes`` accepts the recipe."""
    if not (path / RUN_FILE).is_file():
        raise FileNotFoundError(f"{path} is not a run: it has no {RUN_FILE}")
    header = read_json(path / RUN_FILE)
    recipe = header.get("recipe")
    is_run = header.get("kind") == KIND and header.get("format") == FORMAT
    if not is_run or not isinstance(recipe, dict) or "task" not in recipe:
        raise RegardError(f"{path / RUN_FILE} is not a {KIND} of format {FORMAT}")
    task = str(recipe.pop("task"))
    return task, recipe
