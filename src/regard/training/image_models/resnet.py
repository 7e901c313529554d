"""A small residual network of 3 × 3 convolutions: the control for attention in place of convolution."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from regard._config_json import Config
from regard._errors import RegardError
from regard._observables import Observe
from regard.models._checkpoint_keys import Key, TensorLookup
from regard.nn._stack import Observations
from regard.training.image_models.mean_pooled import MeanImageModel, PatchEncoder, image_key_table, patch_grid

MODEL_TYPES = ("regard-resnet",)
MAX_GROUPS = 8  # groups of channels that are normalised together

_PARTS = ("first_norm", "first", "second_norm", "second")
TABLE = image_key_table(*(Key(f"vit.encoder.blocks.{{i}}.{part}", f"blocks.{{i}}.{part}") for part in _PARTS))


class _Block(nn.Module):
    """``x ← x + conv(relu(norm(conv(relu(norm(x))))))``"""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first_norm = _group_norm(d)
        self.second_norm = _group_norm(d)
        self.first = nn.Conv2d(d, d, kernel_size=3, padding=1, bias=False)
        self.second = nn.Conv2d(d, d, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(F.relu(self.first_norm(x)))
        return x + self.second(F.relu(self.second_norm(y)))


class _Encoder(nn.Module):
    """The blocks on the grid of patches, then ``y = relu(norm(x^L))``:  x ``[B, N, D]`` → y ``[B, N, D]``"""

    def __init__(self, grid: tuple[int, int], d: int, blocks: int) -> None:
        super().__init__()
        self.grid = grid
        self.blocks = nn.Sequential(*(_Block(d) for _ in range(blocks)))
        self.norm = _group_norm(d)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        x = self.blocks(x_BND.mT.unflatten(-1, self.grid))
        y_BND: Tensor = F.relu(self.norm(x)).flatten(2).mT
        return y_BND if observe is None else (y_BND, {})  # there is no head to observe


class ResNet(MeanImageModel):
    """``x ← x + conv(relu(norm(conv(relu(norm(x))))))``, ``logits = W mean_i relu(norm(x^L))_i + b``

    ``config.json`` also contains ``convolutions``, an even number: two per block. The norms are over groups of channels
    of one image, so the output for an image does not depend on the others of its batch.
    """


def build(config: Config, stored: TensorLookup) -> ResNet:
    """Build the model that a config describes."""
    convolutions = config.layer_count("convolutions")
    if convolutions % 2:
        raise RegardError(f"config.json: convolutions is {convolutions}; it must be even, two per block")
    encoder = _Encoder(patch_grid(config), config.integer("d"), convolutions // 2)
    return ResNet(config, TABLE, PatchEncoder(config, encoder, config.class_count()))


def _group_norm(d: int) -> nn.GroupNorm:
    groups = max(count for count in range(1, MAX_GROUPS + 1) if d % count == 0)
    return nn.GroupNorm(groups, d)
