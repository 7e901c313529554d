"""The vision transformer: an encoder over image patches, with a class token for classification."""

from __future__ import annotations

from typing import Literal, Unpack

import torch
from torch import Tensor, nn

from regard._checks import check_dtype, check_integer, check_tensor
from regard._errors import RegardError
from regard._observables import Observe
from regard.nn._block import BlockOptions
from regard.nn._encoder import Encoder
from regard.nn._multi_head_attention import Position
from regard.nn._stack import Observations, split_position
from regard.positions import AddedToInput, Learned

Size = int | tuple[int, int]


class VisionTransformer(nn.Module):
    """``x⁰ = [x_class; p₁E; …; p_N E] + E_pos``, ``y = Encoder(x⁰)``, ``logits = head(y₀)``

        image [C, height, width] cut into N = (height/P)·(width/P) patches p [C·P²]      E [C·P², D]
        x_class [D]      E_pos [N + 1, D], learned, 1-D      y [N + 1, D], pre-norm blocks and a last norm

    E is a convolution with kernel = stride = patch. ``model.grid`` is (height/P, width/P).

    - ``image``, ``patch``: size of the images and of the patches, a number or (height, width).
    - ``classes``: number of classes.
    - ``d``, ``heads``, ``layers``: D, N_h and the number of blocks. ``hidden``: D_ff (default 4·D).
    - ``channels``: C (default 3).
    - ``head``: ``"hidden"`` (default, for pre-training) is ``tanh(y₀ W₁ + b₁) W₂ + b₂``; ``"linear"`` is one linear
      layer. ``fine_tune(classes)`` replaces the head by a linear one.
    - ``position``: a bias on scores (``Grid``, ``Quadratic`` …) or a ``Rotary``, used in every block besides E_pos; the
      class token comes before the grid and has no cell. A scheme that is added to the input (``Learned((h, w), d)`` …)
      replaces E_pos.
    - ``dropout``: probability (default 0).
    - further options are those of ``make_block``, with the defaults ``activation="gelu"`` and ``qkv_bias=True``.

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
        self.image = _pair("image", image)
        self.patch = _pair("patch", patch)
        self.channels = check_integer("channels", channels, least=1)
        self.d = check_integer("d", d, least=1)
        for side, size, patch_size in zip(("height", "width"), self.image, self.patch, strict=True):
            if size % patch_size:
                raise RegardError(
                    f"image {side} {size} is not divisible by patch {patch_size}; patches must tile the image"
                )
        # Rows and columns of patches.
        self.grid = (self.image[0] // self.patch[0], self.image[1] // self.patch[1])
        # E as a convolution whose windows do not overlap.
        self.patches = nn.Conv2d(channels, d, kernel_size=self.patch, stride=self.patch)
        self.class_token = nn.Parameter(torch.zeros(d))
        nn.init.normal_(self.class_token, std=0.02)
        # ViT's defaults; the caller's options win.
        options = {"activation": "gelu", "qkv_bias": True, **options}
        added_to_input, in_attention = split_position(position)
        self.encoder = Encoder(d, heads, layers, hidden=hidden, position=in_attention, dropout=dropout, **options)
        if added_to_input is None:
            added_to_input = Learned(self.grid[0] * self.grid[1] + 1, d)
        self.encoder.position = added_to_input
        self.head = _make_head(d, classes, head)

    def patch_tokens(self, images: Tensor) -> Tensor:
        """``images [B, C, height, width] → [B, N + 1, D]``: class token, then patches row by row, no positions."""
        x_BND = embed_patches(images, self.patches, self.image)
        first = self.class_token.expand(x_BND.shape[0], 1, self.d)  # [B, 1, D]
        return torch.cat([first, x_BND], dim=1)  # [B, N + 1, D]

    def features(self, images: Tensor) -> Tensor:
        """``images → y [B, N + 1, D]``, the encoder's output for the class token and for each patch."""
        return self.encoder(self.patch_tokens(images))

    def forward(self, images: Tensor, *, observe: Observe | None = None) -> Tensor | tuple[Tensor, Observations]:
        """``images [B, C, height, width] → logits [B, classes]``; with ``observe`` also observations by module name."""
        if observe is None:
            return self.head(self.features(images)[:, 0])
        y, observations = self.encoder(self.patch_tokens(images), observe=observe)
        return self.head(y[:, 0]), {f"encoder.{name}": value for name, value in observations.items()}

    def fine_tune(self, classes: int) -> VisionTransformer:
        """Replace the head by one linear layer to ``classes``, initially 0; returns the model."""
        head = _make_head(self.d, classes, "linear").to(self.class_token)
        # With zeros the new head does not disturb the trained encoder at first.
        nn.init.zeros_(head.weight)  # type: ignore[arg-type]
        self.head = head.train(self.training)
        return self


def embed_patches(images: Tensor, patches: nn.Conv2d, image: tuple[int, int]) -> Tensor:
    """``images [B, C, height, width] → [B, N, D]``: the embedded patches row by row; other sizes are refused."""
    check_tensor("images", images)
    expected = (patches.in_channels, *image)
    if images.ndim != 4 or tuple(images.shape[1:]) != expected:
        sizes = ", ".join(map(str, expected))
        raise RegardError(f"images have shape {list(images.shape)}; this model takes [batch, {sizes}]")
    check_dtype("images", images, patches)
    return patches(images).flatten(2).transpose(1, 2)  # [B, D, h, w] → [B, D, N] → [B, N, D]


def _make_head(d: int, classes: int, kind: str) -> nn.Module:
    classes = check_integer("classes", classes, least=1)
    if kind == "hidden":  # ViT's head for pre-training
        return nn.Sequential(nn.Linear(d, d), nn.Tanh(), nn.Linear(d, classes))
    if kind != "linear":
        raise RegardError(f'head must be "hidden" (one hidden layer) or "linear", got {kind!r}')
    linear = nn.Linear(d, classes)
    nn.init.zeros_(linear.bias)
    return linear


def _pair(name: str, size: Size) -> tuple[int, int]:
    if isinstance(size, tuple) and len(size) != 2:
        raise RegardError(f"{name} must be one integer or (height, width), got {size}; colours are channels=")
    if not isinstance(size, tuple):
        size = (size, size)
    return check_integer(name, size[0], least=1), check_integer(name, size[1], least=1)
