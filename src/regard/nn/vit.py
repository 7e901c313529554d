"""The vision transformer: an image as a sequence of patches, read by an encoder, classified from one extra token."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from regard.nn.block import BlockOptions
from regard.nn.encoder import Encoder
from regard.nn.multihead import Position
from regard.nn.stack import Observations, split_position
from regard.observables import Observe
from regard.positions import AddedToInput, Learned
from regard.positions.common import check_dtype
from regard.shapes import check_tensor, integer

__all__ = ["VisionTransformer", "cut_patches"]

Size = int | tuple[int, int]


class VisionTransformer(nn.Module):
    """``x⁰ = [x_class; p₁E; …; p_N E] + E_pos``, ``y = Encoder(x⁰)``, ``logits = head(y₀)``

        image [C, height, width] cut into N = (height/P)·(width/P) patches p [C·P²]      E [C·P², D]
        x_class [D]      E_pos [N + 1, D], learned, 1-D      y [N + 1, D], pre-norm blocks and a last norm

    E is a convolution with kernel = stride = patch. The head has one hidden layer (``head="hidden"``, for
    pre-training): ``tanh(y₀ W₁ + b₁) W₂ + b₂``, or is one linear map (``head="linear"``); ``fine_tune(classes)`` swaps
    the former for the latter. ``hidden`` is 4·D unless given; other options are those of ``make_block``, with
    ``activation="gelu"`` and ``qkv_bias=True``.

    ``position``: a bias on scores (``Grid``, ``Quadratic`` …) or a ``Rotary``, used in every block beside E_pos; the
    class token stands before the grid, on no cell. What is added to the input (``Learned((h, w), d)`` …) is added
    instead of E_pos. ``model.grid`` is (height/P, width/P).

    >>> model = VisionTransformer(image=6, patch=2, classes=5, d=6, heads=3, layers=2)
    >>> model(torch.zeros(2, 3, 6, 6)).shape
    torch.Size([2, 5])
    >>> model.fine_tune(7)(torch.zeros(2, 3, 6, 6)).shape
    torch.Size([2, 7])
    """

    def __init__(
        self,
        image: Size,
        patch: Size,
        classes: int,
        d: int,
        heads: int,
        layers: int,
        hidden: int | None = None,
        *,
        channels: int = 3,
        head: Literal["hidden", "linear"] = "hidden",
        position: Position | AddedToInput | None = None,
        dropout: float = 0.0,
        **options: Unpack[BlockOptions],
    ) -> None:
        super().__init__()
        self.image, self.patch = _pair("image", image), _pair("patch", patch)
        self.channels, self.d = integer("channels", channels, least=1), integer("d", d, least=1)
        for side, size, step in zip(("height", "width"), self.image, self.patch, strict=True):
            if size % step:
                raise ValueError(f"image {side} {size} is not divisible by patch {step}; patches must tile the image")
        self.grid = (self.image[0] // self.patch[0], self.image[1] // self.patch[1])
        self.patches = nn.Conv2d(channels, d, kernel_size=self.patch, stride=self.patch)
        self.class_token = nn.Parameter(torch.zeros(d))
        nn.init.normal_(self.class_token, std=0.02)
        options = {"activation": "gelu", "qkv_bias": True, **options}
        added, inside = split_position(position)
        self.encoder = Encoder(d, heads, layers, hidden=hidden, position=inside, dropout=dropout, **options)
        self.encoder.position = Learned(self.grid[0] * self.grid[1] + 1, d) if added is None else added
        self.head = _head(d, classes, head)

    def patch_tokens(self, images: Tensor) -> Tensor:
        """``images [B, C, height, width] → [B, N + 1, D]``: the class token, then patches row by row; no positions."""
        x_BND = cut_patches(images, self.patches, self.image)
        first = self.class_token.expand(x_BND.shape[0], 1, self.d)
        return torch.cat([first, x_BND], dim=1)

    def features(self, images: Tensor) -> Tensor:
        """``images → y [B, N + 1, D]``, what the encoder makes of the class token and of each patch."""
        return self.encoder(self.patch_tokens(images))

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """``images [B, C, height, width] → logits [B, classes]``; with ``observe`` also observations by module name."""
        if observe is None:
            return self.head(self.features(images)[:, 0])
        y, seen = self.encoder(self.patch_tokens(images), observe=observe)
        return self.head(y[:, 0]), {f"encoder.{name}": part for name, part in seen.items()}

    def fine_tune(self, classes: int) -> VisionTransformer:
        """Replace the head by one linear map to ``classes``, initially 0; everything else stays. Returns the model."""
        head = _head(self.d, classes, "linear").to(self.class_token)
        nn.init.zeros_(head.weight)  # type: ignore[arg-type]
        self.head = head.train(self.training)
        return self


def cut_patches(images: Tensor, patches: nn.Conv2d, image: tuple[int, int]) -> Tensor:
    """``images [B, C, height, width] → [B, N, D]``: E as a convolution, patches row by row; other sizes are refused."""
    check_tensor("images", images)
    expected = (patches.in_channels, *image)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected:
        raise ValueError(
            f"images have shape {list(images.shape)}; this model takes [batch, {', '.join(map(str, expected))}]"
        )
    check_dtype("images", images, patches)
    return patches(images).flatten(2).transpose(1, 2)


def _head(d: int, classes: int, kind: str) -> nn.Module:
    classes = integer("classes", classes, least=1)
    if kind == "hidden":
        return nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, classes))
    if kind != "linear":
        raise ValueError(f'head must be "hidden" (one hidden layer) or "linear", got {kind!r}')
    linear = nn.Linear(d, classes)
    nn.init.zeros_(linear.bias)
    return linear


def _pair(name: str, size: Size) -> tuple[int, int]:
    if isinstance(size, tuple) and len(size) != 2:
        raise ValueError(f"{name} must be one whole number or (height, width), got {size}; colours are channels=")
    height, width = size if isinstance(size, tuple) else (size, size)
    return integer(name, height, least=1), integer(name, width, least=1)
