"""Checks that concatenated heads times W_O are the sum of each head times its own rows of W_O."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.nn import MultiHeadAttention

Slices = Callable[[Tensor, int], list[Tensor]]


def rows_per_head(w: Tensor, heads: int) -> list[Tensor]:
    """W_O^{(h)}: rows h·D_o … (h + 1)·D_o − 1 of ``W_O [N_h·D_o, D_out]``."""
    return list(w.chunk(heads))


def rows_of_next(w: Tensor, heads: int) -> list[Tensor]:
    """For each head, the rows of the neighbouring head."""
    return list(w.roll(w.shape[0] // heads, 0).chunk(heads))


def head_outputs(x: Tensor, layer: Any, attention_fn: AttentionFn) -> tuple[Tensor, Tensor]:
    """Each head's output ``H_h = A_h X W_v^{(h)} [N_h, n, D_o]``, and its mean of inputs ``A_h X [N_h, n, D_in]``."""

    def split(projection: Any, heads: int) -> Tensor:
        per_head: Tensor = projection(x).unflatten(-1, (heads, -1)).transpose(0, 1)
        return per_head

    q = split(layer.q_proj, layer.heads)
    k = split(layer.k_proj, layer.kv_heads)
    v = split(layer.v_proj, layer.kv_heads)
    return attention_fn(q, k, v), attention_fn(q, k, x.expand(layer.kv_heads, -1, -1))


def sum_of_products(inputs: Tensor, matrices: list[Tensor]) -> Tensor:
    """``Σ_h inputs_h matrices_h``."""
    return (inputs @ torch.stack(matrices)).sum(0)


def check(
    *,
    n: int = 6,
    d: int = 10,
    heads: int = 4,
    kv_heads: int = 2,
    d_value: int = 3,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    layer: Callable[..., Any] = MultiHeadAttention,
    slices: Slices = rows_per_head,
) -> Evidence:
    """Compare a layer's output with the sum over its heads, split by their rows of the output matrix."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    x = random_normal(generator, n, d)
    torch.manual_seed(seed)
    worst = 0.0
    for name, kv_count in (("as many key heads", heads), ("shared key heads", kv_heads)):
        attention_layer = layer(d, heads, d_key=5, d_value=d_value, d_out=7, kv_heads=kv_count).double()
        torch.nn.init.normal_(attention_layer.out_proj.bias)  # a bias of 0 could not show that it is added once
        with torch.no_grad():
            without_bias = attention_layer(x) - attention_layer.out_proj.bias
            outputs, input_means = head_outputs(x, attention_layer, attention_fn)
            w_out = attention_layer.out_proj.weight.T
            head_rows = slices(w_out, heads)
            parts = outputs @ torch.stack(head_rows)  # the contribution of each head

            # Several heads share one value matrix if there are fewer key and value heads.
            w_value = attention_layer.v_proj.weight.T.chunk(kv_count, -1)
            merged = [w_value[h * kv_count // heads] @ rows for h, rows in enumerate(head_rows)]
            remaining = [float((without_bias - parts[:h].sum(0)).norm()) for h in range(heads + 1)]
        sum_error = largest_difference(without_bias, parts.sum(0))
        merged_error = largest_difference(without_bias, sum_of_products(input_means, merged))
        worst = max(worst, sum_error, merged_error)
        evidence.add_statement(
            f"With {name}, Concat(H) W_O + b = Σ H_h W_O^h + b.",
            sum_error < 1e-12,
            f"{heads} heads: the outputs agree within {sum_error:.1e}",
        )
        evidence.add_statement(
            f"With {name}, this is Σ (A_h X) W_v^h W_O^h + b, with one matrix per head.",
            merged_error < 1e-12,
            f"with one matrix per head, the outputs agree within {merged_error:.1e}",
        )
        # A control: its statement must be false.
        # Every head writes to all outputs, so its rows must not be exchangeable.
        swapped_error = largest_difference(without_bias, sum_of_products(outputs, rows_of_next(w_out, heads)))
        evidence.add_control(
            f"With {name}, each head with the rows of its neighbour gives the same output.",
            swapped_error < 1e-12,
            f"the outputs differ by {swapped_error:.3g}",
        )
    lines = {"remaining norm": (list(range(heads + 1)), remaining)}
    evidence.add_series("norm of the output minus the bias and the first h heads", lines, x="h", y="norm")
    evidence.numbers |= {"largest difference": worst, "heads": heads}
    return evidence


CLAIM = Claim(
    id="concat-is-sum-of-heads",
    title="Concatenated heads times W_O are a sum over heads",
    citations=(("assignment-6", "3.2"), ("homework-3", "1.2 (a)")),
    statement="Concatenating the heads and multiplying by W_O is the same as summing the heads, each multiplied by its "
    "own block of rows of W_O. So W_v and W_O of a head act as one matrix, which Assignment 6 calls W_v.",
    formula=r"[H_1, \dots, H_{N_h}] \, W_O \allowbreak = \sum_{h=1}^{N_h} H_h W_O^{(h)} \allowbreak = "
    r"\sum_{h=1}^{N_h} (A_h X) \, W_v^{(h)} W_O^{(h)}",
    refuted_by="A layer whose output is not the sum over its heads, plus the bias once.",
    control="Each head multiplied by the rows of its neighbour.",
    verdict=HOLDS,
    check=check,
)
