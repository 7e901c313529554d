"""Task "digits": classify images with a vision transformer, or with attention alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from regard._config_json import Config
from regard.models import ImageModel, create
from regard.training._recipe import Recipe
from regard.training.image_models import attention_only
from regard.training.tasks.common import check_model_size, word_ids
from regard.training.tasks.image_task import ImageTask


class DigitsTask(ImageTask):
    """Predict the class of an image from its patches; for the data see ``ImageTask``.

    ``model.kind`` is "vit", or "attention": blocks without feed-forward networks, for which ``model.hidden`` is not
    used. ``regard.models.load`` reads both; ``transformers`` knows only the first.
    """

    name: ClassVar[str] = "digits"
    description: ClassVar[str] = "handwritten digits, or a folder of images: a small ViT, or attention alone"
    kinds: ClassVar[tuple[str, ...]] = ("vit", "attention")
    default_recipe: ClassVar[Recipe] = Recipe(
        task="digits",
        steps=2500,
        batch=128,
        rate=3e-3,
        model={"kind": "vit", "d": 64, "heads": 4, "layers": 3, "hidden": 128, "patch": 2},
        data={"folder": "", "size": 8, "channels": 1, "shift": 0.75, "turn": 10.0, "zoom": 0.1},
    )

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        # Embedding vectors: one per position, and one per input value of a patch.
        vectors = self.grid[0] * self.grid[1] + self.channels * self.patch**2
        check_model_size(recipe, vectors, hidden=self.kind == "vit")

    def create_model(self, extra_files: dict[str, bytes]) -> ImageModel:
        if self.kind == "vit":
            model = create(self._vit_config(), extra_files=extra_files, std=0.05)
        else:
            sizes = {name: self.recipe.model[name] for name in ("d", "heads", "layers")}
            config = {"model_type": attention_only.MODEL_TYPES[0], **self.image_config(), **sizes}
            model = attention_only.build(Config(config), lambda key: None)
            model.extra_files = extra_files
        assert isinstance(model, ImageModel)
        return model

    def _vit_config(self) -> dict[str, Any]:
        """Return ``config.json`` of a ViT."""
        sizes = self.recipe.model
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
            "id2label": self.id2label(),
            "label2id": word_ids(self.data.labels),
        }
