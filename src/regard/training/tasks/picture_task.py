"""Pictures to classes: scikit-learn's digits, MNIST's files or a folder; what every task of pictures shares."""

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

from regard.config import Config
from regard.models import ImageModel
from regard.models.images import Preprocessor
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks import pictures
from regard.training.tasks.common import check_batch, in_parts, own_path, summed, whole
from regard.watching.probes import Probe

__all__ = ["LARGEST", "PictureTask"]

ORDER, MOVED = 11, 12  # what is drawn
LARGEST = 2**12  # pixels a side


class PictureTask(Task):
    """``p(class | picture)``: scikit-learn's 1,797 digits, or what ``data.folder`` holds

    A folder has one sub-folder of PNG and JPEG files a class, or the four files of MNIST
    (``train-images-idx3-ubyte`` …, packed as ``.gz`` or not). A fifth of the pictures is held out: of the digits by one
    fixed shuffle, of a folder by a hash of each file's class and name, of MNIST those that its makers set apart. The
    others are moved at random in every epoch: ``data.shift`` pixels, ``data.turn`` degrees and a share ``data.zoom`` of
    the size, at most. ``data.size`` (pixels a side) and ``data.channels`` (1 or 3) are a folder's; the digits have 8
    and 1, MNIST 28 and 1.
    """

    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    unit: ClassVar[str] = "pictures"
    kinds: ClassVar[tuple[str, ...]]  # what ``model.kind`` may be
    data: pictures.Pictures

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.kind, self.patch = str(recipe.model["kind"]), whole(recipe, "model.patch", most=LARGEST)
        self.side, self.channels = whole(recipe, "data.size", most=LARGEST), int(recipe.data["channels"])
        told = recipe.data["folder"]
        self.folder = own_path("data.folder", told) if told else None
        if self.kind not in self.kinds:
            raise ValueError(f"model.kind is {self.kind!r}; it must be {' or '.join(self.kinds)}")
        if self.channels not in (1, 3):
            raise ValueError(f"data.channels is {self.channels}; it must be 1 (grey) or 3 (colours)")
        if self.side % self.patch:
            raise ValueError(f"model.patch is {self.patch}; it must divide data.size, which is {self.side}")
        if self.folder is None and (self.side, self.channels) != (8, 1):
            raise ValueError(
                f"data.size is {self.side} and data.channels {self.channels}; digits have 8 and 1, a data.folder any"
            )
        for name in ("shift", "turn", "zoom"):
            value = float(recipe.data[name])
            if not 0 <= value < (1 if name == "zoom" else math.inf):
                raise ValueError(f"data.{name} is {value:g}; it must be ≥ 0" + (" and < 1" if name == "zoom" else ""))
        check_batch(recipe, self.channels * self.side**2, "pixels")

    def prepare(self) -> None:
        """A folder's pictures as they are now: what comes or goes later does not change a run."""
        if self.folder is not None and self.prepared is not None and not (self.prepared / "classes.json").is_file():
            pictures.write(pictures.folder(self.folder, self.side, self.channels), self.prepared)

    def open(self) -> None:
        if self.folder is None:
            self.data = pictures.digits()
        elif self.prepared is None:
            self.data = pictures.folder(self.folder, self.side, self.channels)
        else:
            self.data = pictures.read(self.prepared)
        self.train = (~self.data.held_out).nonzero().squeeze(-1)

    def model(self) -> ImageModel:
        model = self.built(json.dumps(self.preprocessor(), indent=2).encode() + b"\n")
        model.images = Preprocessor(Config(self.preprocessor()), (self.side, self.side), self.channels)
        return model

    @abstractmethod
    def built(self, preprocessor: bytes) -> ImageModel:
        """A new model of ``self.kind``, with that file beside its weights."""

    def described(self) -> dict[str, Any]:
        """What ``config.json`` says of pictures, patches and classes, in models of ours."""
        return {
            **{"side": self.side, "channels": self.channels, "patch": self.patch},
            "id2label": {str(i): label for i, label in enumerate(self.data.labels)},
        }

    def preprocessor(self) -> dict[str, Any]:
        """How a picture becomes what the model was trained on: ``(byte / 255 − 1/2) / (1/2)``."""
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
        """Every picture once an epoch, in an order of its own; a batch may lie across two."""
        places = torch.arange(step * self.given.batch, (step + 1) * self.given.batch)
        epochs, at = places // len(self.train), places % len(self.train)
        which = torch.cat(
            [
                torch.randperm(len(self.train), generator=drawn(self.given.seed, ORDER, epoch))[at[epochs == epoch]]
                for epoch in epochs.unique().tolist()
            ]
        )
        images, labels = self._taken(self.train[which])
        return {"images": self._moved(images, drawn(self.given.seed, MOVED, step)), "labels": labels}

    def _taken(self, which: Tensor) -> tuple[Tensor, Tensor]:
        return self.data.pixels[which].float() / 255 * 2 - 1, self.data.classes[which]

    def _moved(self, images: Tensor, draw: torch.Generator) -> Tensor:
        """Each picture shifted, turned and zoomed by its own numbers; edges go on outside."""
        shift, turn, zoom = (float(self.given.data[name]) for name in ("shift", "turn", "zoom"))
        if not shift and not turn and not zoom:
            return images
        across, down, angle, size = (2 * torch.rand(4, len(images), generator=draw) - 1).unbind()
        angle, size = angle * math.radians(turn), 1 + size * zoom
        far = 2 * shift / self.side  # a picture goes from −1 to 1
        cos, sin = size * angle.cos(), size * angle.sin()
        map_ = torch.stack([torch.stack([cos, -sin, far * across], -1), torch.stack([sin, cos, far * down], -1)], 1)
        grid = F.affine_grid(map_, list(images.shape), align_corners=False)
        return F.grid_sample(images, grid, padding_mode="border", align_corners=False)

    def count(self, batch: Batch) -> int:
        return len(batch["labels"])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return summed(model(batch["images"]), batch["labels"])

    def checks(self) -> Sequence[Batch]:
        images, labels = self._taken(self.data.held_out.nonzero().squeeze(-1))
        return in_parts({"images": images, "labels": labels})

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        logits = model(batch["images"])
        right = (logits.argmax(-1) == batch["labels"]).sum()
        loss = summed(logits, batch["labels"])
        return {"loss": float(loss), "right": float(right), "pictures": float(len(logits))}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["pictures"], "accuracy": sums["right"] / sums["pictures"]}

    def probes(self) -> Sequence[Probe]:
        images = torch.cat([batch["images"] for batch in self.checks()])[:8]
        return [Probe("natural", images, torch.zeros(0, dtype=torch.bool))]

    @property
    def grid(self) -> tuple[int, int]:
        return self.side // self.patch, self.side // self.patch
