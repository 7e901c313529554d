"""Flips of the claims about convolution, and about what heads become in training."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.claims.theorems.attention_learns_convolution import pixels
from regard.claims.theorems.convolution_needs_value_width import best_factors, other_factors
from regard.convolution import AttentionConvolution, to_attention
from regard.models import bundled, load
from regard.models._model import Model
from regard.nn import MultiHeadAttention
from regard.training import Evolution, evolution


def with_attributes(conv: nn.Conv2d, **attributes: Any) -> nn.Conv2d:
    """A copy of a convolution with other attributes."""
    other = copy.deepcopy(conv)
    for name, value in attributes.items():
        setattr(other, name, value)
    return other


def flipped(conv: nn.Conv2d) -> AttentionConvolution:
    """The conversion of the flipped kernel: every offset has the other sign."""
    other = copy.deepcopy(conv)
    with torch.no_grad():
        other.weight.copy_(conv.weight.flip(2, 3))
    return to_attention(other)


def narrower(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best factors without their last direction."""
    value, out = best_factors(matrix, width)
    value[..., -1] = 0
    return value, out


def weakened(model: Model) -> Model:
    """A model with small queries: every head averages, as untrained heads do."""
    with torch.no_grad():
        for layer in attention_layers(model):
            for parameter in layer.q_proj.parameters():
                parameter.mul_(0.01)
    return model


def one_head(model: Model) -> Model:
    """A model whose heads all have the queries and keys of the first head of their layer."""
    with torch.no_grad():
        for layer in attention_layers(model):
            for parameter in (*layer.q_proj.parameters(), *layer.k_proj.parameters()):
                parameter.copy_(torch.cat([parameter[: layer.d_key]] * layer.heads))
    return model


def attention_layers(model: Model) -> list[MultiHeadAttention]:
    """All attention layers of a model."""
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


FLIPS: dict[str, list[dict[str, Any]]] = {
    "diagonal-attention-is-1x1-convolution": [
        {"alone": regard.Window(1)},  # neighbours are visible too
        {
            "attention_fn": lambda q, k, v, **options: regard.attention(q, k.roll(1, -2), v, **options)
        },  # the keys of other positions
        {"attention_fn": lambda q, k, v, **options: regard.attention(q, k, v, **(options | {"scale": math.inf}))},
    ],
    "band-of-thirds-is-convolution-3": [
        {"band": regard.Window(2, 0)},  # the two positions before, and itself
        {"band": regard.Window(2)},
        {"kernel": lambda mix: mix.mT.unsqueeze(-1).expand(-1, -1, 3)},  # a sum, not a mean
    ],
    "attention-is-convolution": [
        {"convert": flipped},
        {"convert": lambda conv: to_attention(conv, alpha=3.0)},
        {"attention_fn": lambda q, k, v, mask: regard.attention(q, k, v, mask=mask.roll(1, -1))},
        {
            "attention_fn": lambda q, k, v, mask: regard.attention(q, k, v.roll(1, 1), mask=mask)
        },  # the values of the wrong heads
    ],
    "dilated": [
        {"offsets": lambda dilation: [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]},  # contiguous
        {
            "offsets": lambda dilation: [(dilation * x, dilation * y) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        },  # rows and columns exchanged
        {"convert": lambda conv: to_attention(with_attributes(conv, dilation=(1, 1), padding=(1, 1)))},
    ],
    "strided": [
        {"keep": lambda y, s: y[..., s - 1 :: s, s - 1 :: s]},  # the last pixel of each cell
        {"convert": lambda conv, direct=True: to_attention(conv, direct=False)},  # saves nothing
        {"pools": {"first": lambda y, s: y[..., ::s, ::s]}},  # takes one pixel instead of pooling
    ],
    "quadratic-encoding-realises-offsets": [
        {
            "make": lambda *size, centers, **options: regard.Quadratic(
                *size, centers=[[-y, -x] for y, x in centers], **options
            )
        },
        {"make": lambda *size, alpha, **options: regard.Quadratic(*size, alpha=alpha / 2, **options)},
        {"convert": lambda conv, alpha: to_attention(conv, alpha=alpha / 4)},
    ],
    "convolution-needs-value-width": [
        {"factors": other_factors},  # not the best ones
        {"factors": narrower},  # one dimension less than claimed
    ],
    "offset-sign-is-convention": [
        {"negated": lambda shifts: shifts},  # without the sign
        {"negated": lambda shifts: [(-y, x) for y, x in shifts]},  # only rows change their sign
        {"flipped": lambda taps: taps},
    ],
    "heads-differ-in-a-trained-model": [
        {"trained": lambda: weakened(load(bundled()))},
        {"trained": lambda: one_head(load(bundled()))},
        {"record": lambda: Evolution(evolution(bundled()).records[:12])},  # before any head type appears
    ],
    "heads-evolve": [
        {"record": lambda: Evolution(evolution(bundled()).records[:12])},
        {"record": lambda: Evolution(evolution(bundled()).records[::-1])},  # backwards in time
        {"record": lambda: Evolution(evolution(bundled()).records[14:])},  # without the beginning
    ],
    "attention-learns-convolution": [
        {"pictures": lambda: pixels()[:, torch.randperm(64, generator=torch.Generator().manual_seed(7))]},  # scrambled
        {"rate": 0.0},  # nothing is learned
        {
            "loss": lambda layer, x, generator: (layer(x) - x.mean(1, keepdim=True)).square().mean()
        },  # needs only the mean
    ],
}
