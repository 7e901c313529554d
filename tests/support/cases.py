"""Cases of the operator: every option has named choices; a case is one choice of each, sizes and a seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard import Causal, Dense, Padding, Prefix, Segments, Window

CHOICES: dict[str, tuple[str, ...]] = {
    "mask": (
        "none",
        "causal",
        "causal-top-left",
        "padding",
        "padding-left",
        "padding-holes",
        "window",
        "segments",
        "scattered",
        "prefix-lm",
        "dense",
        "dense-heads",
        "tensor",
        "mixed",
        "union",
        "nothing",
    ),
    "bias": (
        "none",
        "full",
        "row",
        "head",
        "minus-inf",
        "alibi",
        "t5",
        "table",
        "keys",
        "grid",
        "grid-q",
        "quadratic",
        "sum",
    ),
    "scale": ("default", "zero", "small", "large", "hard"),
    "softcap": ("none", "cap"),
    "sinks": ("none", "sinks"),
    "dropout": ("none", "some"),
    "heads": ("one", "many", "grouped", "shared"),
    "batch": ("one", "two", "nested", "none", "broadcast"),
    "layout": ("contiguous", "length-first", "expanded", "sliced"),
    "values": ("normal", "ties", "large"),
}
# Combinations that the operator refuses; in such a case the second option becomes "none".
REFUSED = (("scale", "hard", "softcap", "cap"), ("scale", "hard", "sinks", "sinks"))


@dataclass
class Case:
    """Inputs in float64 and the keyword arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]
    learned: list[Tensor] = field(default_factory=list)
    choice: dict[str, str] = field(default_factory=dict)


def pairs() -> Iterator[dict[str, str]]:
    """For every pair of choices of two options, one choice of all options that contains the pair."""
    rng = random.Random(0)
    for a, b in itertools.combinations(CHOICES, 2):
        for x, y in itertools.product(CHOICES[a], CHOICES[b]):
            if (a, x, b, y) in REFUSED:
                continue
            yield {name: rng.choice(values) for name, values in CHOICES.items()} | {a: x, b: y}


def settle(choice: dict[str, str]) -> dict[str, str]:
    """Replace refused combinations by allowed ones."""
    choice = dict(choice)
    for a, x, b, y in REFUSED:
        if choice[a] == x and choice[b] == y:
            choice[b] = "none"
    return choice


def build(choice: dict[str, str], n: int, m: int, d: int, e: int, seed: int) -> Case:
    """Build one case; biases on a grid need at least as many keys as the grid has cells."""
    g = torch.Generator().manual_seed(seed)
    choice = settle(choice)
    grid = (2, 3)
    if choice["bias"] in ("grid", "grid-q", "quadratic"):
        m = max(m, grid[0] * grid[1])
    heads, groups = {"one": (1, 1), "many": (3, 3), "grouped": (6, 2), "shared": (3, 1)}[choice["heads"]]
    batches = {
        "one": [(1,)] * 3,
        "two": [(2,)] * 3,
        "nested": [(2, 3)] * 3,
        "none": [()] * 3,
        "broadcast": [(2, 1), (3,), (1,)],
    }
    lead = batches[choice["batch"]]
    q, k, v = (
        _tensor(choice, (*b, h, length, width), g)
        for b, h, length, width in zip(lead, (heads, groups, groups), (n, m, m), (d, d, e), strict=True)
    )
    batch = tuple(torch.broadcast_shapes(*lead))
    options: dict[str, Any] = {
        "mask": _mask(choice["mask"], batch, heads, n, m, g),
        "scale": {"default": None, "zero": 0.0, "small": 0.1, "large": 1.7, "hard": math.inf}[choice["scale"]],
        "softcap": {"none": None, "cap": 1.3}[choice["softcap"]],
        "dropout": {"none": 0.0, "some": 0.3}[choice["dropout"]],
    }
    learned: list[Tensor] = []
    if choice["sinks"] == "sinks":
        options["sinks"] = torch.randn(heads, generator=g, dtype=torch.float64)
        learned.append(options["sinks"])
    bias = _bias(choice["bias"], batch, heads, n, m, d, grid, g)
    options["bias"] = bias
    if isinstance(bias, Tensor):
        learned.append(bias)
    elif isinstance(bias, nn.Module):
        learned += list(bias.parameters())
    return Case(q, k, v, options, learned, choice)


