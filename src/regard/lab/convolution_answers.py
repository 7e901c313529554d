"""The room «convolution»: what ``regard.convolution`` computes for a request, in float64."""

from __future__ import annotations

import math
import threading
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from regard.convolution import AttentionConvolution, to_attention
from regard.lab.convolution import Convolve, Errors, Heads, Mode
from regard.lab.endpoints import Bytes
from regard.observables import Observe

__all__ = ["both", "convolution", "errors", "heads"]

# That torch copies the picture to pad an even kernel is no news to whoever chose one.
warnings.filterwarnings("ignore", message="Using padding='same' with even", category=UserWarning)

# Threads that each do many small tensor operations wait for one another and are all slower: one at a time.
TURN = threading.Lock()

MOST = 24_000_000  # weights of all heads that one answer computes


def convolution(kernel: list[list[float]], *, mode: Mode, stride: int, dilation: int) -> nn.Conv2d:
    """The layer with this kernel: one channel, no bias, padded so that an output pixel stands at each s-th pixel.

    An even kernel reaches further to one side; "same" pads for that, which torch has for stride 1 alone.
    """
    side = len(kernel)
    if any(len(row) != side for row in kernel):
        raise ValueError(f"the kernel's rows are {', '.join(str(len(row)) for row in kernel)} long; it must be square")
    padding: Any = "same" if stride == 1 else dilation * (side - 1) // 2
    conv = nn.Conv2d(
        1,
        1,
        side,
        stride=stride,
        dilation=dilation,
        padding=padding,
        padding_mode=mode,
        bias=False,
        dtype=torch.float64,
    )
    with torch.no_grad():
        conv.weight.copy_(torch.tensor(kernel, dtype=torch.float64))
    return conv


def _picture(rows: list[list[float]]) -> Tensor:
    """``[1, 1, height, width]``"""
    if len({len(row) for row in rows}) != 1:
        raise ValueError("the picture's rows have different lengths; they must be equal")
    return torch.tensor(rows, dtype=torch.float64)[None, None]


def _laid(asked: Convolve | Errors) -> tuple[nn.Conv2d, Tensor]:
    """The layer and the picture; what torch would refuse in its own words is refused in ours."""
    conv = convolution(asked.kernel, mode=asked.mode, stride=asked.stride, dilation=asked.dilation)
    x = _picture(asked.picture)
    _check(conv, x)
    return conv, x


def _check(conv: nn.Conv2d, x: Tensor) -> None:
    geometry = to_attention(conv).geometry
    height, width = x.shape[-2:]
    widest, least = max(*geometry.before, *geometry.after), min(height, width)
    if (geometry.mode == "reflect" and widest >= least) or (geometry.mode == "circular" and widest > least):
        raise ValueError(
            f"{geometry.mode} takes {widest} pixels of padding from a side of {least}; use another padding"
        )
    queries = math.prod(len(axis) for axis in geometry.answered((height, width)))
    reach = zip((height, width), geometry.before, geometry.after, strict=True)
    weights = len(geometry.shifts) * queries * math.prod(n + b + a for n, b, a in reach)
    if weights > MOST:
        raise ValueError(
            f"{weights:,} weights are more than the {MOST:,} computed here; take a smaller picture or kernel"
        )


def _hard(alpha: float | None) -> float:
    return math.inf if alpha is None else alpha


@torch.no_grad()
def both(asked: Convolve) -> dict[str, Any]:
    """Both outputs, their difference, and what the library says that it can be at most."""
    conv, x = _laid(asked)
    layer = to_attention(conv, alpha=_hard(asked.alpha))
    with TURN:
        right, found = conv(x)[0, 0], layer(x)[0, 0]
    off = found - right
    geometry = layer.geometry
    return {
        "convolution": right.tolist(),
        "attention": found.tolist(),
        "difference": off.tolist(),
        "largest": float(off.abs().max()),
        "bound": float(layer.error_bound(x).max()),
        "padded": geometry.padded(x)[0, 0].tolist(),
        "before": list(geometry.before),
        "shifts": [list(shift) for shift in layer.shifts],
    }


@torch.no_grad()
def errors(asked: Errors) -> dict[str, Any]:
    """The largest difference for each α, and the bound."""
    conv, x = _laid(asked)
    right = conv(x)
    told: dict[str, list[float]] = {"alphas": [], "errors": [], "bounds": []}
    for alpha in asked.alphas:
        layer = to_attention(conv, alpha=alpha)
        told["alphas"].append(alpha)
        with TURN:  # for each α anew, so that others come in between
            told["errors"].append(float((layer(x) - right).abs().max()))
        told["bounds"].append(float(layer.error_bound(x).max()))
    return told


@torch.no_grad()
def heads(asked: Heads) -> Bytes:
    """All heads' weights from one output pixel. Values play no part, so the picture may be any of this size."""
    kernel = [[1.0] * asked.size] * asked.size
    conv = convolution(kernel, mode="zeros", stride=asked.stride, dilation=asked.dilation)
    x = torch.zeros(1, 1, asked.height, asked.width, dtype=torch.float64)
    _check(conv, x)
    layer = to_attention(conv, alpha=_hard(asked.alpha))
    with TURN:
        weights = _weights(layer, x, asked.row, asked.column)
    shape = ",".join(str(n) for n in weights.shape)
    return Bytes(weights.float().numpy().astype("<f4").tobytes(), headers=(("x-shape", shape),))


def _weights(layer: AttentionConvolution, x: Tensor, row: int, column: int) -> Tensor:
    """``[heads, height, width]`` on the padded picture."""
    asked, queries, keys = layer._tokens(x)
    rows, columns = (len(axis) for axis in asked)
    if row >= rows or column >= columns:
        raise ValueError(f"there is no output pixel ({row}, {column}); the output is {rows} × {columns}")
    at = row * columns + column
    _, seen = layer.attention(queries[:, at : at + 1], keys, observe=Observe(keep=True))
    found = torch.stack([seen.weights(head)[0] for head in range(len(layer.shifts))])
    return found.unflatten(-1, layer.geometry.padded(x).shape[-2:])
