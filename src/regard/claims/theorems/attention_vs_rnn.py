"""Attention beside recurrence: time, memory, and steps that wait for one another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope
from regard.claims.theorems.cost_multi_head import fit, flops
from regard.claims.theorems.sequential_heads_save_memory import kept, plain
from regard.nn import MultiHeadAttention

TIME: tuple[Callable[..., float], ...] = (lambda n, d: n * n * d, lambda n, d: n * d * d)
SPACE: tuple[Callable[..., float], ...] = (lambda n, d: n * n, lambda n, d: n * d, lambda n, d: n, lambda n, d: d)


def recurrent_net(d: int) -> nn.Module:
    """``h_t = tanh(W x_t + U h_{t−1} + b)``"""
    return nn.RNN(d, d, batch_first=True)


def result(found: Any) -> Tensor:
    """The outputs of a layer that may give a state beside them."""
    out: Tensor = found[0] if isinstance(found, tuple) else found
    return out


def outputs(net: nn.Module, x: Tensor) -> Tensor:
    return result(net(x))


def before(node: Any) -> Iterator[Any]:
    """The nodes of the graph of derivatives that one waits for."""
    return (each for each, _ in node.next_functions if each is not None)


def depth(out: Tensor) -> int:
    """The longest chain of operations that wait for one another."""
    known: dict[Any, int] = {}
    stack = [out.grad_fn]
    while stack:
        node = stack[-1]
        missing = [each for each in before(node) if each not in known]
        if missing:
            stack += missing
        else:
            known[stack.pop()] = 1 + max((known[each] for each in before(node)), default=0)
    return known[out.grad_fn]


def stored_weights(layer: nn.Module, x: Tensor, heads: int, attend: Callable[..., Tensor]) -> Tensor:
    """The layer's maps with attention that stores what it computes."""
    maps = (layer.get_submodule(f"{name}_proj") for name in ("q", "k", "v"))
    q, k, v = (one(x).unflatten(-1, (heads, -1)).transpose(-2, -3) for one in maps)
    out: Tensor = layer.get_submodule("out_proj")(attend(q, k, v).transpose(-2, -3).flatten(-2))
    return out


def numbers(call: Callable[[], Any], layer: nn.Module) -> int:
    """Numbers that autograd keeps of a call, parameters not counted."""
    return sum(x.numel() for x in kept(call, list(layer.parameters())))


def check(
    *,
    longest: int = 64,
    heads: int = 2,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    recurrent: Callable[[int], nn.Module] = recurrent_net,
    attend: Callable[..., Tensor] = plain,
) -> Evidence:
    """Counted FLOPs, numbers kept for gradients and longest chains of both, over lengths and widths."""
    found = Evidence()
    torch.manual_seed(seed)
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    sizes = [(n, d) for n in lengths for d in (8, 16)]
    names = ("attention", "attention, stored", "recurrence")
    time: dict[str, list[int]] = {name: [] for name in names}
    space: dict[str, list[int]] = {name: [] for name in names}
    steps: dict[str, list[int]] = {name: [] for name in names}
    for n, d in sizes:
        x, one, other = torch.zeros(1, n, d), layer(d, heads), recurrent(d)
        calls = {
            "attention": (one, partial(one, x)),
            "attention, stored": (one, partial(stored_weights, one, x, heads, attend)),
            "recurrence": (other, partial(outputs, other, x)),
        }
        for name, (module, call) in calls.items():
            time[name].append(flops(call)["all"])
            space[name].append(numbers(call, module))
            steps[name].append(depth(call()))
    _memory(found, sizes, space, heads)
    _time(found, sizes, time)
    _steps(found, sizes, steps)
    lines = {name: (lengths, space[name][1::2]) for name in names}
    found.draw("numbers kept for gradients, d = 16", lines, x="n", y="numbers", log="xy")
    found.draw("longest chain of operations", {k: (lengths, steps[k][1::2]) for k in names}, x="n", y="steps", log="xy")
    return found


