"""Task "pixels": classify digits by attention in place of convolution; its heads learn pixel offsets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from regard._config_json import Config
from regard._errors import RegardError
from regard.interp._probes import Probe
from regard.models import ImageModel
from regard.positions import Quadratic
from regard.training._recipe import Recipe
from regard.training.image_models import relative_attention, resnet
from regard.training.tasks.common import MAX_PARAMETERS, MAX_WIDTH, check_model_size, integer_setting
from regard.training.tasks.image_task import ImageTask


class PixelsTask(ImageTask):
    """Predict the class of an image whose pixels are the tokens, after Cordonnier, Loukas and Jaggi (2020).

    The settings of the data are those of ``ImageTask``.

    - ``model.kind``: the position encoding of ``image_models.relative_attention``, "quadratic", "relative" or
      "content"; or "resnet", the control: residual blocks with ``model.layers`` 3 × 3 convolutions in all.
    - ``model.value``: the value width D_o. If D_o = D (both are 36 by default), a second head at the same offset
      cannot represent anything that one head cannot.
    - ``model.spread``, ``model.alpha``: quadratic heads start with centres Δ ~ N(0, spread²) and with this α.

    A residual network has no heads: the settings of heads are checked but not used, and nothing is recorded.
    """

    name: ClassVar[str] = "pixels"
    description: ClassVar[str] = "handwritten digits by attention in place of convolution, or by convolutions"
    kinds: ClassVar[tuple[str, ...]] = (*relative_attention.ENCODINGS, "resnet")
    default_recipe: ClassVar[Recipe] = Recipe(
        task="pixels",
        steps=1500,
        batch=64,
        rate=3e-3,
        model={
            **{"kind": "quadratic", "d": 36, "heads": 9, "layers": 6, "hidden": 72, "value": 36, "patch": 1},
            **{"spread": 0.7, "alpha": 1.5},
        },
        data={"folder": "", "size": 8, "channels": 1, "shift": 0.75, "turn": 10.0, "zoom": 0.1},
    )

    def __init__(self, recipe: Recipe, prepared: Path | None = None) -> None:
        super().__init__(recipe, prepared)
        self.is_resnet = self.kind == "resnet"
        self.spread = float(recipe.model["spread"])
        self.alpha = float(recipe.model["alpha"])
        if not 0 <= self.spread < 1e6:
            raise RegardError(f"model.spread is {self.spread:g}; it must be a number of pixels ≥ 0 and < 1e6")
        if not 0 < self.alpha < 1e6:
            raise RegardError(f"model.alpha is {self.alpha:g}; it must be a number > 0 and < 1e6")
        check_model_size(recipe, self.channels * self.patch**2, hidden=not self.is_resnet)
        d = int(recipe.model["d"])
        heads = int(recipe.model["heads"])
        layers = int(recipe.model["layers"])
        value = integer_setting(recipe, "model.value", most=MAX_WIDTH)

        # check_model_size does not count convolutions, and it assumes heads of width d / heads, not model.value.
        sizes = f"model.d={d}, model.layers={layers}"
        if self.is_resnet:
            count = layers * 9 * d * d
        else:
            count = layers * 2 * d * heads * value
            sizes += f", model.heads={heads}, model.value={value}"
        if count > MAX_PARAMETERS:
            raise RegardError(f"{sizes} make about {count:.1g} parameters; at most {MAX_PARAMETERS:.0g} are accepted")
        if self.is_resnet and layers % 2:
            raise RegardError(f"model.layers is {layers}; it must be even for a resnet: a block has two convolutions")

    def create_model(self, extra_files: dict[str, bytes]) -> ImageModel:
        model: ImageModel
        if self.is_resnet:
            model = resnet.build(self._config(), lambda key: None)
        else:
            model = relative_attention.build(self._config(), lambda key: None)
        for module in model.modules():
            if isinstance(module, Quadratic):
                nn.init.normal_(module.centers, std=self.spread)
                nn.init.constant_(module.alpha, self.alpha)
        model.extra_files = extra_files
        return model

    def _config(self) -> Config:
        settings = self.recipe.model
        if self.is_resnet:
            config: dict[str, Any] = {"model_type": resnet.MODEL_TYPES[0], **self.image_config()}
            return Config(config | {"d": settings["d"], "convolutions": settings["layers"]})
        config = {"model_type": relative_attention.MODEL_TYPES[0], "encoding": self.kind, **self.image_config()}
        return Config(config | {name: settings[name] for name in ("d", "heads", "layers", "hidden", "value")})

    def probes(self) -> Sequence[Probe]:
        """Return the probes; none for a residual network, which has no heads."""
        return [] if self.is_resnet else super().probes()
