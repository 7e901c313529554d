"""Digits: pictures to classes, with a vision transformer or with attention alone; or pictures of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from regard.config import Config
from regard.models import ImageModel, attention_only, create
from regard.training.recipe import Recipe
from regard.training.tasks.common import check_sizes
from regard.training.tasks.picture_task import PictureTask

__all__ = ["DigitsTask"]


class DigitsTask(PictureTask):
    """``p(class | picture)`` from patches; data as ``PictureTask`` says

    ``model.kind`` is "vit", or "attention": blocks without a feed-forward network, so that ``model.hidden`` is not
    asked for. Such a model is saved for ``regard.models.load``; ``transformers`` has none.
    """

    name: ClassVar[str] = "digits"
    about: ClassVar[str] = "handwritten digits, or a folder of pictures: a small ViT, or attention alone"
    kinds: ClassVar[tuple[str, ...]] = ("vit", "attention")
    recipe: ClassVar[Recipe] = Recipe(
        task="digits",
        steps=2500,
        batch=128,
        rate=3e-3,
        warmup=100,
        model={"kind": "vit", "d": 64, "heads": 4, "layers": 3, "hidden": 128, "patch": 2},
        data={"folder": "", "size": 8, "channels": 1, "shift": 0.75, "turn": 10.0, "zoom": 0.1},
    )

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        vectors = self.grid[0] * self.grid[1] + self.channels * self.patch**2
        check_sizes(recipe, vectors, hidden=self.kind == "vit")

    def built(self, preprocessor: bytes) -> ImageModel:
        beside = {"preprocessor_config.json": preprocessor}
        if self.kind == "vit":
            model = create(self._vit(), beside=beside, std=0.05)
        else:
            sizes = {name: self.given.model[name] for name in ("d", "heads", "layers")}
            config = {"model_type": attention_only.KINDS[0], **self.described(), **sizes}
            model = attention_only.build(Config(config), lambda key: None)
            model.beside = beside
        assert isinstance(model, ImageModel)
        return model

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
