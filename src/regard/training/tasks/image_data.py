"""Labelled images: scikit-learn's digits, MNIST's files, or a folder with one sub-folder per class."""

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

from regard._config_json import Config, read_json
from regard._errors import RegardError
from regard._files import atomic_write, save_tensors, write_text
from regard.models._images import Preprocessor
from regard.training.tasks.mnist_files import is_mnist_folder, read_mnist

SUFFIXES = (".png", ".jpg", ".jpeg")
MAX_BYTES = 2**30  # of all images at the size of the model; more does not fit into memory


@dataclass(frozen=True)
class LabelledImages:
    """Images with their classes.

    - ``pixels [N, C, side, side]``: bytes.
    - ``classes [N]``: the class of each image.
    - ``held_out [N]``: whether an image is held out.
    - ``labels``: the names of the classes.
    """

    pixels: Tensor
    classes: Tensor
    held_out: Tensor
    labels: list[str]


def load_digits() -> LabelledImages:
    """Load scikit-learn's 1,797 handwritten digits of 8 × 8 pixels; a fixed fifth of them is held out.

    The data file is read directly: importing scikit-learn would load a second OpenMP library beside torch's.
    """
    package = find_spec("sklearn")
    file = None
    if package is not None and package.submodule_search_locations:
        file = Path(package.submodule_search_locations[0]) / "datasets/data/digits.csv.gz"
    if file is None or not file.is_file():
        raise ImportError("the digits are part of scikit-learn, which is not installed: pip install 'regard[train]'")
    with gzip.open(file, "rt") as opened:
        rows = torch.from_numpy(np.loadtxt(opened, delimiter=",", dtype=np.int64))
    # The values are 0 … 16. Convert them to bytes: a digit saved as a PNG file then has the same values as in training.
    pixels = (rows[:, :-1] * 255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8)
    # The same split on every machine, for every seed of a recipe.
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    held_out = torch.zeros(len(rows), dtype=torch.bool)
    held_out[order[: len(rows) // 5]] = True
    return LabelledImages(pixels, rows[:, -1], held_out, list(map(str, range(10))))


def load_mnist(path: Path, side: int, channels: int) -> LabelledImages:
    """Load the four files of MNIST, or of a dataset in the same format; its test images are held out."""
    if channels != 1:
        raise RegardError(f"data.channels is {channels}; the images in {path} are grey, so it must be 1")
    train_images, train_classes = read_mnist(path, "train")
    test_images, test_classes = read_mnist(path, "t10k")
    for images in (train_images, test_images):
        height, width = images.shape[1:]
        if (height, width) != (side, side):
            raise RegardError(f"data.size is {side}; the images in {path} are {height} × {width}, and must be square")
    pixels = torch.cat([train_images, test_images])
    classes = torch.cat([train_classes, test_classes])
    held_out = torch.arange(len(pixels)) >= len(train_images)
    class_count = int(classes.max()) + 1
    if class_count < 2:
        raise RegardError(f"all images in {path} are of class 0; there must be at least two classes")
    return LabelledImages(pixels.unsqueeze(1), classes.long(), held_out, list(map(str, range(class_count))))


def load_folder(path: Path, side: int, channels: int) -> LabelledImages:
    """Load the PNG and JPEG files of ``path/CLASS/…``, resized to ``side``; a hash holds out one in five.

    A folder with the files of MNIST is read as such.
    """
    if not path.is_dir():
        raise RegardError(f"data.folder is {path}, which is not a folder; it must have one sub-folder per class")
    if is_mnist_folder(path):
        return load_mnist(path, side, channels)
    labels = sorted(x.name for x in path.iterdir() if x.is_dir() and not x.name.startswith("."))
    if len(labels) < 2:
        raise RegardError(f"data.folder is {path} with {len(labels)} sub-folders; it must have at least two")

    # Read the names first: the number of files says whether the images fit into memory.
    files: list[Path] = []
    classes: list[int] = []
    held_out: list[bool] = []
    for number, label in enumerate(labels):
        for file in sorted((path / label).iterdir()):
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file():
                files.append(file)
                classes.append(number)
                held_out.append(is_held_out(f"{label}/{file.name}"))
    if len(files) * channels * side * side > MAX_BYTES:
        raise RegardError(f"{path} has {len(files):,} images, over 1 GiB at data.size={side}; give a smaller data.size")
    # A class without training images cannot be learned.
    trained = {number for number, is_out in zip(classes, held_out, strict=True) if not is_out}
    for number, label in enumerate(labels):
        if number not in trained:
            raise RegardError(f"{path / label} has no PNG or JPEG to train on (one in five is held out, by its name)")
    if True not in held_out:
        raise RegardError(f"{path} has {len(files)} images, and by their names none is held out; give more images")

    # The model's own preprocessor resizes, but bytes are kept as they are.
    read = Preprocessor(Config({"do_rescale": False, "do_normalize": False}), (side, side), channels)
    pixels = torch.cat([read(file).to(torch.uint8) for file in files])
    return LabelledImages(pixels, torch.tensor(classes), torch.tensor(held_out), labels)


def is_held_out(name: str) -> bool:
    """Whether a file is held out, by a hash of its class and name: new files do not change the split of old ones."""
    return hashlib.sha256(name.encode(errors="surrogateescape")).digest()[0] % 5 == 0


def write_images(images: LabelledImages, folder: Path) -> None:
    """Write ``pictures.safetensors`` and then ``classes.json``, whose presence shows that both are complete."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_write(folder / "pictures.safetensors") as temporary:
        tensors = {"pixels": images.pixels, "classes": images.classes, "held_out": images.held_out}
        save_tensors(tensors, temporary)
    write_text(json.dumps({"labels": images.labels}, ensure_ascii=False) + "\n", folder / "classes.json")


def read_images(folder: Path) -> LabelledImages:
    """Read what ``write_images`` wrote."""
    try:
        stored = load_file(folder / "pictures.safetensors")
        labels = read_json(folder / "classes.json")["labels"]
        return LabelledImages(stored["pixels"], stored["classes"], stored["held_out"], list(map(str, labels)))
    except (OSError, KeyError, SafetensorError) as error:
        raise RegardError(f"{folder} does not contain the images of a run: {error}") from None
