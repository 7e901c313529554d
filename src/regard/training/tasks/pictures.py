"""Labelled pictures: scikit-learn's digits, MNIST's files, or a folder with one sub-folder a class."""

from __future__ import annotations

import gzip
import hashlib
import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from regard.config import Config, read_json
from regard.files import renamed, save_tensors
from regard.models.images import Preprocessor
from regard.training.tasks import idx

__all__ = ["Pictures", "digits", "folder", "mnist", "read", "write"]

SUFFIXES = (".png", ".jpg", ".jpeg")
CELLS = 2**30  # bytes of all pictures at their size; more does not belong in memory


@dataclass(frozen=True)
class Pictures:
    """Bytes ``pixels [N, C, side, side]``, their classes ``[N]``, which are held out ``[N]``, and names of classes."""

    pixels: Tensor
    classes: Tensor
    held_out: Tensor
    labels: list[str]


def digits() -> Pictures:
    """The 1,797 handwritten digits of 8 × 8 pixels that scikit-learn brings; a fifth is held out, the same for all.

    The file is read as it is: importing scikit-learn would load a second OpenMP beside torch's.
    """
    found = find_spec("sklearn")
    places = [] if found is None else found.submodule_search_locations or []
    file = next((x for x in (Path(place) / "datasets/data/digits.csv.gz" for place in places) if x.is_file()), None)
    if file is None:
        raise ImportError("the digits come with scikit-learn, which is not there: pip install 'regard[train]'")
    with gzip.open(file, "rt") as opened:
        rows = torch.from_numpy(np.loadtxt(opened, delimiter=",", dtype=np.int64))
    # Values are 0 … 16; as bytes, so that a digit saved as a PNG is read as it was trained on.
    pixels = (rows[:, :-1] * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out = torch.zeros(len(rows), dtype=torch.bool)
    held_out[order[: len(rows) // 5]] = True
    return Pictures(pixels, rows[:, -1], held_out, [str(i) for i in range(10)])


def mnist(path: Path, side: int, channels: int) -> Pictures:
    """MNIST's four files, or others of that form; those that its makers set apart for testing are held out."""
    if channels != 1:
        raise ValueError(f"data.channels is {channels}; the pictures in {path} are grey: give 1")
    parts = [idx.read(path, name) for name in ("train", "t10k")]
    for images, _ in parts:
        if tuple(images.shape[1:]) != (side, side):
            height, width = images.shape[1:]
            right = f"give data.size={width}" if height == width else "square ones are learned from"
            raise ValueError(f"data.size is {side}; pictures in {path} are {height} × {width}: {right}")
    held_out = torch.cat([torch.full((len(images),), at == 1) for at, (images, _) in enumerate(parts)])
    pixels, classes = (torch.cat([part[i] for part in parts]) for i in range(2))
    if not int(classes.max()):
        raise ValueError(f"the pictures in {path} are all of class 0; two classes at least are told apart")
    return Pictures(pixels.unsqueeze(1), classes.long(), held_out, [str(i) for i in range(int(classes.max()) + 1)])


def folder(path: Path, side: int, channels: int) -> Pictures:
    """PNG and JPEG files of ``path/CLASS/…``, resized to ``side``; one in five is held out, by a hash of its name.

    A folder with MNIST's files is read as such.
    """
    if not path.is_dir():
        raise ValueError(f"data.folder is {path}, which is no folder; it has one sub-folder a class")
    if idx.there(path):
        return mnist(path, side, channels)
    labels = sorted(x.name for x in path.iterdir() if x.is_dir() and not x.name.startswith("."))
    if len(labels) < 2:
        raise ValueError(f"data.folder {path} has {len(labels)} sub-folders; two classes at least are told apart")
    files = [
        (number, file)
        for number, label in enumerate(labels)
        for file in sorted((path / label).iterdir())
        if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
    ]
    if len(files) * channels * side * side > CELLS:
        raise ValueError(f"{path} has {len(files):,} pictures, over 1 GiB at data.size={side}; give a smaller size")
    held_out = [held(f"{labels[number]}/{file.name}") for number, file in files]
    for number, label in enumerate(labels):
        parts = {x for (which, _), x in zip(files, held_out, strict=True) if which == number}
        if False not in parts:
            raise ValueError(f"{path / label} has no PNG or JPEG to train on (one in five is held out, by its name)")
    if True not in held_out:
        raise ValueError(f"{path} has {len(files)} pictures, of which none is held out; give more")
    plain = Preprocessor(Config({"do_rescale": False, "do_normalize": False}), (side, side), channels)
    pixels = torch.cat([plain(file).to(torch.uint8) for _, file in files])
    return Pictures(pixels, torch.tensor([number for number, _ in files]), torch.tensor(held_out), labels)


def held(name: str) -> bool:
    """Whether a file is held out: a hash of its class and name, so that new files move no old ones."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()[0] % 5 == 0


def write(pictures: Pictures, where: Path) -> None:
    """``pictures.safetensors`` and, last, ``classes.json``."""
    where.mkdir(parents=True, exist_ok=True)
    with renamed(where / "pictures.safetensors") as temporary:
        tensors = {"pixels": pictures.pixels, "classes": pictures.classes, "held_out": pictures.held_out}
        save_tensors(tensors, temporary)
    with renamed(where / "classes.json") as temporary:
        temporary.write_text(json.dumps({"labels": pictures.labels}, ensure_ascii=False) + "\n", encoding="utf-8")


def read(where: Path) -> Pictures:
    """What ``write`` wrote."""
    try:
        stored = load_file(where / "pictures.safetensors")
        labels = read_json(where / "classes.json")["labels"]
        return Pictures(stored["pixels"], stored["classes"], stored["held_out"], [str(x) for x in labels])
    except (OSError, KeyError, SafetensorError) as error:
        raise ValueError(f"{where} does not hold the pictures of a run: {error}") from None
