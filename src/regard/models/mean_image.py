"""What image models of ours share: patches of a picture, an encoder over them, a classifier of their mean."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.config import Config
from regard.models.image_model import ImageModel
from regard.models.keys import Table
from regard.nn.stack import Observations
from regard.nn.vit import cut_patches
from regard.observables import Observe

__all__ = ["MeanImageModel", "Vision", "cells"]


def cells(config: Config) -> tuple[int, int]:
    """(height, width) of a config's patches, which must tile the picture: ``side``/``patch`` each."""
    side, patch = config.whole("side"), config.whole("patch")
    if side % patch:
        raise ValueError(f"patch {patch} does not divide the side of a picture, {side}; patches must tile it")
    return side // patch, side // patch


class Vision(nn.Module):
    """What ``VisionTransformer`` is to a ViT: patches, an encoder of ``[B, N, D]`` and a head; here no class token."""

    def __init__(self, config: Config, encoder: nn.Module, labels: int) -> None:
        super().__init__()
        side, patch, d = (config.whole(name) for name in ("side", "patch", "d"))
        self.image, self.channels, self.grid = (side, side), config.whole("channels"), cells(config)
        self.patches = nn.Conv2d(self.channels, d, kernel_size=patch, stride=patch)
        self.encoder = encoder
        self.head = nn.Linear(d, labels)

    def patch_tokens(self, images: Tensor) -> Tensor:
        """``images [B, C, side, side] → [B, N, D]``: patches row by row; no positions."""
        return cut_patches(images, self.patches, self.image)


class MeanImageModel(ImageModel):
    """``x⁰ = pE``, ``y = Encoder(x⁰)``, ``logits = W mean_i y_i + b``

        image [C, side, side] cut into N = (side/P)² patches p [C·P²]      E [C·P², D]

    ``transformers`` has no such models; ``config.json`` says ``side``, ``channels``, ``patch``, ``d``, ``id2label`` and
    what the encoder is.
    """

    def __init__(self, config: Config, table: Table, vision: Vision) -> None:
        given: Any = vision  # it has what ImageModel asks of a ViT
        super().__init__(config, table, given)

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """Logits ``[B, classes]``; with ``observe`` also observations by module name."""
        result = self.hidden(images, observe=observe)
        y, seen = (result, None) if isinstance(result, Tensor) else result
        logits: Tensor = self.head(self.pooled(y))
        return logits if seen is None else (logits, seen)

    def pooled(self, y: Tensor) -> Tensor:
        """``y [B, N, D] → [B, D]``: the mean over the patches."""
        return y.mean(1)
