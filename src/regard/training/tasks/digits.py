"""Digits: pictures to classes, with a vision transformer or with attention alone; or pictures of your own."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Config
from regard.models import ImageModel, Model, attention_only, create
from regard.models.images import Preprocessor
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.tasks import pictures
from regard.training.tasks.common import check_batch, check_sizes, in_parts, own_path, summed, whole
from regard.watching.probes import Probe

__all__ = ["DigitsTask"]

ORDER, MOVED = 11, 12  # what is drawn
KINDS = ("vit", "attention")
LARGEST = 2**12  # pixels a side


class DigitsTask(Task):
    """``p(class | picture)``: scikit-learn's 1,797 digits, or ``data.folder`` with one sub-folder a class

    A fifth of the pictures is held out: of the digits by one fixed shuffle, of a folder by a hash of each file's class
    and name. The others are moved at random in every epoch: ``data.shift`` pixels, ``data.turn`` degrees and a share
    ``data.zoom`` of the size, at most. ``data.size`` (pixels a side) and ``data.channels`` (1 or 3) are a folder's; the
    digits have 8 and 1. ``model.kind`` is "vit", or "attention": blocks without a feed-forward network, so that
    ``model.hidden`` is not asked for. Such a model is saved for ``regard.models.load``; ``transformers`` has none.
    """

    name: ClassVar[str] = "digits"
    about: ClassVar[str] = "handwritten digits, or a folder of pictures: a small ViT, or attention alone"
    recipe: ClassVar[Recipe] = Recipe(
        task="digits",
        steps=2500,
        batch=128,
        rate=3e-3,
        warmup=100,
        model={"kind": "vit", "d": 64, "heads": 4, "layers": 3, "hidden": 128, "patch": 2},
        data={"folder": "", "size": 8, "channels": 1, "shift": 0.75, "turn": 10.0, "zoom": 0.1},
    )
    score: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    unit: ClassVar[str] = "pictures"
    data: pictures.Pictures

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.kind, self.patch = str(recipe.model["kind"]), whole(recipe, "model.patch", most=LARGEST)
        self.side, self.channels = whole(recipe, "data.size", most=LARGEST), int(recipe.data["channels"])
        told = recipe.data["folder"]
        self.folder = own_path("data.folder", told) if told else None
        if self.kind not in KINDS:
            raise ValueError(f"model.kind is {self.kind!r}; it must be {' or '.join(KINDS)}")
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
        vectors = self.grid[0] * self.grid[1] + self.channels * self.patch**2
        check_sizes(recipe, vectors, hidden=self.kind == "vit")

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
        beside = {"preprocessor_config.json": self._preprocessor()}
        model: Model
        if self.kind == "attention":
            model = attention_only.build(Config(self._attention_only()), lambda key: None)
            model.beside = beside
        else:
            model = create(self._vit(), beside=beside, std=0.05)
        assert isinstance(model, ImageModel)
        model.images = Preprocessor(Config(json.loads(self._preprocessor())), (self.side, self.side), self.channels)
        return model

    def _attention_only(self) -> dict[str, Any]:
        """``config.json`` of attention alone."""
        return {
            "model_type": attention_only.KINDS[0],
            **{"side": self.side, "channels": self.channels, "patch": self.patch},
            **{name: self.given.model[name] for name in ("d", "heads", "layers")},
            "id2label": {str(i): label for i, label in enumerate(self.data.labels)},
        }

    def _vit(self) -> dict[str, Any]:
        """``config.json`` of a ViT."""
        sizes, labels = self.given.model, self.data.labels
        return {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "image_size": self.side,
            "patch_size": self.patch,
            "num_channels": self.channels,
            "hidden_size": sizes["d"],
            "num_attention_heads": sizes["heads"],
            "num_hidden_layers": sizes["layers"],
            "intermediate_size": sizes["hidden"],
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-6,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "label2id": {label: i for i, label in enumerate(labels)},
        }

    def _preprocessor(self) -> bytes:
        """How a picture becomes what the model was trained on: ``(byte / 255 − 1/2) / (1/2)``."""
        settings = {
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
        return json.dumps(settings, indent=2).encode() + b"\n"

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
