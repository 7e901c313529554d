"""A small residual network of 3 × 3 convolutions: what attention in a convolution's place is held against."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from regard.config import Config
from regard.models.bert import classes
from regard.models.keys import Key, Stored, Table
from regard.models.mean_image import MeanImageModel, Vision, cells
from regard.nn.stack import Observations
from regard.observables import Observe

__all__ = ["KINDS", "TABLE", "ResNet", "build"]

KINDS = ("regard-resnet",)
GROUPS = 8  # of channels that are normed together, at most

_PARTS = ("first_norm", "first", "second_norm", "second")
TABLE = Table(
    keys=(
        Key("vit.patches", "patches"),
        *(Key(f"vit.encoder.blocks.{{i}}.{part}", f"blocks.{{i}}.{part}") for part in _PARTS),
        Key("vit.encoder.norm", "norm"),
        Key("vit.head", "head"),
    )
)


class _Block(nn.Module):
    """``x ← x + conv(relu(norm(conv(relu(norm(x))))))``"""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = (nn.GroupNorm(_groups(d), d) for _ in range(2))
        self.first, self.second = (nn.Conv2d(d, d, kernel_size=3, padding=1, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(F.relu(self.first_norm(x)))
        return x + self.second(F.relu(self.second_norm(y)))


class _Encoder(nn.Module):
    """The blocks in turn on the grid of patches, ``y = relu(norm(x^L))``:  x ``[B, N, D]`` → y ``[B, N, D]``"""

    def __init__(self, grid: tuple[int, int], d: int, blocks: int) -> None:
        super().__init__()
        self.grid = grid
        self.blocks = nn.Sequential(*(_Block(d) for _ in range(blocks)))
        self.norm = nn.GroupNorm(_groups(d), d)

    def forward(self, x_BND: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        x = self.blocks(x_BND.mT.unflatten(-1, self.grid))
        y_BND: Tensor = F.relu(self.norm(x)).flatten(2).mT
        return y_BND if observe is None else (y_BND, {})  # no head, nothing to observe


class ResNet(MeanImageModel):
    """``x ← x + conv(relu(norm(conv(relu(norm(x))))))``, ``logits = W mean_i relu(norm(x^L))_i + b``

    ``config.json`` also says ``convolutions``, an even number: two a block. Norms are over groups of channels of one
    picture, so that a picture's answer does not hang on the others of its batch.
    """


def build(config: Config, stored: Stored) -> ResNet:
    """The model that a config describes."""
    many = config.layers("convolutions")
    if many % 2:
        raise ValueError(f"config.json: convolutions is {many}; it must be even, two a block")
    encoder = _Encoder(cells(config), config.whole("d"), many // 2)
    return ResNet(config, TABLE, Vision(config, encoder, classes(config)))


def _groups(d: int) -> int:
    return max(g for g in range(1, GROUPS + 1) if d % g == 0)
