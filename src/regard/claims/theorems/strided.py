"""Checks how attention computes a strided convolution: by subsampling or fewer queries, not by pooling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.claims._check_helpers import count_flops, largest_difference, random_normal, randomize
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.convolution import to_attention

POOLS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "mean": lambda y, s: F.avg_pool2d(y, s, ceil_mode=True),
    "max": lambda y, s: F.max_pool2d(y, s, ceil_mode=True),
}


def subsample(y: Tensor, stride: int) -> Tensor:
    """Every s-th row and column."""
    return y[..., ::stride, ::stride]


def check(
    *,
    side: int = 12,
    channels: int = 3,
    seed: int = 0,
    convert: Callable[..., Any] = to_attention,
    keep: Callable[[Tensor, int], Tensor] = subsample,
    pools: dict[str, Callable[[Tensor, int], Tensor]] = POOLS,
) -> Evidence:
    """Compare dense attention that is pooled or subsampled, and attention at the kept queries, with the convolution."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, 2, channels, side, side)
    strides = [2, 3, 4]
    all_queries = []
    kept_queries = []
    for stride in strides:
        conv = randomize(nn.Conv2d(channels, 4, 3, stride=stride, padding=1), generator)
        dense = nn.Conv2d(channels, 4, 3, padding=1).double()
        dense.load_state_dict(conv.state_dict())
        with torch.no_grad():
            expected = conv(x)
            full = convert(dense)(x)
            subsampled_error = largest_difference(keep(full, stride), expected)
            direct_error = largest_difference(convert(conv)(x), expected)
            for name, pool in pools.items():
                error = largest_difference(pool(full, stride), expected) / float(expected.abs().max())
                evidence.add_statement(
                    f"Stride {stride}: dense attention with a {name} pool is the convolution.",
                    error < 1e-9,
                    f"a {name} pool is wrong by {error:.0%} of the largest output at stride {stride}",
                )
        evidence.add_correction(
            f"Stride {stride}: subsampled dense attention is the convolution.",
            subsampled_error < 1e-12,
            f"subsampled dense attention agrees within {subsampled_error:.1e}",
        )
        evidence.add_correction(
            f"Stride {stride}: attention at the kept queries alone is the convolution.",
            direct_error < 1e-12,
            f"only the kept queries: within {direct_error:.1e}",
        )
        all_queries.append(count_flops(lambda conv=conv: convert(conv, direct=False)(x))["all"])  # type: ignore[misc]
        kept_queries.append(count_flops(lambda conv=conv: convert(conv, direct=True)(x))["all"])  # type: ignore[misc]

    # The work for all queries, compared with the work for the kept ones.
    saved = [dense / direct for dense, direct in zip(all_queries, kept_queries, strict=True)]
    bounded = all(1 < ratio <= stride * stride for ratio, stride in zip(saved, strides, strict=True))
    evidence.add_correction(
        "Computing the kept queries alone is less work, but not s² times less: keys and values stay.",
        bounded and saved == sorted(saved),
        f"{saved[0]:.2g} times fewer products at stride 2, {saved[-1]:.2g} at {strides[-1]}",
    )
    curves = {"all queries": all_queries, "kept queries": kept_queries}
    evidence.add_curves("products of one call", strides, curves, x="stride", y="products", log="y")
    evidence.numbers |= {"times fewer products": saved}

    # A control: its statement must be false. Another starting point selects the outputs of other pixels.
    shifted = largest_difference(full[..., 1::stride, 1::stride], expected)
    evidence.add_control(
        "Dense attention subsampled from its second output on is the convolution.",
        shifted < 1e-9,
        f"difference {shifted:.2g}",
    )
    return evidence


CLAIM = Claim(
    id="strided",
    title="A strided convolution is attention at every pixel, then a downsampling or pooling layer",
    citations=(("assignment-6", "3.3"),),
    statement="A strided convolution is attention at every pixel, after which a downsampling or pooling layer must "
    "discard the outputs that are skipped.",
    formula=r"y_i = \sum_{\Delta} Z_{s i + \Delta} W_\Delta = "
    r"\left(\operatorname{pool}_s\, \operatorname{MHA}(Z)\right)_i",
    refuted_by="A pooling layer after dense attention whose outputs are not those of the strided convolution.",
    control="Dense attention that is subsampled from its second output on.",
    verdict=FALSE_AS_STATED,
    what_holds="Every s-th output of dense attention is the strided convolution. Pooling is not, and no further layer "
    "is needed.",
    correction="Subsampling is exact: every s-th output of dense attention is the strided convolution. Pooling is "
    "not, because it mixes the outputs to be discarded into the others. No further layer is needed: attention can be "
    "computed at every s-th pixel alone, which gives the same result with fewer products.",
    check=check,
)
