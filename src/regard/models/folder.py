"""A model folder on disk: ``config.json``, ``*.safetensors`` and small files beside them. No pickle is ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard.config import LARGEST_JSON, Config, read_json
from regard.files import renamed, save_tensors

__all__ = ["Folder", "some", "write_folder"]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
# What belongs to a model beside its weights; kept as it is and written back by ``save``.
BESIDE = (".json", ".txt", ".jinja", ".model", ".md")


class Folder:
    """What a folder holds, opened but not yet read: tensors are views of mapped files until something changes them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            what = "is a file" if self.path.exists() else "does not exist (nothing is downloaded)"
            raise FileNotFoundError(f"{self.path} {what}; a model is a folder with config.json and *.safetensors")
        if not (self.path / "config.json").is_file():
            if (self.path / "run.json").is_file():
                raise FileNotFoundError(f"{self.path} is a run of regard train; its model is {self.path / 'model'}")
            raise FileNotFoundError(f"{self.path} has no config.json; a model is a folder with config.json and weights")
        self.config = self.entries("config.json")

    def entries(self, name: str) -> Config:
        """A JSON file of this folder, to be read with checks."""
        found = Config(self.json(name))
        found.file = name
        return found

    def json(self, name: str) -> dict[str, Any]:
        """A JSON file of this folder, {} if it is not there."""
        file = self.path / name
        return read_json(file) if file.is_file() else {}

    def beside(self) -> dict[str, bytes]:
        """Tokenizers, settings and pages of this folder and of those in it, by name; no weights, no code."""
        found = {}
        for file in sorted([*self.path.glob("*"), *self.path.glob("*/*")]):
            name = file.relative_to(self.path).as_posix()
            kept = file.suffix in BESIDE and name not in ("config.json", INDEX) and not name.startswith(".")
            if kept and file.is_file() and file.stat().st_size <= LARGEST_JSON:
                found[name] = file.read_bytes()
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name. Files are mapped, so this costs no memory until a tensor is looked at."""
        found: dict[str, Tensor] = {}
        for file in self._files():
            with file.open("rb"):  # what cannot be opened says so better than what follows
                pass
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        if name in found:
                            raise ValueError(f"{name} is in {file.name} and in another file of {self.path}")
                        found[name] = opened.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None
        if (self.path / INDEX).is_file() and not (self.path / WEIGHTS).is_file():
            missing = sorted(set(self._index()) - set(found))
            if missing:
                raise ValueError(f"{self.path / INDEX} names {some(missing)}, which its files do not hold")
        return found

    def _files(self) -> list[Path]:
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).is_file():
            files = [self.path / name for name in sorted(set(self._index().values()))]
            for file in files:
                if not file.is_file():
                    raise FileNotFoundError(f"{self.path / INDEX} names {file.name}, which is not there")
            return files
        found = sorted(self.path.glob("*.safetensors"))
        if len(found) == 1:
            return found
        if found:
            names = ", ".join(file.name for file in found)
            raise ValueError(f"{self.path} has {names} but neither {WEIGHTS} nor {INDEX}, which says what is where")
        pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in self.path.glob(pattern))
        if pickles:
            raise ValueError(
                f"{self.path} has its weights in {pickles[0]}, a pickle, which can run code and is never opened; where "
                "you trust it, convert it with transformers: model.save_pretrained(folder) writes safetensors"
            )
        raise FileNotFoundError(f"{self.path} has no weights: neither {WEIGHTS} nor {INDEX}")

    def _index(self) -> dict[str, str]:
        found = self.json(INDEX).get("weight_map")
        if not isinstance(found, Mapping):
            raise ValueError(f"{self.path / INDEX} has no weight_map from tensors to file names")
        for file in found.values():
            if not isinstance(file, str) or not file or Path(file).name != file:
                raise ValueError(f"{self.path / INDEX} names {file!r}; it must be the name of a file beside it")
        return dict(found)


def write_folder(
    path: str | os.PathLike[str], config: Mapping[str, Any], tensors: dict[str, Tensor], beside: Mapping[str, bytes]
) -> None:
    """Write a model folder; every file appears whole or not at all, and ``config.json`` comes last."""
    if not str(path):
        raise ValueError("the folder to save to has no name")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a model is saved as a folder")
    if (folder / INDEX).exists():
        raise FileExistsError(f"{folder} holds a model in several files ({INDEX}); save into another folder")
    folder.mkdir(parents=True, exist_ok=True)
    with renamed(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    for name, content in {**beside, "config.json": text.encode()}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with renamed(folder / name) as temporary:
            temporary.write_bytes(content)


def some(names: list[str], most: int = 3) -> str:
    """A few names of many, for an error of one line."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
