"""Checks that mapping the patches of an image linearly is a convolution whose kernel and stride are the patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import VisionTransformer

TOLERANCE = 1e-12
# Channels, size of the image, size of a patch.
SHAPES = ((3, (12, 12), (4, 4)), (1, (6, 10), (3, 5)), (2, (8, 8), (1, 1)), (3, (8, 8), (8, 8)))


def cut_by_hand(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """``[B, C, height, width] → [B, N, C·P₁·P₂]``: patches row by row, each read channel by channel."""
    B, C, height, width = images.shape
    rows = height // patch[0]
    columns = width // patch[1]
    tiles = images.reshape(B, C, rows, patch[0], columns, patch[1])
    return tiles.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * patch[0] * patch[1])


def build_model(make: Callable[..., Any], shape: tuple[int, tuple[int, int], tuple[int, int]], d: int) -> Any:
    """A small model for images of that shape, in float64."""
    channels, image, patch = shape
    return make(image=image, patch=patch, classes=2, d=d, heads=1, layers=1, channels=channels).double()


def linear_map(kernel: Tensor, patches: Tensor, bias: Tensor | None) -> Tensor:
    """Patches times E, where E is the kernel ``[D, C, P₁, P₂]`` read as a matrix ``[D, C·P₁·P₂]``."""
    return nn.functional.linear(patches, kernel.flatten(1), bias)


def partition_error(images: Tensor, patch: tuple[int, int], cut: Callable[[Tensor, tuple[int, int]], Tensor]) -> float:
    """Return the largest difference between cut patches and a convolution with one-pixel kernels, which only cuts."""
    size = images.shape[1] * patch[0] * patch[1]
    kernel = torch.eye(size, dtype=images.dtype).view(size, images.shape[1], *patch)
    by_kernel = nn.functional.conv2d(images, kernel, stride=patch).flatten(2).mT
    return largest_difference(by_kernel, cut(images, patch))


def shift_errors(model: Any, images: Tensor, side: int) -> tuple[list[int], list[float]]:
    """Compare the patches of an image shifted by s pixels with the patches shifted by s/P, rounded."""
    shifts = list(range(side + 1))
    errors = []
    with torch.no_grad():
        grid = model.patches(images)
        for s in shifts:
            shifted_grid = grid.roll(round(s / model.patch[1]), -1)
            errors.append(float((model.patches(images.roll(s, -1)) - shifted_grid).norm() / grid.norm()))
    return shifts, errors


def check(
    *,
    d: int = 8,
    batch: int = 2,
    seed: int = 0,
    make: Callable[..., Any] = VisionTransformer,
    cut: Callable[[Tensor, tuple[int, int]], Tensor] = cut_by_hand,
) -> Evidence:
    """Compare the patch tokens of a model with cut patches times a matrix, for several sizes."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    worst = 0.0
    partition = 0.0
    flipped = []
    columns = []
    for shape in SHAPES:
        model = build_model(make, shape, d)
        patch = shape[2]
        images = random_normal(generator, batch, shape[0], *shape[1])
        kernel = model.patches.weight.detach()
        bias = model.patches.bias.detach()
        with torch.no_grad():
            tokens = model.patch_tokens(images)[:, 1:]  # without the class token
            patches = cut(images, patch)
            worst = max(worst, largest_difference(tokens, linear_map(kernel, patches, bias)))
            flipped.append(largest_difference(tokens, linear_map(kernel.flip(2, 3), patches, bias)))
            columns.append(largest_difference(tokens, linear_map(kernel.transpose(2, 3), patches, bias)))
        partition = max(partition, partition_error(images, patch, cut))
    sizes = f"{len(SHAPES)} sizes of image and patch"
    evidence.add_statement("Patch embedding is the convolution.", worst < TOLERANCE, f"{sizes}: within {worst:.1e}")
    evidence.add_statement(
        "Partitioning is a convolution with one-pixel kernels.", partition == 0, f"difference {partition:g}"
    )

    # Controls: their statements must be false.
    # A flipped kernel or another reading order pairs pixels with other entries of the kernel.
    evidence.add_control(
        "The two agree if the kernel is flipped, as in the mathematical definition of convolution.",
        flipped[0] < TOLERANCE,
    )
    evidence.add_control(
        "The two agree if patches are read column by column.", columns[0] < TOLERANCE, f"difference {columns[0]:.2g}"
    )
    model = build_model(make, SHAPES[0], d)
    line = shift_errors(model, random_normal(generator, 1, 3, 12, 12), 12)
    evidence.add_series(
        "patches of a shifted image against shifted patches", {"4 × 4 patches": line}, x="pixels", y="difference"
    )
    evidence.numbers |= {"largest difference": worst, "partitioning": partition, "kernel turned round": flipped[0]}
    return evidence


CLAIM = Claim(
    id="vit-patches-are-a-convolution",
    title="The patches of a vision transformer are a convolution with kernel = stride",
    citations=(("homework-3", "1.5 (a)"),),
    papers=("dosovitskiy-2021",),
    statement="The patches of a vision transformer, cut from the image and each mapped by one matrix, are a "
    "convolution whose kernel and stride are the patch (in the sense of deep learning, where the kernel is not "
    "flipped).",
    formula=r"x_{r,c} = E \operatorname{vec}\left(I_{rP:(r+1)P,\; cP:(c+1)P}\right) + b \allowbreak "
    r"= (W * I)_{rP,\,cP} + b, \qquad E = \operatorname{vec}(W)",
    refuted_by="An image and a kernel for which the two differ by more than rounding.",
    control="A flipped kernel, and patches read column by column: neither must agree.",
    verdict=HOLDS,
    check=check,
)
