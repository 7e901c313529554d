"""Base class of the image models here: patches of an image, an encoder, and a classifier of the mean output."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard._config_json import Config
from regard._errors import RegardError
from regard._observables import Observe
from regard.models._checkpoint_keys import Key, KeyTable
from regard.models._image_model import ImageModel
from regard.nn._stack import Observations
from regard.nn._vision_transformer import embed_patches


def image_key_table(*encoder_keys: Key) -> KeyTable:
    """Return the names of a model's parts and their names in its file; only the keys of the encoder differ."""
    last = (Key("vit.encoder.norm", "norm"), Key("vit.head", "head"))
    return KeyTable(keys=(Key("vit.patches", "patches"), *encoder_keys, *last))


def patch_grid(config: Config) -> tuple[int, int]:
    """Return the number of patches (down, across); each is ``side / patch``, which must be an integer."""
    side = config.integer("side")
    patch = config.integer("patch")
    if side % patch:
        raise RegardError(f"config.json: patch is {patch}; it must divide side, which is {side}")
    return side // patch, side // patch


class PatchEncoder(nn.Module):
    """Patches, an encoder of ``[B, N, D]`` and a classifier: like ``VisionTransformer``, but without a class token."""

    def __init__(self, config: Config, encoder: nn.Module, labels: int) -> None:
        super().__init__()
        side = config.integer("side")
        patch = config.integer("patch")
        d = config.integer("d")
        self.image = (side, side)
        self.channels = config.integer("channels")
        self.grid = patch_grid(config)
        self.patches = nn.Conv2d(self.channels, d, kernel_size=patch, stride=patch)
        self.encoder = encoder
        self.head = nn.Linear(d, labels)

    def patch_tokens(self, images: Tensor) -> Tensor:
        """Embed ``images [B, C, side, side]`` as patches ``[B, N, D]``, row by row, without positions."""
        return embed_patches(images, self.patches, self.image)


class MeanImageModel(ImageModel):
    """``x⁰ = pE``, ``y = Encoder(x⁰)``, ``logits = W mean_i y_i + b``

        image [C, side, side] cut into N = (side/P)² patches p [C·P²]      E [C·P², D]

    ``transformers`` has no such models. ``config.json`` contains ``side``, ``channels``, ``patch``, ``d``, ``id2label``
    and the settings of the encoder.
    """

    def __init__(self, config: Config, table: KeyTable, vision: PatchEncoder) -> None:
        compatible: Any = vision  # it has every attribute that ImageModel uses of a VisionTransformer
        super().__init__(config, table, compatible)

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """Return logits ``[B, classes]``; with ``observe`` also the observations by module name."""
        result = self.hidden_states(images, observe=observe)
        if isinstance(result, Tensor):
            logits: Tensor = self.head(self.pooled(result))
            return logits
        y, observations = result
        return self.head(self.pooled(y)), observations

    def pooled(self, y: Tensor) -> Tensor:
        """Return the mean over the patches: ``y [B, N, D] → [B, D]``."""
        return y.mean(1)
