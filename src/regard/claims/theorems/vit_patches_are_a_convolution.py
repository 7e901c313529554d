"""Cutting an image into patches and mapping each linearly is a convolution with kernel = stride = patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import VisionTransformer

TIGHT = 1e-12
SHAPES = ((3, (12, 12), (4, 4)), (1, (6, 10), (3, 5)), (2, (8, 8), (1, 1)), (3, (8, 8), (8, 8)))


def cut_by_hand(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """``[B, C, height, width] → [B, N, C·P₁·P₂]``: patches row by row, each read channel by channel."""
    B, C, height, width = images.shape
    rows, columns = height // patch[0], width // patch[1]
    tiles = images.reshape(B, C, rows, patch[0], columns, patch[1])
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * patch[0] * patch[1])


def made(make: Callable[..., Any], shape: tuple[int, tuple[int, int], tuple[int, int]], d: int) -> Any:
    """A small model for images of that shape, in float64."""
    channels, image, patch = shape
    return make(image=image, patch=patch, classes=2, d=d, heads=1, layers=1, channels=channels).double()


def flattened(kernel: Tensor, patches: Tensor, bias: Tensor | None) -> Tensor:
    """The linear map: E is the kernel ``[D, C, P₁, P₂]`` read as a matrix ``[D, C·P₁·P₂]``."""
    return nn.functional.linear(patches, kernel.flatten(1), bias)


def pure(images: Tensor, patch: tuple[int, int], cut: Callable[[Tensor, tuple[int, int]], Tensor]) -> float:
    """Partitioning alone: a convolution whose kernels are one pixel each, against the cut patches."""
    size = images.shape[1] * patch[0] * patch[1]
    kernel = torch.eye(size, dtype=images.dtype).view(size, images.shape[1], *patch)
    by_kernel = nn.functional.conv2d(images, kernel, stride=patch).flatten(2).mT
    return float((by_kernel - cut(images, patch)).abs().max())


def shifted(model: Any, images: Tensor, side: int) -> tuple[list[int], list[float]]:
    """How far patches of an image moved by s pixels are from the patches moved by s/P, rounded."""
    shifts = list(range(side + 1))
    P, far = model.patch[1], []
    with torch.no_grad():
        grid = model.patches(images)
        for s in shifts:
            far.append(float((model.patches(images.roll(s, -1)) - grid.roll(round(s / P), -1)).norm() / grid.norm()))
    return shifts, far


def check(
    *,
    d: int = 8,
    batch: int = 2,
    seed: int = 0,
    make: Callable[..., Any] = VisionTransformer,
    cut: Callable[[Tensor, tuple[int, int]], Tensor] = cut_by_hand,
) -> Evidence:
    """A model's patch tokens against cut patches times a matrix, for several sizes; and partitioning by itself."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    worst, alone, flipped, columns = 0.0, 0.0, [], []
    for shape in SHAPES:
        model, patch = made(make, shape, d), shape[2]
        images = torch.randn(batch, shape[0], *shape[1], generator=draw, dtype=torch.float64)
        kernel, bias = model.patches.weight.detach(), model.patches.bias.detach()
        with torch.no_grad():
            tokens, patches = model.patch_tokens(images)[:, 1:], cut(images, patch)
            worst = max(worst, float((tokens - flattened(kernel, patches, bias)).abs().max()))
            flipped.append(float((tokens - flattened(kernel.flip(2, 3), patches, bias)).abs().max()))
            columns.append(float((tokens - flattened(kernel.transpose(2, 3), patches, bias)).abs().max()))
        alone = max(alone, pure(images, patch, cut))
    many = f"{len(SHAPES)} sizes of image and patch"
    found.written("patch embedding is the convolution", worst < TIGHT, f"{many}: within {worst:.1e}")
    found.written("partitioning is a convolution with one-pixel kernels", alone == 0, f"difference {alone:g}")
    found.control("the same with the kernel turned round, as convolution in mathematics has it", flipped[0] < TIGHT)
    found.control("the same with patches read column by column", columns[0] < TIGHT, f"{columns[0]:.2g} off")
    model = made(make, SHAPES[0], d)
    shifts, far = shifted(model, torch.randn(1, 3, 12, 12, generator=draw, dtype=torch.float64), 12)
    found.draw(
        "patches of a shifted image against shifted patches",
        {"4 × 4 patches": (shifts, far)},
        x="pixels",
        y="difference",
    )
    found.numbers |= {"largest difference": worst, "partitioning": alone, "kernel turned round": flipped[0]}
    return found


CLAIM = Claim(
    id="vit-patches-are-a-convolution",
    sources=("002",),
    statement="A vision transformer's patches, cut from the image and each mapped by one matrix, are a convolution "
    "whose kernel and stride are the patch (in the sense of deep learning, with a kernel that is not turned round).",
    formula=r"x_{r,c} = E \operatorname{vec}\left(I_{rP:(r+1)P,\; cP:(c+1)P}\right) + b \allowbreak "
    r"= (W * I)_{rP,\,cP} + b, \qquad E = \operatorname{vec}(W)",
    refuted="An image and a kernel for which the two differ by more than rounding.",
    control="The kernel turned round, and patches read column by column, asked whether they agree.",
    verdict=HOLDS,
    check=check,
)
