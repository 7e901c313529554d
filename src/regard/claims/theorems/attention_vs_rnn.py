"""Checks how time, memory and sequential steps of attention and of recurrence grow with the length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from regard.claims._check_helpers import AttentionFn, count_flops, fit_cost
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import power_law_exponent
from regard.claims.theorems.sequential_heads_save_memory import plain, saved_tensors
from regard.nn import MultiHeadAttention

TIME = (lambda n, d: n * n * d, lambda n, d: n * d * d)
SPACE = (lambda n, d: n * n, lambda n, d: n * d, lambda n, d: n, lambda n, d: d)


def recurrent_net(d: int) -> nn.Module:
    """``h_t = tanh(W x_t + U h_{t−1} + b)``"""
    return nn.RNN(d, d, batch_first=True)


def layer_output(result: Any) -> Tensor:
    """The output of a layer that may also return a state."""
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def previous_nodes(node: Any) -> list[Any]:
    """The operations whose results one operation needs, from the graph of derivatives."""
    return [previous for previous, _ in node.next_functions if previous is not None]


def longest_chain(out: Tensor) -> int:
    """The longest chain of operations in which each needs the result of the one before."""
    lengths: dict[Any, int] = {}
    stack = [out.grad_fn]
    while stack:
        node = stack[-1]
        # A node is measured after all nodes that it needs; the stack replaces deep recursion.
        missing = [previous for previous in previous_nodes(node) if previous not in lengths]
        if missing:
            stack += missing
        else:
            lengths[stack.pop()] = 1 + max((lengths[previous] for previous in previous_nodes(node)), default=0)
    return lengths[out.grad_fn]


def layer_with_stored_weights(layer: nn.Module, x: Tensor, heads: int, attention_fn: AttentionFn) -> Tensor:
    """The output of an attention layer if ``attention_fn``, which stores its weights, replaces the operator."""
    projected = []
    for name in ("q", "k", "v"):
        projection = layer.get_submodule(f"{name}_proj")
        projected.append(projection(x).unflatten(-1, (heads, -1)).transpose(-2, -3))
    out: Tensor = layer.get_submodule("out_proj")(attention_fn(*projected).transpose(-2, -3).flatten(-2))
    return out


def count_saved(call: Callable[[], Any], excluded: Sequence[Tensor]) -> int:
    """How many numbers autograd saves during a call, without those of the excluded tensors."""
    return sum(tensor.numel() for tensor in saved_tensors(call, excluded))


def check(
    *,
    longest: int = 64,
    heads: int = 2,
    seed: int = 0,
    layer: Callable[..., nn.Module] = MultiHeadAttention,
    recurrent: Callable[[int], nn.Module] = recurrent_net,
    attention_fn: AttentionFn = plain,
) -> Evidence:
    """Count FLOPs, numbers saved for gradients, and the longest chain of operations, over lengths and widths."""
    evidence = Evidence()
    torch.manual_seed(seed)
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    sizes = list(product(lengths, (8, 16)))
    time: dict[str, list[int]] = defaultdict(list)
    space: dict[str, list[int]] = defaultdict(list)
    steps: dict[str, list[int]] = defaultdict(list)
    for n, d in sizes:
        x = torch.zeros(1, n, d)
        attention = layer(d, heads)
        recurrence = recurrent(d)
        calls = {
            "attention": (attention, partial(attention, x)),
            "attention, stored": (attention, partial(layer_with_stored_weights, attention, x, heads, attention_fn)),
            "recurrence": (recurrence, partial(recurrence, x)),
        }
        for name, (module, call) in calls.items():
            time[name].append(count_flops(call)["all"])
            space[name].append(count_saved(call, list(module.parameters())))
            steps[name].append(longest_chain(layer_output(call())))
    _check_memory(evidence, sizes, space, heads)
    _check_time(evidence, sizes, time)
    _check_steps(evidence, sizes, steps)

    # Every second size has d = 16.
    space_curves = {name: counts[1::2] for name, counts in space.items()}
    evidence.add_curves("numbers kept for gradients, d = 16", lengths, space_curves, x="n", y="numbers", log="xy")
    step_curves = {name: chains[1::2] for name, chains in steps.items()}
    evidence.add_curves("longest chain of operations", lengths, step_curves, x="n", y="steps", log="xy")
    return evidence


def _check_memory(evidence: Evidence, sizes: list[tuple[int, int]], space: dict[str, list[int]], heads: int) -> None:
    tiled, _ = fit_cost(sizes, space["attention"], SPACE)
    stored, stored_error = fit_cost(sizes, space["attention, stored"], SPACE)
    recurrence, _ = fit_cost(sizes, space["recurrence"], SPACE)
    evidence.add_statement(
        "Attention needs memory that grows as n² + nd.",
        tiled[0] > 0.5,
        f"the layer keeps {tiled[1]:.3g}nd + {tiled[2]:.3g}n numbers and {abs(tiled[0]):.2g}n², because its kernel is "
        f"tiled",
    )
    evidence.add_condition(
        "Attention that stores its weights needs n² numbers per head, plus nd.",
        stored_error < 1e-6 and abs(stored[0] - heads) < 1e-3,
        f"with stored weights it keeps {stored[0]:.3g}n² + {stored[1]:.3g}nd for {heads} heads",
    )
    evidence.add_condition(
        "Recurrence needs nd numbers for its gradients.",
        abs(recurrence[0]) < 1e-3 and recurrence[1] > 0.5,
        f"recurrence keeps {recurrence[1]:.3g}nd and {abs(recurrence[0]):.2g}n²",
    )
    for name, coefficients in zip(space, (tiled, stored, recurrence), strict=True):
        evidence.numbers[f"n², nd, n, d: {name}"] = coefficients


def _check_time(evidence: Evidence, sizes: list[tuple[int, int]], time: dict[str, list[int]]) -> None:
    attention, attention_error = fit_cost(sizes, time["attention"], TIME)
    recurrence, recurrence_error = fit_cost(sizes, time["recurrence"], TIME)
    evidence.add_condition(
        "Attention takes n²d + nd² operations.",
        attention_error < 1e-9 and min(attention) > 0.5,
        f"counted {attention[0]:g}n²d + {attention[1]:g}nd²",
    )
    evidence.add_condition(
        "Recurrence takes nd² operations.",
        recurrence_error < 1e-9 and abs(recurrence[0]) < 1e-6 and recurrence[1] > 0.5,
        f"counted {recurrence[1]:g}nd²",
    )
    # A control: its statement must be false. Recurrence never compares two tokens, so a term n²d must not appear.
    evidence.add_control("Recurrence takes n²d operations too.", recurrence[0] > 0.5, f"{abs(recurrence[0]):g}n²d")
    for name, counts in time.items():
        evidence.numbers[f"n²d, nd²: {name}"] = fit_cost(sizes, counts, TIME)[0]


def _check_steps(evidence: Evidence, sizes: list[tuple[int, int]], steps: dict[str, list[int]]) -> None:
    lengths = [n for n, _ in sizes]
    recurrence = power_law_exponent(lengths, steps["recurrence"])
    attention = power_law_exponent(lengths, steps["attention"])
    evidence.add_condition(
        "The steps of recurrence must run one after the other.",
        recurrence > 0.8,
        f"a chain of {steps['recurrence'][-1]} operations at n = {lengths[-1]}, which grows as n^{recurrence:.2f}",
    )
    evidence.add_condition(
        "The steps of attention need not.", abs(attention) < 1e-9, f"{steps['attention'][-1]} operations at every n"
    )
    # A control: its statement must be false.
    evidence.add_control("Recurrence has a chain that does not grow.", abs(recurrence) < 1e-9)
    for name, chains in steps.items():
        evidence.numbers[f"longest chain, {name}"] = chains[-1]


CLAIM = Claim(
    id="attention-vs-rnn",
    title="Attention takes O(n²d + nd²) time and O(n² + nd) memory, an RNN O(nd²) and O(nd)",
    citations=(("exam-answers", "1 (c)"),),
    papers=("vaswani-2017", "rabe-2021"),
    statement="Self-attention takes O(n²d + nd²) time and O(n² + nd) memory. A recurrent network takes O(nd²) "
    "time and O(nd) memory for its gradients, in n steps that must run one after the other.",
    formula=r"T_{att} = O\left(n^2 d + n d^2\right), \quad M_{att} = O\left(n^2 + n d\right), \quad "
    r"T_{rnn} = O\left(n d^2\right), \quad M_{rnn} = O\left(n d\right)",
    refuted_by="A layer whose counted operations, saved numbers or longest chain of operations grow in another way.",
    control="The recurrent network: its work must not grow as n²d, and its chain must not stay constant.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="The times are right. Attention needs n² memory only if it stores the weights: a tiled kernel keeps "
    "O(nd).",
    correction="The implementation stores the weights; the memory is then h·n² for h heads. A tiled kernel keeps O(nd) "
    "numbers with the same number of operations, so memory is not a difference between the two methods. The times and "
    "the sequential steps are as stated.",
    check=check,
)
