"""Checks that the QK and the OV matrix of a head have at most the rank of its width."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from regard.claims._check_helpers import randomize
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.interp import circuits
from regard.nn import MultiHeadAttention

Matrices = Callable[[MultiHeadAttention, int], tuple[Tensor, Tensor]]


def head_matrices(layer: MultiHeadAttention, head: int) -> tuple[Tensor, Tensor]:
    """``W_Q W_Kᵀ`` and ``W_V W_O`` of one head, ``[D, D]``."""
    weights = circuits(layer).weights(0, head)
    return weights.query @ weights.key.T, weights.value @ weights.out


def rank(matrix: Tensor) -> int:
    """How many singular values are not 0, up to rounding."""
    values = torch.linalg.svdvals(matrix)
    return int((values > 1e-9 * values[0]).sum())


def check(
    *,
    d: int = 24,
    heads: int = 4,
    d_key: int = 5,
    d_value: int = 3,
    seed: int = 0,
    matrices: Matrices = head_matrices,
) -> Evidence:
    """Count the singular values of both matrices of each head, and of the sum over heads."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    layer = randomize(MultiHeadAttention(d, heads, d_key=d_key, d_value=d_value), generator)
    found = [matrices(layer, head) for head in range(heads)]
    qk_ranks = [rank(qk.detach()) for qk, _ in found]
    ov_ranks = [rank(ov.detach()) for _, ov in found]
    evidence.add_statement(
        "The QK matrix of every head has at most the rank of its keys' width.",
        max(qk_ranks) <= d_key,
        f"rank {max(qk_ranks)} of {d}, with keys of width {d_key}",
    )
    evidence.add_statement(
        "The OV matrix of every head has at most the rank of its values' width.",
        max(ov_ranks) <= d_value,
        f"rank {max(ov_ranks)}, with values of width {d_value}",
    )
    # Controls: their statements must be false.
    total = rank(torch.stack([ov.detach() for _, ov in found]).sum(0))
    evidence.add_control(
        "The sum of the OV matrices of all heads has at most this rank.", total <= d_value, f"its rank is {total}"
    )
    full = rank(torch.randn(d, d, generator=generator, dtype=torch.float64))
    evidence.add_control("A random matrix has at most this rank.", full <= max(d_key, d_value), f"its rank is {full}")
    evidence.numbers |= {"rank of QK": max(qk_ranks), "rank of OV": max(ov_ranks), "rank of the sum of OV": total}
    return evidence


CLAIM = Claim(
    id="heads-have-low-rank",
    title="The QK and OV matrices of a head have at most the rank of its width",
    citations=(("circuits-article", "Information movement"),),
    statement="A head is described by two matrices, W_Q W_Kᵀ (where it looks) and W_V W_O (what it moves). Both have "
    "D × D entries, but at most the rank of the head's width.",
    formula=r"\mathrm{rank} \left( W_Q W_K^T \right) \le d_k, \quad \mathrm{rank} \left( W_V W_O \right) \le d_v",
    refuted_by="A head whose QK or OV matrix has more singular values than its width that are not 0.",
    control="The sum of the OV matrices of several heads, and a random matrix.",
    verdict=HOLDS,
    check=check,
)
