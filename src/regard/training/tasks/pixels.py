"""Pixels: digits classified by attention in a convolution's place, whose heads move to offsets around the query."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch

from regard.config import Config
from regard.models import ImageModel, relative_attention, resnet
from regard.training.recipe import Recipe
from regard.training.tasks.common import PARAMETERS, WIDEST, check_sizes, whole
from regard.training.tasks.picture_task import PictureTask
from regard.watching.probes import Probe

__all__ = ["PixelsTask"]


class PixelsTask(PictureTask):
    """``p(class | picture)`` pixel by pixel, in the manner of Cordonnier, Loukas and Jaggi (2020); data as in
    ``PictureTask``

    ``model.kind`` is the encoding of ``regard.models.relative_attention``, "quadratic", "relative" or "content", or
    "resnet": as many 3 × 3 convolutions as there are layers, in residual blocks, the control. ``model.value`` is D_o of
    a head: as wide as D, for then a second head at the same offset can add nothing. The first centres Δ of quadratic
    heads are drawn from N(0, ``model.spread``²), and α begins at ``model.alpha``. A residual network has no heads: what
    is said of them changes nothing, and nothing is recorded.
    """

    name: ClassVar[str] = "pixels"
    about: ClassVar[str] = "handwritten digits by attention in a convolution's place, or by convolutions"
    kinds: ClassVar[tuple[str, ...]] = (*relative_attention.ENCODINGS, "resnet")
    recipe: ClassVar[Recipe] = Recipe(
        task="pixels",
        steps=1500,
        batch=64,
        rate=3e-3,
        warmup=100,
        model={
            **{"kind": "quadratic", "d": 36, "heads": 9, "layers": 6, "hidden": 72, "value": 36, "patch": 1},
            **{"spread": 0.7, "alpha": 1.5},
        },
        data={"folder": "", "size": 8, "channels": 1, "shift": 0.75, "turn": 10.0, "zoom": 0.1},
    )

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.spread, self.alpha = float(recipe.model["spread"]), float(recipe.model["alpha"])
        if not 0 <= self.spread < 1e6:
            raise ValueError(f"model.spread is {self.spread:g}; it must be a number ≥ 0, of pixels")
        if not 0 < self.alpha < 1e6:
            raise ValueError(f"model.alpha is {self.alpha:g}; it must be a number > 0")
        check_sizes(recipe, self.channels * self.patch**2, hidden=self.kind != "resnet")
        d, heads, layers = (int(recipe.model[name]) for name in ("d", "heads", "layers"))
        value = whole(recipe, "model.value", most=WIDEST)
        count = layers * (9 * d * d if self.kind == "resnet" else 2 * d * heads * value)
        if count > PARAMETERS:
            sizes = f"model.d={d}, model.layers={layers}"
            sizes += "" if self.kind == "resnet" else f", model.heads={heads}, model.value={value}"
            raise ValueError(f"{sizes} make over {PARAMETERS:.0g} parameters; at most as many are trained here")
        if self.kind == "resnet" and layers % 2:
            raise ValueError(f"model.layers is {layers}; a resnet's must be even, two convolutions a block")

    def built(self, preprocessor: bytes) -> ImageModel:
        model = resnet.build(self._config(), lambda key: None) if self.kind == "resnet" else self._attending()
        model.beside = {"preprocessor_config.json": preprocessor}
        return model

    def _attending(self) -> relative_attention.RelativeAttention:
        model = relative_attention.build(self._config(), lambda key: None)
        if self.kind == "quadratic":
            for layer in model.attentions:
                torch.nn.init.normal_(layer.position.centers, std=self.spread)  # type: ignore[union-attr]
                torch.nn.init.constant_(layer.position.alpha, self.alpha)  # type: ignore[union-attr]
        return model

    def _config(self) -> Config:
        given = self.given.model
        if self.kind == "resnet":
            sizes: dict[str, Any] = {"d": given["d"], "convolutions": given["layers"]}
            return Config({"model_type": resnet.KINDS[0], **self.described(), **sizes})
        sizes = {name: given[name] for name in ("d", "heads", "layers", "hidden", "value")}
        kind = {"model_type": relative_attention.KINDS[0], "encoding": self.kind}
        return Config({**kind, **self.described(), **sizes})

    def probes(self) -> Sequence[Probe]:
        """None for a residual network, which has no heads."""
        return [] if self.kind == "resnet" else super().probes()
