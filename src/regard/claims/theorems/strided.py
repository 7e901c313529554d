"""A strided convolution: attention at every s-th query, or subsampled; not pooled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from regard.budget.flops_of_ops import register
from regard.claims.claim import FAILS, Claim, Evidence
from regard.convolution import to_attention

POOLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda y, s: F.avg_pool2d(y, s, ceil_mode=True),
    "max": lambda y, s: F.max_pool2d(y, s, ceil_mode=True),
}


def every(y: Tensor, stride: int) -> Tensor:
    """Every s-th row and column."""
    return y[..., ::stride, ::stride]


def counted(layer: nn.Module, x: Tensor) -> int:
    """Products of a call."""
    register()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(x)
    return int(counter.get_total_flops())


def drawn(channels: int, stride: int, draw: torch.Generator) -> nn.Conv2d:
    """A 3 × 3 convolution with that stride, in float64."""
    conv = nn.Conv2d(channels, 4, 3, stride=stride, padding=1).double()
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    return conv


def check(
    *,
    side: int = 12,
    channels: int = 3,
    seed: int = 0,
    convert: Callable[..., Any] = to_attention,
    keep: Callable[[Tensor, int], Tensor] = every,
    pools: dict[str, Callable[[Tensor, int], Tensor]] = POOLS,
) -> Evidence:
    """Dense attention that is pooled or subsampled, and attention at the kept queries alone, beside the convolution."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, side, side, generator=draw, dtype=torch.float64)
    strides = [2, 3, 4]
    work: dict[str, list[float]] = {"all queries": [], "kept queries": []}
    for stride in strides:
        conv = drawn(channels, stride, draw)
        dense = nn.Conv2d(channels, 4, 3, padding=1).double()
        dense.load_state_dict(conv.state_dict())
        with torch.no_grad():
            wanted, full = conv(x), convert(dense)(x)
            for name, pool in pools.items():
                off = float((pool(full, stride) - wanted).abs().max() / wanted.abs().max())
                found.written(
                    f"stride {stride}: dense attention and a {name} pool",
                    off < 1e-9,
                    f"a {name} pool is off by {off:.0%} of the largest output at stride {stride}",
                )
            far = float((keep(full, stride) - wanted).abs().max())
            direct = float((convert(conv)(x) - wanted).abs().max())
        found.corrected(
            f"stride {stride}: dense attention subsampled",
            far < 1e-12,
            f"subsampled, dense attention is within {far:.1e}",
        )
        found.corrected(
            f"stride {stride}: the kept queries alone are asked, and no step follows",
            direct < 1e-12,
            f"only the kept queries: within {direct:.1e}",
        )
        work["all queries"].append(counted(convert(conv, direct=False), x))
        work["kept queries"].append(counted(convert(conv, direct=True), x))
    _work(found, strides, work)
    shifted = float((full[..., 1::stride, 1::stride] - wanted).abs().max())
    found.control("subsampled from the second output on: the same", shifted < 1e-9, f"off by {shifted:.2g}")
    return found


def _work(found: Evidence, strides: list[int], work: dict[str, list[float]]) -> None:
    """What is saved where the outputs that would be discarded are not computed."""
    saved = [a / b for a, b in zip(work["all queries"], work["kept queries"], strict=True)]
    found.corrected(
        "asking the kept queries alone is less work, though not s² times less: keys and values stay",
        all(1 < ratio <= s * s for ratio, s in zip(saved, strides, strict=True)) and saved == sorted(saved),
        f"{saved[0]:.2g} times fewer products at stride 2, {saved[-1]:.2g} at {strides[-1]}",
    )
    found.draw(
        "products of one call", {name: (strides, y) for name, y in work.items()}, x="stride", y="products", log="y"
    )
    found.numbers |= {"times fewer products": saved}


CLAIM = Claim(
    id="strided",
    sources=("000",),
    statement="A strided convolution is attention at every pixel, after which a downsampling or pooling layer must "
    "discard the outputs that are skipped.",
    formula=r"y_i = \sum_{\Delta} Z_{s i + \Delta} W_\Delta = "
    r"\left(\operatorname{pool}_s\, \operatorname{MHA}(Z)\right)_i",
    refuted="A pooling layer after dense attention whose outputs are not those of the strided convolution.",
    control="Dense attention subsampled from its second output on.",
    verdict=FAILS,
    correction="Subsampling is exact: every s-th output of dense attention is the strided convolution. Pooling mixes "
    "the outputs that are to be discarded into the others, and is not. No further layer is needed: attention can ask "
    "at every s-th pixel alone, which gives the same with fewer products.",
    check=check,
)
