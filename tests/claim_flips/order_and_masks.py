"""Flips of the claims about order, positions, masks and the flow of information."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.claims.theorems.causal_makes_right_padding_free import pad_left
from regard.claims.theorems.distance_cannot_see_direction import random_table
from regard.claims.theorems.mask_placement import BY_THE_TEXT, CAUSAL, CROSS, PADDING, SOURCE, TARGET
from regard.claims.theorems.vit_patches_are_a_convolution import cut_by_hand
from regard.nn import Decoder, Encoder, MultiHeadAttention, VisionTransformer


class Pooled(MultiHeadAttention):
    """A layer that gives every position the mean over positions, which is invariant, as the document says."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        return out.mean(-2, keepdim=True).expand_as(out)


def equal_rows(length: int, d: int) -> regard.Learned:
    """A learned table with one vector for all positions."""
    table = regard.Learned(length, d)
    nn.init.ones_(table.weight)
    return table


class Chirp(regard.Sinusoidal):
    """A sinusoidal code whose angles grow as p²."""

    def encoding(self, n: int, start: int = 0) -> Tensor:
        return self.encoding_at(torch.arange(start, start + n))

    def encoding_at(self, at: Tensor) -> Tensor:
        return super().encoding_at(at**2)


class Leaky(Decoder):
    """A decoder that sees one position ahead."""

    def forward(self, x: Tensor, *, padding: Tensor | None = None) -> Any:  # type: ignore[override]
        near = regard.Causal(offset=1)
        return self.run_blocks(x, mask=near if padding is None else near & regard.Padding(padding))[0]


class Transposed(Encoder):
    """An encoder that reads a mask as [key, query]."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, mask=mask.mT)


class Unmasked(Encoder):
    """An encoder that ignores its mask."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


def overlapping(**sizes: Any) -> VisionTransformer:
    """A model whose patches also contain an edge of their neighbour."""
    model = VisionTransformer(**sizes)

    class Wide(nn.Conv2d):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) + 0.1 * super().forward(images.roll(1, -1))

    model.patches = Wide(model.channels, model.d, model.patch, stride=model.patch)
    return model


FLIPS: dict[str, list[dict[str, Any]]] = {
    "order-blind": [
        {"make": lambda d, heads, mask=None: MultiHeadAttention(d, heads, position=regard.Rotary(d // heads))},
        {"make": lambda d, heads, mask=None: MultiHeadAttention(d, heads, mask=regard.Causal())},
        {"make": Pooled},
        {"position": lambda d: nn.Identity()},
    ],
    "position-breaks-symmetry": [
        {"distance": lambda: regard.RelativeTable(2, 5)},  # has the sign, so the statement holds
        {"signed": lambda heads, c: regard.ALiBi()},  # without the sign
        {"learned": equal_rows},
        {"sinusoidal": lambda d: regard.Sinusoidal(d, grid=(1, 1))},  # codes only the last word
    ],
    "sinusoid-offsets-are-linear": [
        {"code": lambda d: regard.Learned(100_200, d)},
        {"code": Chirp},
        {"code": lambda d: regard.Sinusoidal(d - 1)},
        {"attention_fn": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},
    ],
    "causal-mask": [
        {"mask": lambda: regard.Causal(offset=1)},
        {"mask": lambda: regard.Window(9)},
        {"make": Encoder},
        {
            "attention_fn": lambda q, k, v, mask: regard.attention(
                q, k, v, bias=-20.0 * ~mask.dense(q.shape[-2], k.shape[-2])
            )
        },
    ],
    "padding-mask": [
        {"hide": lambda real: None},
        {"hide": lambda real: regard.Padding(~real)},  # torch's convention, True = ignore
        {"hide": lambda real: regard.Padding(real | real.roll(1, -1))},  # off by one
        {"attention_fn": lambda q, k, v, mask: regard.attention(q, k, v, bias=-1.0 * ~mask.keys[:, None, None])},
    ],
    "causal-makes-right-padding-free": [
        {"make": Encoder},
        {"place": pad_left},
        {"make": lambda d, heads, layers: Leaky(d, heads, layers)},
    ],
    "mask-placement": [
        {
            "placement": {**BY_THE_TEXT, "encoder–decoder": {SOURCE: PADDING, TARGET: CAUSAL}}
        },  # no mask for cross-attention
        {"placement": {**BY_THE_TEXT, "encoder–decoder": {CROSS: PADDING, TARGET: CAUSAL}}},
        {"placement": {**BY_THE_TEXT, "decoder": {TARGET: PADDING}}},
        {"placement": {**BY_THE_TEXT, "encoder": {SOURCE: CAUSAL}}},  # hides real tokens
        {"place": pad_left},
    ],
    "distance-cannot-see-direction": [
        {"offset": lambda heads, reach, lean, seed: random_table(heads, reach, 0.0, seed)},  # without the sign
        {"causal": lambda: regard.Window(99)},  # a window that hides nothing
        {"distance": lambda heads: regard.ALiBi([0.0] * heads)},
    ],
    "information-flows-to-the-query": [
        {"make": Transposed},
        {"make": Unmasked},
        {"attention_fn": lambda q, k, v, bias: regard.attention(q, k, v, bias=bias.mT)},
    ],
    "vit-patches-are-a-convolution": [
        {"cut": lambda images, patch: cut_by_hand(images.transpose(2, 3), patch[::-1])},  # column by column
        {"cut": lambda images, patch: cut_by_hand(images.roll(1, -1), patch)},  # off by one pixel
        {"make": overlapping},
    ],
    "receptive-field": [
        {"join": lambda x, attended: attended},  # no residual
        {
            "attention_fn": lambda q, k, v, scale: regard.attention(q, k, v, scale=0.01)
        },  # soft attention reaches everything
        {
            "attention_fn": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)
        },  # attends to the farthest position
    ],
}
