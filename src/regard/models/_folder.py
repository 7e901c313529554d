"""Reads and writes a model folder: ``config.json``, ``*.safetensors`` and small files. No pickle is ever opened."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from regard._config_json import LARGEST_JSON, Config, read_json
from regard._errors import RegardError
from regard._files import atomic_write, check_regular_file, make_folder, open_regular, read_regular, save_tensors
from regard._shapes import aligned

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
# Small files that belong to a model; ``save`` writes them back unchanged. They are read into memory, so their number
# and size are limited.
MOST_EXTRA_FILES = 256
MOST_EXTRA_BYTES = 128 * 2**20
EXTRA_SUFFIXES = (".json", ".txt", ".jinja", ".model", ".md")


def describe_run_model(run: Path) -> str:
    """Say where the model of a run is, or that it has none yet and how to get one."""
    if (run / "model" / "config.json").is_file():
        return f"its model is {run / 'model'}"
    return "it has no model yet, because it is training or was killed: the same regard train command continues it"


class ModelFolder:
    """A model folder. Its config is read at once; its tensors are views of memory-mapped files, read when used."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            problem = "is a file" if self.path.exists() else "does not exist (nothing is downloaded)"
            raise FileNotFoundError(
                f"{self.path} {problem}; a model is a folder with config.json and *.safetensors, or a GGUF file"
            )
        if not (self.path / "config.json").exists():
            if (self.path / "run.json").is_file():
                raise FileNotFoundError(f"{self.path} is a run of regard train; {describe_run_model(self.path)}")
            for file in sorted(self.path.glob("*.gguf")):
                raise FileNotFoundError(f"{self.path} has no config.json; for its GGUF file give {file}")
            raise FileNotFoundError(f"{self.path} has no config.json; a model is a folder with config.json and weights")
        self.config = self.read_config("config.json")

    def read_config(self, name: str) -> Config:
        """The entries of a JSON file of this folder; empty if there is none."""
        config = Config()
        if (self.path / name).exists():
            config.update(read_json(self.path / name))
        config.file = name
        return config

    def extra_files(self) -> dict[str, bytes]:
        """Tokenizers, settings and text files of this folder and its direct subfolders, by name; no weights, no code.

        A file that is a link out of the folder is left out: ``save`` would copy a private file into a model that is
        then published. The folders of the Hugging Face cache are made of links into their repository, which are read.
        A ``tokenizer.json`` that cannot be read is an error, because the model would get another tokenizer. Files of
        more than 64 MiB are left out.
        """
        files: dict[str, bytes] = {}
        total = 0
        for file in self._extra_paths():
            name = file.relative_to(self.path).as_posix()
            if name == TOKENIZER:
                self._check_tokenizer(file)
            elif not self._is_extra_file(file):
                continue
            content = read_regular(file, LARGEST_JSON)
            total += len(content)
            if len(files) == MOST_EXTRA_FILES or total > MOST_EXTRA_BYTES:
                raise RegardError(
                    f"{self.path} has more than {MOST_EXTRA_FILES} files, or {MOST_EXTRA_BYTES // 2**20} MiB, with the "
                    f"suffixes {', '.join(EXTRA_SUFFIXES)}; move those that are not part of the model elsewhere"
                )
            files[name] = content
        return files

    def _extra_paths(self) -> list[Path]:
        """The paths whose names could be those of extra files."""
        paths = []
        for path in sorted([*self.path.glob("*"), *self.path.glob("*/*")]):
            name = path.relative_to(self.path).as_posix()
            if path.suffix in EXTRA_SUFFIXES and name not in ("config.json", INDEX) and not name.startswith("."):
                paths.append(path)
        return paths

    def _is_extra_file(self, file: Path) -> bool:
        return file.is_file() and file.stat().st_size <= LARGEST_JSON and self._is_inside(file)

    def _is_inside(self, file: Path) -> bool:
        """Whether a file, with all links followed, is in this folder, or in the same repository of a cache."""
        root = self.path.resolve()
        # The cache of Hugging Face: models--name/snapshots/revision/file is a link to models--name/blobs/digest.
        if root.parent.name == "snapshots":
            root = root.parent.parent
        return file.resolve().is_relative_to(root)

    def _check_tokenizer(self, file: Path) -> None:
        check_regular_file(file)
        if not self._is_inside(file):
            raise RegardError(f"{file} is a link out of its folder, to {file.resolve()}; copy the file into the folder")

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by name. Files are memory-mapped: a tensor takes memory only when it is read.

        A tensor that is not aligned in its file is copied.
        """
        tensors: dict[str, Tensor] = {}
        for file in self._weight_files():
            # open_regular gives a clearer error than safetensors, and refuses a named pipe instead of waiting for it.
            with open_regular(file):
                pass
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 (not a dict)
                        if name in tensors:
                            raise RegardError(f"{name} is in {file.name} and in another file of {self.path}")
                        tensors[name] = aligned(opened.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise RegardError(f"{file} is truncated or not a safetensors file: {error}") from None
        if (self.path / INDEX).exists() and not (self.path / WEIGHTS).exists():
            missing = sorted(set(self._read_index()) - set(tensors))
            if missing:
                raise RegardError(f"{self.path / INDEX} names {shorten_list(missing)}, which its files do not hold")
        return tensors

    def _weight_files(self) -> list[Path]:
        """The safetensors files: one, or those that the index names."""
        if (self.path / WEIGHTS).exists():
            return [self.path / WEIGHTS]
        if (self.path / INDEX).exists():
            files = [self.path / name for name in sorted(set(self._read_index().values()))]
            for file in files:
                if not file.exists():
                    raise FileNotFoundError(f"{self.path / INDEX} names {file.name}, which does not exist")
            return files
        files = sorted(self.path.glob("*.safetensors"))
        if len(files) == 1:
            return files
        if files:
            names = ", ".join(file.name for file in files)
            raise RegardError(f"{self.path} has {names} but neither {WEIGHTS} nor {INDEX}, which lists the tensors")

        # No safetensors: if there are pickles, explain why they are not read.
        for pattern in ("*.bin", "*.pt", "*.pth"):
            for file in sorted(self.path.glob(pattern)):
                raise RegardError(
                    f"{self.path} has its weights in {file.name}, a pickle, which can run code and is never opened; "
                    "if you trust it, convert it with transformers: model.save_pretrained(folder) writes safetensors"
                )
        raise FileNotFoundError(f"{self.path} has no weights: neither {WEIGHTS} nor {INDEX}")

    def _read_index(self) -> dict[str, str]:
        """Tensor name → file name."""
        index = self.read_config(INDEX).get("weight_map")
        if not isinstance(index, Mapping):
            raise RegardError(f"{self.path / INDEX} has no weight_map from tensors to file names")
        for file in index.values():
            # A path with folders could lead out of the model's folder.
            if not isinstance(file, str) or not file or Path(file).name != file or file == "..":
                raise RegardError(f"{self.path / INDEX} names {file!r}; it must be the name of a file beside it")
        return dict(index)


def write_folder(
    path: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: dict[str, Tensor],
    extra_files: Mapping[str, bytes],
) -> None:
    """Write a model folder; every file is complete or absent, and ``config.json`` is written last."""
    if not str(path):
        raise RegardError("the folder to save to has no name")
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file; a model is saved as a folder")
    if (folder / INDEX).exists():  # its old files would stay beside the new one
        raise FileExistsError(f"{folder} holds a model in several files ({INDEX}); save into another folder")
    make_folder(folder)
    # Weights first: a folder without config.json is not a model yet.
    with atomic_write(folder / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    text = json.dumps(dict(config), indent=2, ensure_ascii=False) + "\n"
    for name, content in {**extra_files, "config.json": text.encode()}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with atomic_write(folder / name) as temporary:
            temporary.write_bytes(content)


def shorten_list(names: list[str], most: int = 3) -> str:
    """The first few of many names, for an error message of one line."""
    text = ", ".join(names[:most])
    if len(names) > most:
        text += f" and {len(names) - most} more"
    return text
