"""What several checks share: random inputs and layers, differences, counted FLOPs and fitted cost formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from regard.budget import register_flop_formulas
from regard.nn import MultiHeadAttention
from regard.positions import Quadratic

# The function under test in many checks: regard.attention, or a broken one, which must change the verdict.
AttentionFn = Callable[..., Tensor]
Module = TypeVar("Module", bound=nn.Module)


def random_normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in float64."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """``max |a − b|`` over all entries."""
    return float((a - b).detach().abs().max())


def attention_weights(attention_fn: AttentionFn, q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """The weights of queries ``[..., n, d]`` for keys ``[..., m, d]``: the output for the values e_j."""
    unit_vectors = torch.eye(k.shape[-2], dtype=k.dtype).expand(*k.shape[:-2], -1, -1)
    return attention_fn(q, k, unit_vectors, **options)


def count_flops(call: Callable[[], Any]) -> dict[str, int]:
    """Count the FLOPs of a call by the last part of the module's name; the total has the key "all".

    A multiplication with an addition counts as two FLOPs.
    """
    register_flop_formulas()  # otherwise torch would count the package's own operators as 0
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    flops = {}
    for path, operations in counter.get_flop_counts().items():
        flops[str(path).rpartition(".")[2]] = sum(operations.values())
    flops["all"] = counter.get_total_flops()
    return flops


def projection_flops(flops: dict[str, int]) -> int:
    """The part of a layer's counted FLOPs that its four projections take."""
    return sum(flops.get(f"{name}_proj", 0) for name in ("q", "k", "v", "out"))


def fit_cost(
    sizes: Sequence[tuple[int, ...]], counts: Sequence[float], terms: Sequence[Callable[..., float]]
) -> tuple[list[float], float]:
    """The coefficients c of ``count = Σ c·term(*size)`` by least squares, and the largest relative error that remains.

    Both are rounded, because their last bits depend on where in memory the solver works.
    """
    # Each row is divided by its count, so that small sizes weigh as much as large ones.
    rows = []
    for size, count in zip(sizes, counts, strict=True):
        rows.append([term(*size) / count for term in terms])
    matrix = torch.tensor(rows, dtype=torch.float64)  # every row should give 1
    ones = torch.ones(len(counts), 1, dtype=torch.float64)
    solution = torch.linalg.lstsq(matrix, ones, driver="gels").solution
    coefficients = [round(value, 6) + 0.0 for value in solution.flatten().tolist()]
    return coefficients, round(largest_difference(matrix @ solution, ones), 10)


def randomize(module: Module, generator: torch.Generator) -> Module:
    """Convert a module to float64, fill its parameters with standard normal numbers, and return it."""
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(random_normal(generator, *parameter.shape))
    return module


def one_hot_layer(
    offsets: Iterable[tuple[int, int]], side: int, out: Tensor, value: Tensor | None = None
) -> MultiHeadAttention:
    """A layer in which each head gives all its weight to the pixel at one offset; at a border, to the nearest pixel.

    - ``offsets``: one offset per head, in rows and columns.
    - ``side``: the side of the square images.
    - ``out``: W_out of each head, ``[heads, D_o, D_out]``.
    - ``value``: W_v of each head, ``[heads, D_in, D_o]``. Default: the identity, so that head h computes ``x out[h]``.
    """
    heads, d_value, d_out = out.shape
    if value is None:
        value = torch.eye(d_value, dtype=out.dtype).expand(heads, -1, -1)
    # With this alpha, the weights of all other pixels are exactly 0.
    position = Quadratic(side, side, heads, centers=list(map(list, offsets)), alpha=1e4)
    layer = MultiHeadAttention(
        value.shape[1], heads, d_key=1, d_value=d_value, d_out=d_out, out_bias=False, scale=0.0, position=position
    ).double()
    with torch.no_grad():
        layer.v_proj.weight.copy_(value.mT.flatten(0, 1))
        layer.out_proj.weight.copy_(out.flatten(0, 1).mT)
    return layer
