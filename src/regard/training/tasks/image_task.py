"""Base class of the image tasks: images to classes, from scikit-learn's digits, MNIST's files or a folder."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._config_json import Config
from regard._errors import RegardError
from regard.interp._probes import Probe
from regard.models import ImageModel
from regard.models._images import Preprocessor
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training.tasks import common
from regard.training.tasks.image_data import LabelledImages, load_digits, load_folder, read_images, write_images

MAX_SIDE = 2**12  # pixels

# Stream ids for seeded_generator: each purpose uses different random numbers.
ORDER = 11
AUGMENTATION = 12


class ImageTask(Task):
    """Predict the class of an image: scikit-learn's 1,797 digits, or the images in ``data.folder``.

    - ``data.folder``: a folder with one sub-folder of PNG and JPEG files per class, or with the four files of MNIST
      (``train-images-idx3-ubyte`` …, gzipped or not). Empty: the digits.
    - ``data.size``, ``data.channels``: pixels per side, and 1 or 3 channels. The digits have 8 and 1, MNIST 28 and 1.
    - ``data.shift``, ``data.turn``, ``data.zoom``: in every epoch, each training image is shifted, rotated and zoomed
      at random, by at most this many pixels, this many degrees, and this share of its size.

    A fifth of the images is held out. For the digits a fixed permutation decides which; for a folder, a hash of each
    file's class and name. For MNIST the test images are held out instead.
    """

    score: ClassVar[str] = "accuracy"
    unit: ClassVar[str] = "images"
    kinds: ClassVar[tuple[str, ...]]  # the accepted values of ``model.kind``
    data: LabelledImages

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.kind = str(recipe.model["kind"])
        self.patch = common.integer_setting(recipe, "model.patch", most=MAX_SIDE)
        self.side = common.integer_setting(recipe, "data.size", most=MAX_SIDE)
        self.channels = int(recipe.data["channels"])
        folder = recipe.data["folder"]
        self.folder = common.user_path("data.folder", folder) if folder else None
        if self.kind not in self.kinds:
            raise RegardError(f"model.kind is {self.kind!r}; it must be {' or '.join(self.kinds)}")
        if self.channels not in (1, 3):
            raise RegardError(f"data.channels is {self.channels}; it must be 1 (grey) or 3 (colours)")
        if self.side % self.patch:
            raise RegardError(f"model.patch is {self.patch}; it must divide data.size, which is {self.side}")
        if self.folder is None and (self.side, self.channels) != (8, 1):
            raise RegardError(f"data.size is {self.side} and data.channels {self.channels}; the digits have 8 and 1")
        # A zoom of 1 would shrink an image to a point.
        for name, limit in (("shift", math.inf), ("turn", math.inf), ("zoom", 1.0)):
            value = float(recipe.data[name])
            if not 0 <= value < limit:
                raise RegardError(f"data.{name} is {value:g}; it must be ≥ 0 and < {limit:g}")
        common.check_batch(recipe, self.channels * self.side**2, "pixels")

    def prepare(self) -> None:
        """Copy the images of a folder as they are now: later changes of the folder do not change the run."""
        if self.folder is not None and self.prepared is not None and not (self.prepared / "classes.json").is_file():
            write_images(load_folder(self.folder, self.side, self.channels), self.prepared)

    def open(self) -> None:
        if self.folder is None:
            self.data = load_digits()
        elif self.prepared is None:
            self.data = load_folder(self.folder, self.side, self.channels)
        else:
            self.data = read_images(self.prepared)
        self.train = (~self.data.held_out).nonzero().squeeze(-1)

    def model(self) -> ImageModel:
        settings = self.preprocessor_config()
        model = self.create_model({"preprocessor_config.json": json.dumps(settings, indent=2).encode() + b"\n"})
        model.preprocessor = Preprocessor(Config(settings), (self.side, self.side), self.channels)
        return model

    @abstractmethod
    def create_model(self, extra_files: dict[str, bytes]) -> ImageModel:
        """Return a new model of ``self.kind`` that saves these files beside its weights."""

    def image_config(self) -> dict[str, Any]:
        """Return the entries about images, patches and classes in ``config.json`` of the models of this package."""
        return {"side": self.side, "channels": self.channels, "patch": self.patch, "id2label": self.id2label()}

    def id2label(self) -> dict[str, str]:
        """Return the names of the classes by number, as ``config.json`` writes them."""
        return {str(i): label for i, label in enumerate(self.data.labels)}

    def preprocessor_config(self) -> dict[str, Any]:
        """Return how an image becomes the model's input: ``(byte / 255 − 1/2) / (1/2)``."""
        return {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.side, "width": self.side},
            "resample": 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5] * self.channels,
            "image_std": [0.5] * self.channels,
        }

    def batch(self, step: int) -> Batch:
        """Return the images of a step: every image once per epoch, in a new order."""
        chosen = [numbers for numbers, _ in common.examples_by_epoch(self.recipe, ORDER, step, len(self.train))]
        images, labels = self._select(self.train[torch.cat(chosen)])
        generator = seeded_generator(self.recipe.seed, AUGMENTATION, step)
        return {"images": self._augment(images, generator), "labels": labels}

    def _select(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        return self.data.pixels[indices].float() / 255 * 2 - 1, self.data.classes[indices]

    def _augment(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Shift, rotate and zoom each image by its own random numbers; pixels from outside repeat the border."""
        shift = float(self.recipe.data["shift"])
        max_angle = math.radians(float(self.recipe.data["turn"]))
        zoom = float(self.recipe.data["zoom"])
        if not shift and not max_angle and not zoom:
            return images
        # Numbers from −1 to 1, four per image.
        x, y, angle, size = (2 * torch.rand(4, len(images), generator=generator) - 1).unbind()
        angle = angle * max_angle
        size = 1 + size * zoom
        distance = 2 * shift / self.side  # in the coordinates of affine_grid an image spans −1 … 1
        cos = size * angle.cos()
        sin = size * angle.sin()
        rows = [torch.stack([cos, -sin, distance * x], -1), torch.stack([sin, cos, distance * y], -1)]
        grid = F.affine_grid(torch.stack(rows, 1), list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def count_predictions(self, batch: Batch) -> int:
        return len(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return common.summed_cross_entropy(model(batch["images"]), batch["labels"])

    def held_out_batches(self) -> Sequence[Batch]:
        images, labels = self._select(self.data.held_out.nonzero().squeeze(-1))
        return common.split_batches({"images": images, "labels": labels})

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = model(batch["images"])
        correct = (logits.argmax(-1) == batch["labels"]).sum()
        loss = common.summed_cross_entropy(logits, batch["labels"])
        return {"loss": float(loss), "right": float(correct), "images": float(len(logits))}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["images"], "accuracy": sums["right"] / sums["images"]}

    def probes(self) -> Sequence[Probe]:
        images = torch.cat([batch["images"] for batch in self.held_out_batches()])[:8]
        return [Probe("natural", images, torch.zeros(0, dtype=torch.bool))]

    @property
    def grid(self) -> tuple[int, int]:
        return self.side // self.patch, self.side // self.patch