def _memory(found: Evidence, sizes: list[tuple[int, int]], space: dict[str, list[int]], heads: int) -> None:
    fits = {name: fit(sizes, each, SPACE) for name, each in space.items()}
    squares = {name: each[0][0] for name, each in fits.items()}
    found.written(
        "attention needs memory that grows as n² + nd",
        squares["attention"] > 0.5,
        f"the layer keeps {fits['attention'][0][1]:.3g}nd + {fits['attention'][0][2]:.3g}n numbers and "
        f"{abs(squares['attention']):.2g}n²: its kernel is tiled",
    )
    rest = fits["attention, stored"][1]
    found.condition(
        "attention that stores its weights needs n² (for each head) + nd",
        rest < 1e-6 and abs(squares["attention, stored"] - heads) < 1e-3,
        f"with weights stored {squares['attention, stored']:.3g}n² + {fits['attention, stored'][0][1]:.3g}nd, "
        f"{heads} heads",
    )
    found.condition(
        "recurrence needs nd for its gradients",
        abs(squares["recurrence"]) < 1e-3 and fits["recurrence"][0][1] > 0.5,
        f"recurrence keeps {fits['recurrence'][0][1]:.3g}nd and {abs(squares['recurrence']):.2g}n²",
    )
    found.numbers |= {f"n², nd, n, d: {name}": each[0] for name, each in fits.items()}


def _time(found: Evidence, sizes: list[tuple[int, int]], time: dict[str, list[int]]) -> None:
    fits = {name: fit(sizes, each, TIME) for name, each in time.items()}
    (pairs, maps), rest = fits["attention"]
    good = rest < 1e-9 and min(pairs, maps) > 0.5
    found.condition("attention takes n²d + nd²", good, f"counted {pairs:g}n²d + {maps:g}nd²")
    (none, steps), rest = fits["recurrence"]
    good = rest < 1e-9 and abs(none) < 1e-6 and steps > 0.5
    found.condition("recurrence takes nd²", good, f"counted {steps:g}nd²")
    found.control("recurrence takes n²d too", none > 0.5, f"{abs(none):g}n²d")
    found.numbers |= {f"n²d, nd²: {name}": each[0] for name, each in fits.items()}


def _steps(found: Evidence, sizes: list[tuple[int, int]], steps: dict[str, list[int]]) -> None:
    at = [math.log(n) for n, _ in sizes]
    grows = {name: slope(at, [math.log(x) for x in each]).value for name, each in steps.items()}
    found.condition(
        "the steps of recurrence wait for one another",
        grows["recurrence"] > 0.8,
        f"a chain of {steps['recurrence'][-1]} operations at n = {sizes[-1][0]}, as n^{grows['recurrence']:.2f}",
    )
    found.condition(
        "those of attention do not",
        abs(grows["attention"]) < 1e-9,
        f"a chain of {steps['attention'][-1]} operations at every n",
    )
    found.control("recurrence has a chain that does not grow", abs(grows["recurrence"]) < 1e-9)
    found.numbers |= {f"longest chain, {name}": each[-1] for name, each in steps.items()}


CLAIM = Claim(
    id="attention-vs-rnn",
    sources=("001",),
    statement="Self-attention takes O(n²d + nd²) time and O(n² + nd) memory; a recurrent network takes O(nd²) "
    "time and O(nd) memory for its gradients, in n steps that wait for one another.",
    formula=r"T_{att} = O\left(n^2 d + n d^2\right), \quad M_{att} = O\left(n^2 + n d\right), \quad "
    r"T_{rnn} = O\left(n d^2\right), \quad M_{rnn} = O\left(n d\right)",
    refuted="A layer whose counted operations, kept numbers or longest chain of operations grow otherwise.",
    control="The recurrent network, asked whether its work grows as n²d and whether its chain stays as long.",
    verdict=HOLDS_IF,
    correction="The n² of memory needs an implementation that stores the weights, and is then h·n² for h heads. A "
    "tiled kernel keeps O(nd) with the same number of operations, so memory is no difference of the two methods. "
    "Times and the sequential steps are as stated.",
    check=check,
)
