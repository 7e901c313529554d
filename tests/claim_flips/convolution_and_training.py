"""Flips of the claims on convolution, and on what heads become in training."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.claims.theorems.attention_learns_convolution import pixels
from regard.claims.theorems.convolution_needs_value_width import best, random_factors
from regard.convolution import AttentionConvolution, to_attention
from regard.models import bundled, load
from regard.models.model import Model
from regard.nn import MultiHeadAttention
from regard.training import Evolution, evolution


def changed(conv: nn.Conv2d, **what: Any) -> nn.Conv2d:
    """A copy with other attributes."""
    other = copy.deepcopy(conv)
    for name, value in what.items():
        setattr(other, name, value)
    return other


def flipped(conv: nn.Conv2d) -> AttentionConvolution:
    """The kernel turned by half a turn: offsets of the other sign."""
    other = copy.deepcopy(conv)
    with torch.no_grad():
        other.weight.copy_(conv.weight.flip(2, 3))
    return to_attention(other)


def narrower(matrix: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The best factors with the last direction lost."""
    value, out = best(matrix, width)
    value[..., -1] = 0
    return value, out


def weakened(model: Model) -> Model:
    """Queries made small: every head averages, as untrained ones do."""
    with torch.no_grad():
        for layer in attentions(model):
            for parameter in layer.q_proj.parameters():
                parameter.mul_(0.01)
    return model


def one_head(model: Model) -> Model:
    """All heads of a layer ask and answer as the first one does."""
    with torch.no_grad():
        for layer in attentions(model):
            for parameter in (*layer.q_proj.parameters(), *layer.k_proj.parameters()):
                parameter.copy_(torch.cat([parameter[: layer.d_key]] * layer.heads))
    return model


def attentions(model: Model) -> list[MultiHeadAttention]:
    return [module for module in model.modules() if isinstance(module, MultiHeadAttention)]


FLIPS: dict[str, list[dict[str, Any]]] = {
    "diagonal-attention-is-1x1-convolution": [
        {"alone": regard.Window(1)},  # neighbours too
        {"attend": lambda q, k, v, **how: regard.attention(q, k.roll(1, -2), v, **how)},  # keys of others
        {"attend": lambda q, k, v, **how: regard.attention(q, k, v, **(how | {"scale": math.inf}))},
    ],
    "band-of-thirds-is-convolution-3": [
        {"band": regard.Window(2, 0)},  # two before and oneself
        {"band": regard.Window(2)},
        {"kernel": lambda mix: mix.mT.unsqueeze(-1).expand(-1, -1, 3)},  # a sum, not a mean
    ],
    "attention-is-convolution": [
        {"convert": flipped},
        {"convert": lambda conv: to_attention(conv, alpha=3.0)},
        {"attend": lambda q, k, v, mask: regard.attention(q, k, v, mask=mask.roll(1, -1))},
        {"attend": lambda q, k, v, mask: regard.attention(q, k, v.roll(1, 1), mask=mask)},  # heads' values mixed up
    ],
    "dilated": [
        {"offsets": lambda dilation: [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]},  # contiguous
        {"offsets": lambda dilation: [(dilation * x, dilation * y) for y in (-1, 0, 1) for x in (-1, 0, 1)]},  # turned
        {"convert": lambda conv: to_attention(changed(conv, dilation=(1, 1), padding=(1, 1)))},
    ],
    "strided": [
        {"keep": lambda y, s: y[..., s - 1 :: s, s - 1 :: s]},  # the last of each cell
        {"convert": lambda conv, direct=True: to_attention(conv, direct=False)},  # nothing saved
        {"pools": {"first": lambda y, s: y[..., ::s, ::s]}},  # a pool that takes one
    ],
    "quadratic-encoding-realises-offsets": [
        {"make": lambda *size, centers, **how: regard.Quadratic(*size, centers=[[-y, -x] for y, x in centers], **how)},
        {"make": lambda *size, alpha, **how: regard.Quadratic(*size, alpha=alpha / 2, **how)},
        {"convert": lambda conv, alpha: to_attention(conv, alpha=alpha / 4)},
    ],
    "convolution-needs-value-width": [
        {"factors": random_factors},  # not the best ones
        {"factors": narrower},  # one narrower than said
        {"kernel": 1},  # D_o = D
    ],
    "offset-sign-is-convention": [
        {"turned": lambda shifts: shifts},  # the sign is lost
        {"turned": lambda shifts: [(-y, x) for y, x in shifts]},  # of rows alone
        {"flipped": lambda taps: taps},
    ],
    "heads-differ-in-a-trained-model": [
        {"trained": lambda: weakened(load(bundled()))},
        {"trained": lambda: one_head(load(bundled()))},
        {"record": lambda: Evolution(evolution(bundled()).records[:12])},  # before anything arose
    ],
    "heads-evolve": [
        {"record": lambda: Evolution(evolution(bundled()).records[:12])},
        {"record": lambda: Evolution(evolution(bundled()).records[::-1])},  # from the end to the beginning
        {"record": lambda: Evolution(evolution(bundled()).records[14:])},  # the beginning is lost
    ],
    "attention-learns-convolution": [
        {"pictures": lambda: pixels()[:, torch.randperm(64, generator=torch.Generator().manual_seed(7))]},  # scrambled
        {"rate": 0.0},  # nothing is learned
        {"loss": lambda layer, x, draw: (layer(x) - x.mean(1, keepdim=True)).square().mean()},  # the mean is asked for
    ],
}
