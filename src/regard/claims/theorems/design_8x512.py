"""Eight heads on 512: the numbers of the worked example, and what its count of memory leaves out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from regard import budget
from regard.budget.parts import Call
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.theorems.cost_multi_head import fit
from regard.claims.theorems.parameter_count import as_written, held
from regard.claims.theorems.sequential_heads_save_memory import kept, plain
from regard.nn import MultiHeadAttention

D, HEADS = 512, 8
MEMORY = (8, 2048)  # values: 8n² + 2048n


def no_bias(d: int, heads: int) -> nn.Module:
    """The example's layer: four matrices and nothing else."""
    return MultiHeadAttention(d, heads, out_bias=False)


def as_program(layer: nn.Module, x: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """The document's program on a layer's weights: project, attend with all weights stored, concatenate, project."""
    parts = [layer.get_submodule(f"{name}_proj") for name in ("q", "k", "v")]
    q, k, v = (part(x).unflatten(-1, (HEADS, -1)).transpose(-2, -3) for part in parts)
    out: Tensor = layer.get_submodule("out_proj")(attend(q, k, v).transpose(-2, -3).flatten(-2))
    return out


def in_values(lengths: list[int], counts: list[int]) -> tuple[tuple[float, float], float]:
    """(a, b) of ``a·n² + b·n``, and the relative error that is left."""
    found, rest = fit([(n,) for n in lengths], counts, (lambda n: n * n, lambda n: n))
    return (round(found[0], 6), round(found[1], 6)), rest


def check(
    *,
    longest: int = 64,
    seed: int = 0,
    layer: Callable[[int, int], nn.Module] = no_bias,
    attend: Callable[..., Tensor] = plain,
) -> Evidence:
    """Parameters of the layer, part by part; numbers that its forward pass stores at several lengths."""
    found = Evidence()
    torch.manual_seed(seed)
    made = layer(D, HEADS)
    lengths = [longest // 8, longest // 4, longest // 2, longest]
    counts: dict[str, list[int]] = {"all": [], "without the input": [], "tiled": []}
    far = 0.0
    for n in lengths:
        x = torch.randn(1, n, D)
        weights = list(made.parameters())
        counts["all"].append(_numbers(partial(as_program, made, x, attend), weights))
        counts["without the input"].append(_numbers(partial(as_program, made, x, attend), [*weights, x]))
        counts["tiled"].append(_numbers(partial(made, x), [*weights, x]))
        far = max(far, float((as_program(made, x, attend) - made(x)).detach().abs().max()))
    _memory(found, lengths, counts)
    _parameters(found, made)
    found.condition("the program gives what the layer gives", far < 1e-4, f"within {far:.0e} in float32")
    lines = {name: (lengths, y) for name, y in counts.items()}
    lines["8n² + 2048n"] = (lengths, [MEMORY[0] * n * n + MEMORY[1] * n for n in lengths])
    found.draw("numbers that a forward pass keeps for the backward one", lines, x="n", y="values", log="xy")
    return found


def _numbers(call: Callable[[], Tensor], but: Sequence[Tensor]) -> int:
    return sum(x.numel() for x in kept(call, but))


def _parameters(found: Evidence, made: nn.Module) -> None:
    sizes = {name: held(made.get_submodule(f"{name}_proj")) for name in ("q", "k", "v", "out")}
    heads, all_heads, total = (sizes[x] // HEADS for x in "qkv"), sizes["q"] + sizes["k"] + sizes["v"], held(made)
    found.condition("each matrix of a head has 512 × 64 = 32,768 numbers", set(heads) == {32_768}, "d_k = 512/8 = 64")
    found.condition(
        "without biases: 98,304 a head, 786,432 in all heads, 262,144 in the output, 1,048,576 in all",
        (all_heads // HEADS, all_heads, sizes["out"], total) == (98_304, 786_432, 262_144, 1_048_576),
        f"{total:,} parameters",
    )
    formula = as_written(HEADS, D, D // HEADS, D // HEADS, D)
    found.control("the formula of 000, which adds a bias, gives the same", formula == total, f"{formula:,} there")
    found.numbers |= {"parameters": total, "with the bias of 000": formula}


def _memory(found: Evidence, lengths: list[int], counts: dict[str, list[int]]) -> None:
    seen, rests = {}, []
    for name, each in counts.items():
        seen[name], rest = in_values(lengths, each)
        rests.append(rest)

    def text(name: str) -> str:
        return f"{seen[name][0]:g}n² + {seen[name][1]:,.0f}n"

    exact = max(rests) < 1e-6
    said = f"a forward pass keeps {text('all')} values: the input, 512n, is not in 8n² + 2,048n"
    found.written("a layer that stores its weights needs 8n² + 2048n values", exact and seen["all"] == MEMORY, said)
    found.condition(
        "with weights stored, and the input left out, it needs 8n² + 2048n values",
        exact and seen["without the input"] == MEMORY,
        f"without the input {text('without the input')}: Q, K, V, weights, heads' outputs",
    )
    stored = budget.attention(D, HEADS).stored(Call(1, 64, 64, 64))
    found.condition(
        "the planner's list of what the document counts is the same",
        sum(int(x) for x in stored.values()) == MEMORY[0] * 64**2 + MEMORY[1] * 64,
        "Q, K, V 1,536n, attention matrices 8n², heads' outputs 512n",
    )
    found.control(
        "with a tiled kernel, which stores no weights, it needs 8n² + 2048n values",
        seen["tiled"] == MEMORY,
        f"tiled: {text('tiled')}",
    )
    found.numbers |= {f"values kept, {name}": list(seen[name]) for name in counts}


CLAIM = Claim(
    id="design-8x512",
    sources=("001",),
    statement="Eight heads on d_model = 512: d_k = d_v = 64, 98,304 parameters a head, 786,432 in all heads, "
    "262,144 in the output projection, 1,048,576 in all; memory for n tokens is 8n² + 2048n values.",
    formula=r"8 \cdot 3 \cdot 512 \cdot 64 + 512 \cdot 512 = 1048576, \qquad 8 n^2 + 2048 n",
    refuted="A layer of these sizes with another number of parameters, or that stores another number of values.",
    control="The formula of 000, which has a bias of the output, asked for the same parameters; a tiled kernel, "
    "asked for the same memory.",
    verdict=HOLDS_IF,
    correction="The parameters hold without biases (000's formula has 512 more). The memory holds if the weights "
    "of all heads are stored and only Q, K, V, weights and heads' outputs are counted: with the input, which the "
    "backward pass needs too, it is 8n² + 2560n, and scores before the softmax and the layer's output are "
    "transient beside it. A tiled kernel stores no n² at all.",
    check=check,
)
