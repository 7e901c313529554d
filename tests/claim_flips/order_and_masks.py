"""Flips of the claims on order, positions, masks and what reaches what."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.claims.theorems.distance_cannot_see_direction import sloped
from regard.claims.theorems.mask_placement import BY_THE_TEXT, CAUSAL, CROSS, PADDING, SOURCE, TARGET
from regard.claims.theorems.vit_patches_are_a_convolution import cut_by_hand
from regard.nn import Decoder, Encoder, MultiHeadAttention, VisionTransformer


class Pooled(MultiHeadAttention):
    """Gives every position the mean over positions: invariant, as the document says."""

    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        return out.mean(-2, keepdim=True).expand_as(out)


def equal_rows(length: int, d: int) -> regard.Learned:
    """A learned table that was started with one vector for all places."""
    table = regard.Learned(length, d)
    nn.init.ones_(table.weight)
    return table


class Chirp(regard.Sinusoidal):
    """Angles that grow as p²."""

    def code(self, n: int, start: int = 0) -> Tensor:
        return self.code_at(torch.arange(start, start + n))

    def code_at(self, at: Tensor) -> Tensor:
        return super().code_at(at**2)


class Leaky(Decoder):
    """Sees one position ahead."""

    def forward(self, x: Tensor, *, padding: Tensor | None = None) -> Any:  # type: ignore[override]
        near = regard.Causal(offset=1)
        return self.run(x, mask=near if padding is None else near & regard.Padding(padding))[0]


class Transposed(Encoder):
    """Reads a mask as [key, query]."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x, mask=mask.mT)


class Unmasked(Encoder):
    """Forgets its mask."""

    def forward(self, x: Tensor, *, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


def left(n: int, lengths: Tensor) -> Tensor:
    """Padding on the left."""
    return torch.arange(n) >= n - lengths.unsqueeze(-1)


def overlapping(**sizes: Any) -> VisionTransformer:
    """A kernel that is larger than the stride: each patch sees its neighbours' edge."""
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
        {"sees": lambda d: nn.Identity()},
    ],
    "position-breaks-symmetry": [
        {"distance": lambda: regard.RelativeTable(2, 5)},  # the sign is there: holds as written
        {"signed": lambda heads, c: regard.ALiBi()},  # the sign is lost
        {"learned": equal_rows},
        {"sinusoidal": lambda d: regard.Sinusoidal(d, grid=(1, 1))},  # codes the last word alone
    ],
    "sinusoid-offsets-are-linear": [
        {"code": lambda d: regard.Learned(100_200, d)},
        {"code": Chirp},
        {"code": lambda d: regard.Sinusoidal(d - 1)},
        {"attend": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},
    ],
    "causal-mask": [
        {"mask": lambda: regard.Causal(offset=1)},
        {"mask": lambda: regard.Window(9)},
        {"make": Encoder},
        {"attend": lambda q, k, v, mask: regard.attention(q, k, v, bias=-20.0 * ~mask.dense(q.shape[-2], k.shape[-2]))},
    ],
    "padding-mask": [
        {"hide": lambda real: None},
        {"hide": lambda real: regard.Padding(~real)},  # torch's convention, True = ignore
        {"hide": lambda real: regard.Padding(real | real.roll(1, -1))},  # off by one
        {"attend": lambda q, k, v, mask: regard.attention(q, k, v, bias=-1.0 * ~mask.keys[:, None, None])},
    ],
    "causal-makes-right-padding-free": [
        {"make": Encoder},
        {"place": left},
        {"make": lambda d, heads, layers: Leaky(d, heads, layers)},
    ],
    "mask-placement": [
        {"placement": {**BY_THE_TEXT, "encoder–decoder": {SOURCE: PADDING, TARGET: CAUSAL}}},  # no mask on the source
        {"placement": {**BY_THE_TEXT, "encoder–decoder": {CROSS: PADDING, TARGET: CAUSAL}}},
        {"placement": {**BY_THE_TEXT, "decoder": {TARGET: PADDING}}},
        {"placement": {**BY_THE_TEXT, "encoder": {SOURCE: CAUSAL}}},  # hides what is real
        {"place": left},
    ],
    "distance-cannot-see-direction": [
        {"offset": lambda heads, reach, lean, seed: sloped(heads, reach, 0.0, seed)},  # the sign is lost
        {"causal": lambda: regard.Window(99)},  # hides nothing
        {"distance": lambda heads: regard.ALiBi([0.0] * heads)},
    ],
    "information-flows-to-the-query": [
        {"make": Transposed},
        {"make": Unmasked},
        {"attend": lambda q, k, v, bias: regard.attention(q, k, v, bias=bias.mT)},
    ],
    "vit-patches-are-a-convolution": [
        {"cut": lambda images, patch: cut_by_hand(images.transpose(2, 3), patch[::-1])},  # column by column
        {"cut": lambda images, patch: cut_by_hand(images.roll(1, -1), patch)},  # off by one pixel
        {"make": overlapping},
    ],
    "receptive-field": [
        {"join": lambda x, moved: moved},  # no residual
        {"attend": lambda q, k, v, scale: regard.attention(q, k, v, scale=0.01)},  # soft: reaches everything
        {"attend": lambda q, k, v, scale: regard.attention(-q, k, v, scale=scale)},  # the farthest instead
    ],
}