def _tensor(choice: dict[str, str], shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    *lead, h, length, width = shape
    layout = choice["layout"]
    if layout == "length-first":
        x = torch.randn(*lead, length, h, width, generator=g, dtype=torch.float64).transpose(-3, -2)
    elif layout == "expanded":
        x = torch.randn(*lead, 1, length, width, generator=g, dtype=torch.float64).expand(shape)
    elif layout == "sliced":
        x = torch.randn(*lead, h, length, 2 * width, generator=g, dtype=torch.float64)[..., ::2]
    else:
        x = torch.randn(shape, generator=g, dtype=torch.float64)
    if choice["values"] == "ties":
        x = x.round().clamp(-1, 1)
    return x * 8 if choice["values"] == "large" else x


def _mask(name: str, batch: tuple[int, ...], heads: int, n: int, m: int, g: torch.Generator):
    def lengths() -> Tensor:
        return torch.randint(0, m + 1, batch, generator=g)

    def some(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < 0.6

    return {
        "none": lambda: None,
        "causal": Causal,
        "causal-top-left": lambda: Causal(offset=0),
        "padding": lambda: Padding(lengths()),
        "padding-left": lambda: Padding(torch.arange(m) >= lengths().unsqueeze(-1)),
        "padding-holes": lambda: Padding(some(*batch, m)),
        "window": lambda: Window(2, 1),
        "segments": lambda: Segments(*(torch.randint(0, 3, (*batch, x), generator=g).sort(-1).values for x in (n, m))),
        "scattered": lambda: Segments(*(torch.randint(0, 3, (x,), generator=g) for x in (n, m))),
        "prefix-lm": lambda: Causal() | Prefix(lengths()),
        "dense": lambda: Dense(some(n, m)),
        "dense-heads": lambda: Dense(some(*batch, heads, n, m)),
        "tensor": lambda: some(heads, n, m),
        "mixed": lambda: Causal() & Window(3) & Padding(lengths()) & Dense(some(n, m)),
        "union": lambda: Window(1, 0) | Prefix(lengths()) | Dense(some(1, m)),
        "nothing": lambda: Dense(torch.zeros(n, m, dtype=torch.bool)),
    }[name]()


def _bias(name: str, batch, heads: int, n: int, m: int, d: int, grid: tuple[int, int], g: torch.Generator):
    def some(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    def learn(module: nn.Module) -> nn.Module:
        for p in module.double().parameters():
            p.data = some(*p.shape)
        return module

    def hiding() -> Tensor:
        return some(heads, n, m).masked_fill(torch.rand((n, m), generator=g) < 0.4, -math.inf)

    return {
        "none": lambda: None,
        "full": lambda: some(*batch, heads, n, m),
        "row": lambda: some(1, m),
        "head": lambda: some(heads, n, 1),
        "minus-inf": hiding,
        "alibi": lambda: regard.ALiBi(),
        "t5": lambda: learn(regard.T5Buckets(heads, buckets=8, max_distance=6)),
        "table": lambda: learn(regard.RelativeTable(heads, 3)),
        "keys": lambda: learn(regard.RelativeKeys(d, 2, heads=heads)),
        "grid": lambda: learn(regard.Grid(*grid, heads)),
        "grid-q": lambda: learn(regard.Grid(*grid, heads, d=d)),
        "quadratic": lambda: learn(regard.Quadratic(*grid, heads)),
        "sum": lambda: regard.ALiBi() + learn(regard.RelativeTable(heads, 2)),
    }[name]()
