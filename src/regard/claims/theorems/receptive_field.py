"""Checks how many positions reach one position by hard attention with residuals: (k+1)ⁿ paths, but often fewer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.positions import hard_selection

Join = Callable[[Tensor, Tensor], Tensor]


def copy_from_offsets(n: int, offsets: list[int], x: Tensor, attention_fn: AttentionFn) -> Tensor:
    """``Σ_h A_h x``: head h copies from the position at ``offsets[h]``, or from the nearest one that exists."""
    positions = torch.arange(n, dtype=torch.float64).unsqueeze(-1)
    q, k = hard_selection(positions, positions, torch.tensor(offsets, dtype=torch.float64).unsqueeze(-1))
    heads = len(offsets)
    return attention_fn(q, k.expand(heads, -1, -1), x.expand(heads, -1, -1), scale=math.inf).sum(0)


def count_paths(n: int, layers: list[list[int]], attention_fn: AttentionFn, join: Join) -> list[Tensor]:
    """After each layer, the number of paths ``[n]`` from each position to the last one. Values start as e_j."""
    x = torch.eye(n, dtype=torch.float64)
    paths = []
    for offsets in layers:
        x = join(x, copy_from_offsets(n, offsets, x, attention_fn))
        paths.append(x[-1])
    return paths


def count_random_paths(
    n: int, heads: int, layers: int, generator: torch.Generator, attention_fn: AttentionFn
) -> list[Tensor]:
    """The same counts as ``count_paths``, with random queries and keys."""
    x = torch.eye(n, dtype=torch.float64)
    paths = []
    for _ in range(layers):
        q, k = random_normal(generator, 2, heads, n, 8).unbind()
        x = x + attention_fn(q, k, x.expand(heads, -1, -1), scale=math.inf).sum(0)
        paths.append(x[-1])
    return paths


def count_influences(n: int, generator: torch.Generator, attention_fn: AttentionFn) -> int:
    """In one layer with one head: how many positions can change the last output by their content."""

    def last_output(x: Tensor) -> Tensor:
        out: Tensor = attention_fn(x[None], x[None], x[None], scale=math.inf)[0, -1] + x[-1]
        return out

    x = random_normal(generator, n, 4)
    y = last_output(x)
    count = 0
    for j in range(n):
        replaced = x.clone()
        replaced[j] = 100 * x[-1]  # now the best match for the last query
        count += bool((last_output(replaced) != y).any())
    return count


def disjoint_offsets(heads: int, layers: int) -> list[list[int]]:
    """Offsets whose paths never meet: −h·(k+1)^l in layer l."""
    offsets = []
    for layer in range(layers):
        step = (heads + 1) ** layer
        offsets.append([-head * step for head in range(1, heads + 1)])
    return offsets


def count_positions(paths: list[Tensor]) -> list[int]:
    """After each layer, how many positions have a path."""
    return [int((row > 0).sum()) for row in paths]


def check(
    *,
    layers: int = 6,
    most: int = 3,
    samples: int = 20,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    join: Join = torch.add,  # the residual connection
) -> Evidence:
    """Count the paths from every position to the last, for heads at near offsets, at disjoint ones, and at random."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    lines: dict[str, Sequence[Sequence[float]]] = {}
    for heads in range(1, most + 1):
        depth = max(2, layers - 2 * (heads - 1))  # more heads need longer sequences
        expected = [(heads + 1) ** (layer + 1) for layer in range(depth)]
        n = expected[-1] + 1  # long enough for all paths
        far = count_positions(count_paths(n, disjoint_offsets(heads, depth), attention_fn, join))
        near_paths = count_paths(n, [list(range(-1, -heads - 1, -1))] * depth, attention_fn, join)
        near = count_positions(near_paths)
        total = [float(row.sum()) for row in near_paths]
        head_count = f"{heads} head{'s' * (heads > 1)}"
        model = f"{head_count}, {depth} layers"
        evidence.add_statement(
            f"{model}, with offsets −1 … −k: {heads + 1}^n positions are reached.",
            near == expected,
            f"{model}: looking back by 1{' … k' * (heads > 1)} reaches {near[-1]} positions, not {expected[-1]}",
        )
        evidence.add_condition(
            f"{model}, with offsets whose paths never meet: {heads + 1}^n positions are reached.",
            far == expected,
            f"offsets −h·{heads + 1}^l in layer l reach {far[-1]}",
        )
        evidence.add_condition(f"{model}: there are {heads + 1}^n paths.", total == expected, f"{total[-1]:g} paths")
        back = f"1{f' … {heads}' * (heads > 1)} back"
        lines[f"{head_count}, offsets that never meet"] = (range(1, depth + 1), far)
        lines[f"{head_count}, looking {back}"] = (range(1, depth + 1), near)
        evidence.numbers |= {f"{model}, near": near[-1], f"{model}, far": far[-1]}

    # The limits of the formula: a short sequence, the content that decides the argmax, and random content.
    length = 2 ** (layers - 2)
    bound = 2**layers
    offsets = disjoint_offsets(1, layers)
    short = count_positions(count_paths(length, offsets, attention_fn, join))[-1]
    evidence.add_statement(
        f"In a sequence of {length}, {layers} layers reach {bound} positions.", short == bound, f"they reach {short}"
    )
    influences = count_influences(length, generator, attention_fn)
    evidence.add_statement(
        "In one layer with one head, 2 positions can change an output.",
        influences <= 2,
        f"all {influences} can, if theirs becomes the largest score",
    )
    within_bound = True
    reached = []
    for _ in range(samples):
        sizes = count_positions(count_random_paths(bound, 1, layers, generator, attention_fn))
        within_bound = within_bound and all(size <= 2 ** (layer + 1) for layer, size in enumerate(sizes))
        reached.append(sizes[-1])
    mean = sum(reached) / samples
    evidence.add_condition(
        "With random content, never more than 2^n are reached.", within_bound, f"{mean:.3g} of {bound} on average"
    )

    # A control: its statement must be false. Without the residual every layer only copies, so that one path is left.
    copied = count_positions(count_paths(bound, offsets, attention_fn, lambda x, attended: attended))[-1]
    evidence.add_control("Without the residual, 2^n positions are reached.", copied == bound, f"only {copied}")
    evidence.numbers |= {"random content, mean": mean, "can win": influences, "without residual": copied}
    evidence.add_series("positions that reach the last one", lines, x="layers", y="positions", log="y")
    return evidence


CLAIM = Claim(
    id="receptive-field",
    title="With k heads and argmax attention, n layers reach (k+1)ⁿ positions",
    citations=(("solution-sheet", "2 (a)"),),
    statement="With argmax attention and a residual connection, the receptive field of a position after n layers has "
    "2ⁿ positions with one head, 3ⁿ with two and (k+1)ⁿ with k.",
    formula=r"\left|R_n\right| = (k + 1)^n",
    refuted_by="Heads that bring values to a position from fewer or more positions than that.",
    control="The same without the residual connection: fewer than 2ⁿ positions must be reached.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="(k+1)ⁿ is an upper bound. It is reached if no two paths end at the same position and the sequence is "
    "long enough.",
    correction="No two paths end at the same position, and the sequence is long enough. There are always (k+1)ⁿ paths "
    "for values. Offsets −h·(k+1)^l in layer l make all of them end at different positions; offsets −1 … −k in every "
    "layer reach only kn + 1. So (k+1)ⁿ is an upper bound on where values come from. Which key wins depends on all "
    "positions.",
    check=check,
)
