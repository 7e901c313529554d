"""Concatenated heads times W_O: the sum of each head times its own rows of W_O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

Slices = Callable[[Tensor, int], list[Tensor]]


def rows_in_turn(w: Tensor, heads: int) -> list[Tensor]:
    """W_O^{(h)}: rows h·D_o … (h + 1)·D_o − 1 of ``W_O [N_h·D_o, D_out]``."""
    return list(w.chunk(heads))


def rows_of_next(w: Tensor, heads: int) -> list[Tensor]:
    """Each head with the rows of its neighbour."""
    return list(w.roll(w.shape[0] // heads, 0).chunk(heads))


def of_heads(x: Tensor, layer: Any, attend: Callable[..., Any]) -> tuple[Tensor, Tensor]:
    """Each head's output ``H_h = A_h X W_v^{(h)} [N_h, n, D_o]``, and its mean of inputs ``A_h X [N_h, n, D_in]``."""
    maps = (layer.q_proj, layer.k_proj, layer.v_proj)
    q, k, v = (each(x).unflatten(-1, (heads, -1)).transpose(0, 1) for each, heads in zip(
        maps, (layer.heads, layer.kv_heads, layer.kv_heads), strict=True))  # fmt: skip
    return attend(q, k, v), attend(q, k, x.expand(layer.kv_heads, -1, -1))


def check(
    *,
    n: int = 6,
    d: int = 10,
    heads: int = 4,
    kv_heads: int = 2,
    d_value: int = 3,
    seed: int = 0,
    attend: Callable[..., Any] = attention,
    layer: Callable[..., Any] = MultiHeadAttention,
    slices: Slices = rows_in_turn,
) -> Evidence:
    """A layer's output against the sum over its heads, taken apart by their rows of the output matrix."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    torch.manual_seed(seed)
    sizes = {"as many key heads": heads, "key heads shared": kv_heads}
    worst = 0.0
    for name, shared in sizes.items():
        made = layer(d, heads, d_key=5, d_value=d_value, d_out=7, kv_heads=shared).double()
        torch.nn.init.normal_(made.out_proj.bias)
        with torch.no_grad():
            whole, (each, means) = made(x), of_heads(x, made, attend)
            w_out = made.out_proj.weight.T
            parts = torch.stack([one @ w for one, w in zip(each, slices(w_out, heads), strict=True)])
            w_value = made.v_proj.weight.T.chunk(shared, -1)
            folded = [w_value[h * shared // heads] @ w for h, w in enumerate(slices(w_out, heads))]
            short = sum((y @ w for y, w in zip(means, folded, strict=True)), made.out_proj.bias)
            wrong = sum((one @ w for one, w in zip(each, rows_of_next(w_out, heads), strict=True)), made.out_proj.bias)
            left = [float((whole - made.out_proj.bias - parts[:h].sum(0)).norm()) for h in range(heads + 1)]
            off = float((whole - parts.sum(0) - made.out_proj.bias).abs().max())
        other = float((whole - short).abs().max())
        worst = max(worst, off, other)
        found.written(f"{name}: Concat(H) W_O + b = Σ H_h W_O^h + b", off < 1e-12, f"{heads} heads: within {off:.1e}")
        found.written(
            f"{name}: = Σ (A_h X) W_v^h W_O^h + b, one matrix a head", other < 1e-12, f"folded: within {other:.1e}"
        )
        miss = float((whole - wrong).abs().max())
        found.control(f"{name}: each head with its neighbour's rows gives it", miss < 1e-12, f"off by {miss:.3g}")
    lines = {"what is left": (list(range(heads + 1)), left)}
    found.draw("norm of the output less the first h heads and the bias", lines, x="h", y="norm")
    found.numbers |= {"largest difference": worst, "heads": heads}
    return found


CLAIM = Claim(
    id="concat-is-sum-of-heads",
    sources=("000", "002"),
    statement="Concatenating the heads and multiplying by W_O is summing the heads, each multiplied by its own block "
    "of rows of W_O; so W_v and W_O of a head act as one matrix, which 000 calls W_v.",
    formula=r"[H_1, \dots, H_{N_h}] \, W_O \allowbreak = \sum_{h=1}^{N_h} H_h W_O^{(h)} \allowbreak = "
    r"\sum_{h=1}^{N_h} (A_h X) \, W_v^{(h)} W_O^{(h)}",
    refuted="A layer whose output is not the sum over its heads and the bias, once.",
    control="Each head multiplied by the rows of its neighbour.",
    verdict=HOLDS,
    check=check,
)
