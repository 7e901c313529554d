"""Checks the example of eight heads with d = 512: its parameter count, and what its memory count leaves out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from regard import budget
from regard.budget._parts import Call
from regard.claims._check_helpers import AttentionFn, fit_cost, largest_difference
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims.theorems.attention_vs_rnn import count_saved, layer_with_stored_weights
from regard.claims.theorems.parameter_count import as_written, count_parameters
from regard.claims.theorems.sequential_heads_save_memory import plain
from regard.nn import MultiHeadAttention

D = 512
HEADS = 8
MEMORY = [8, 2048]  # the coefficients of 8n² + 2048n values


def layer_without_bias(d: int, heads: int) -> nn.Module:
    """The example's layer: four matrices and nothing else."""
    return MultiHeadAttention(d, heads, out_bias=False)


def check(
    *,
    longest: int = 64,
    seed: int = 0,
    layer: Callable[[int, int], nn.Module] = layer_without_bias,
    attention_fn: AttentionFn = plain,
) -> Evidence:
    """Count the layer's parameters, part by part, and the numbers that its forward pass stores at several lengths."""
    evidence = Evidence()
    torch.manual_seed(seed)
    attention = layer(D, HEADS)
    weights = list(attention.parameters())  # they exist before the forward pass, so they are not counted as stored
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    counts: dict[str, list[int]] = {"all": [], "without the input": [], "tiled": []}
    difference = 0.0
    for n in lengths:
        x = torch.randn(1, n, D)
        # The document's program stores all weights; the layer itself uses the tiled kernel.
        program = partial(layer_with_stored_weights, attention, x, HEADS, attention_fn)
        counts["all"].append(count_saved(program, weights))
        counts["without the input"].append(count_saved(program, [*weights, x]))
        counts["tiled"].append(count_saved(partial(attention, x), [*weights, x]))
        difference = max(difference, largest_difference(program(), attention(x)))

    # The memory: fit a·n² + b·n to the counts.
    coefficients = {}
    largest_error = 0.0
    for name, values in counts.items():
        coefficients[name], error = fit_cost([(n,) for n in lengths], values, (lambda n: n * n, lambda n: n))
        largest_error = max(largest_error, error)

    def fitted(name: str) -> str:
        return f"{coefficients[name][0]:g}n² + {coefficients[name][1]:,.0f}n"

    is_exact = largest_error < 1e-6  # the counts are a·n² + b·n and nothing else
    evidence.add_statement(
        "A layer that stores its weights needs 8n² + 2048n values.",
        is_exact and coefficients["all"] == MEMORY,
        f"a forward pass keeps {fitted('all')} values, because 8n² + 2,048n leaves out the input, 512n",
    )
    evidence.add_condition(
        "With stored weights, and without the input, it needs 8n² + 2048n values.",
        is_exact and coefficients["without the input"] == MEMORY,
        f"without the input it keeps {fitted('without the input')}: Q, K, V, weights and head outputs",
    )
    stored = budget.attention(D, HEADS).textbook_memory(Call(1, 64, 64, 64))
    evidence.add_condition(
        "The planner's list of what the document counts has the same total.",
        sum(map(int, stored.values())) == MEMORY[0] * 64**2 + MEMORY[1] * 64,
        "Q, K, V 1,536n, attention matrices 8n², head outputs 512n",
    )
    # A control: its statement must be false.
    evidence.add_control(
        "With a tiled kernel, which stores no weights, it needs 8n² + 2048n values.",
        coefficients["tiled"] == MEMORY,
        f"tiled: {fitted('tiled')}",
    )
    for name in counts:
        evidence.numbers[f"values kept, {name}"] = coefficients[name]

    # The parameters, part by part.
    sizes = {name: count_parameters(attention.get_submodule(f"{name}_proj")) for name in ("q", "k", "v", "out")}
    all_heads = sizes["q"] + sizes["k"] + sizes["v"]
    total = count_parameters(attention)
    evidence.add_condition(
        "Each matrix of a head has 512 × 64 = 32,768 numbers.",
        sizes["q"] == sizes["k"] == sizes["v"] == HEADS * 32_768,
        "d_k = 512/8 = 64",
    )
    evidence.add_condition(
        "Without biases there are 98,304 parameters per head, 786,432 in all heads, 262,144 in the output, and "
        "1,048,576 in total.",
        (all_heads // HEADS, all_heads, sizes["out"], total) == (98_304, 786_432, 262_144, 1_048_576),
        f"{total:,} parameters",
    )
    # A control: its statement must be false.
    # The formula of Assignment 6 counts a bias of 512 numbers, so it must not give the same total.
    formula = as_written(HEADS, D, D // HEADS, D // HEADS, D)
    evidence.add_control(
        "The formula of Assignment 6 gives the same total.", formula == total, f"{formula:,} with the bias"
    )
    evidence.numbers |= {"parameters": total, "with the bias of Assignment 6": formula}
    evidence.add_condition(
        "The document's program gives the layer's outputs.", difference < 1e-4, f"within {difference:.0e} in float32"
    )
    curves = {**counts, "8n² + 2048n": [MEMORY[0] * n * n + MEMORY[1] * n for n in lengths]}
    title = "numbers that a forward pass keeps for the backward pass"
    evidence.add_curves(title, lengths, curves, x="n", y="values", log="xy")
    return evidence


CLAIM = Claim(
    id="design-8x512",
    title="8 heads on width 512 have 1,048,576 parameters and need 8n² + 2048n values",
    citations=(("exam-answers", "2 (a)"),),
    papers=("vaswani-2017",),
    statement="Eight heads on d_model = 512 have d_k = d_v = 64, 98,304 parameters per head, 786,432 in all heads, "
    "262,144 in the output projection, and 1,048,576 in total. The memory for n tokens is 8n² + 2048n values.",
    formula=r"8 \cdot 3 \cdot 512 \cdot 64 + 512 \cdot 512 = 1048576, \qquad 8 n^2 + 2048 n",
    refuted_by="A layer of these sizes with another number of parameters, or that stores another number of values.",
    control="The formula of Assignment 6, which has a bias of the output: its number of parameters must differ. A "
    "tiled kernel: its memory must differ.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Without biases there are 1,048,576 parameters. Stored Q, K, V, weights and head outputs are 8n² + "
    "2048n values.",
    correction="There are no biases (the formula of Assignment 6 has 512 parameters more), the weights of all heads "
    "are stored, and only Q, K, V, weights and head outputs are counted. With the input, which the backward pass needs "
    "too, the memory is 8n² + 2560n. Scores before the softmax and the layer's output are only temporary. A tiled "
    "kernel stores no n² at all.",
    check=check,
)
