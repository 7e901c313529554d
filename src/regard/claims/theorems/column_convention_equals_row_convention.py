"""Checks that attention is the same with items as columns and as rows, unless a formula mixes the two."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence

Projections = tuple[Tensor, Tensor, Tensor]
Head = Callable[[Tensor, Tensor, Tensor, Projections, float], Tensor]
Case = tuple[str, list[Tensor], Projections]
SAME = 1e-9  # larger differences are not rounding errors, even if scores reach thousands


def columns(q: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    """``H = V · softargmax_β(KᵀQ)``: one item per column. The weights of a query are a column that sums to 1."""
    return v @ (beta * k.T @ q).softmax(0)


def columns_over_queries(q: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    """The column form with the softmax over the wrong axis."""
    return v @ (beta * k.T @ q).softmax(-1)


def head_of_columns(q: Tensor, k: Tensor, v: Tensor, w: Projections, beta: float) -> Tensor:
    """As stated: ``Q_i = W Q`` with W of d × d/h, and ``H_i = softmax(K_iᵀ Q_i) V_i``."""
    q = w[0] @ q
    k = w[1] @ k
    v = w[2] @ v
    return (beta * k.T @ q).softmax(-1) @ v


def head_of_rows(q: Tensor, k: Tensor, v: Tensor, w: Projections, beta: float) -> Tensor:
    """As stated for self-attention: ``Q_i = C W`` with one item per row, and ``H_i = softmax(K_iᵀ Q_i) V_i``."""
    return (beta * (k @ w[1]).T @ (q @ w[0])).softmax(-1) @ (v @ w[2])


def corrected_columns(q: Tensor, k: Tensor, v: Tensor, w: Projections, beta: float) -> Tensor:
    """``Q_i = Wᵀ Q``, ``H_i = V_i · softargmax_β(K_iᵀ Q_i)``."""
    return columns(w[0].T @ q, w[1].T @ k, w[2].T @ v, beta)


def corrected_rows(q: Tensor, k: Tensor, v: Tensor, w: Projections, beta: float) -> Tensor:
    """``Q_i = C W``, ``H_i = softmax(Q_i K_iᵀ) V_i``."""
    return (beta * (q @ w[0]) @ (k @ w[1]).T).softmax(-1) @ (v @ w[2])


def compare(head: Head, items: list[Tensor], w: Projections, beta: float, expected: Tensor) -> tuple[bool, str]:
    """Whether a head formula gives the expected output, and a description of the difference."""
    try:
        output = head(items[0], items[1], items[2], w, beta)  # the stated formulas may not even have matching shapes
    except RuntimeError as error:
        sizes = re.search(r"(\d+)x(\d+) and (\d+)x(\d+)", str(error))
        if sizes is None:
            return False, "the product does not exist"
        return False, "the product of {} × {} and {} × {} does not exist".format(*sizes.groups())
    if output.shape != expected.shape:
        return False, f"the result has shape {list(output.shape)}, not {list(expected.shape)}"
    difference = largest_difference(output, expected)
    return difference < SAME, f"the outputs differ by {difference:.2g}"


def random_matrices(shapes: list[tuple[int, int]], generator: torch.Generator) -> list[Tensor]:
    """One random matrix per shape."""
    return [random_normal(generator, *shape) for shape in shapes]


def check_head(
    evidence: Evidence, name: str, heads: tuple[Head, Head], case: Case, beta: float, attention_fn: AttentionFn
) -> None:
    """Compare a head formula, as stated and as corrected, with the operator, which has items as rows."""
    sizes, items, w = case
    rows = items  # self-attention with items as rows needs no transpose
    if name == "columns":
        rows = [item.T for item in items]
    q, k, v = (item @ projection for item, projection in zip(rows, w, strict=True))
    expected = attention_fn(q[None], k[None], v[None], scale=beta)[0]
    if name == "columns":
        expected = expected.T
    holds, description = compare(heads[0], items, w, beta, expected)
    evidence.add_statement(
        f"With {name} and {sizes}, the formula is attention.", holds, f"formula for {name}: {description}"
    )
    holds, description = compare(heads[1], items, w, beta, expected)
    evidence.add_correction(
        f"With {name} and {sizes}, the head formula, corrected to one convention, is attention.",
        holds,
        f"corrected formula for {name}: {description}",
    )


def cases(n: int, m: int, d: int, t: int, heads: int, generator: torch.Generator) -> dict[str, list[Case]]:
    """Cases with different sizes, and with equal sizes for which every product exists. Rows are self-attention."""
    square = f"n = m = d = {d} and one head, where all products exist"
    d_head = d // heads
    t_head = t // heads
    equal_shapes = [(d, d)] * 3
    unequal = random_matrices([(d, n), (d, m), (t, m)], generator)
    equal = random_matrices(equal_shapes, generator)
    rows = random_normal(generator, n, d)
    column_maps = tuple(random_matrices([(d, d_head), (d, d_head), (t, t_head)], generator))
    square_maps = tuple(random_matrices(equal_shapes, generator))
    row_maps = tuple(random_matrices([(d, d_head), (d, d_head), (d, t_head)], generator))
    return {
        "columns": [(f"{heads} heads", unequal, column_maps), (square, equal, square_maps)],  # type: ignore[list-item]
        "rows": [(f"{heads} heads", [rows] * 3, row_maps), (square, [equal[0]] * 3, square_maps)],  # type: ignore[list-item]
    }


def check(
    *,
    n: int = 5,
    m: int = 7,
    d: int = 8,
    t: int = 6,
    heads: int = 2,
    beta: float = 0.5,
    seed: int = 0,
    attention_fn: AttentionFn = attention,
    single: Callable[[Tensor, Tensor, Tensor, float], Tensor] = columns,
    head: tuple[Head, Head] = (head_of_columns, head_of_rows),
    corrected: tuple[Head, Head] = (corrected_columns, corrected_rows),
) -> Evidence:
    """Compare the column form with the operator, which has items as rows; then the head formulas of the document."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    q, k, v = random_matrices([(d, n), (d, m), (t, m)], generator)
    expected = attention_fn(q.T[None], k.T[None], v.T[None], scale=beta)[0].T
    error = largest_difference(single(q, k, v, beta), expected)
    evidence.add_statement(
        "V·softargmax(KᵀQ) is the transposed row form.", error < SAME, f"single head: within {error:.1e}"
    )
    for name, stated_head, corrected_head in zip(("columns", "rows"), head, corrected, strict=True):
        for case in cases(n, m, d, t, heads, generator)[name]:
            check_head(evidence, name, (stated_head, corrected_head), case, beta, attention_fn)
    evidence.add_correction(
        "V·softargmax(KᵀQ) is the transposed row form.", error < SAME, f"single head: within {error:.1e}"
    )

    # A control: its statement must be false. Normalised over queries, the weights of a query no longer sum to 1.
    wrong_axis = largest_difference(columns_over_queries(q, k, v, beta), expected)
    evidence.add_control(
        "A softmax over queries gives the row form too.", wrong_axis < SAME, f"outputs differ by {wrong_axis:.3g}"
    )
    betas = [step / 8 for step in range(17)]
    over_keys = []
    over_queries = []
    for b in betas:
        rows = attention_fn(q.T[None], k.T[None], v.T[None], scale=b)[0].T
        over_keys.append(largest_difference(columns(q, k, v, b), rows))
        over_queries.append(largest_difference(columns_over_queries(q, k, v, b), rows))
    lines = {"over keys": (betas, over_keys), "over queries": (betas, over_queries)}
    evidence.add_series("difference of column form and row form, by softmax axis", lines, x="β", y="difference")
    evidence.numbers |= {"single head: largest difference": error, "softmax over queries": wrong_axis}
    return evidence


CLAIM = Claim(
    id="column-convention-equals-row-convention",
    title="With items as columns, head i is softmax(K_iᵀQ_i)V_i with Q_i = W_i Q",
    citations=(("homework-3", "1.1 (a)"), ("homework-3", "1.2 (a)"), ("homework-3", "1.3 (a)")),
    statement="With items as columns, attention is V·softargmax(KᵀQ), the transposed row form. Its head i is "
    "softmax(K_iᵀQ_i)V_i, with Q_i = W_i Q for columns, Q_i = C W_i for rows, and W_i of d × d/h.",
    formula=r"H = V \operatorname{softargmax}_\beta(K^\top Q), \qquad Q_i = W_Q^i Q, \quad W_Q^i \in "
    r"\mathbb{R}^{d \times \frac{d}{h}}, \qquad H_i = \operatorname{softmax}_\beta(K_i^\top Q_i) V_i",
    refuted_by="A formula whose shapes do not fit, or whose value is not that of the row form.",
    control="The column form with a softmax over queries.",
    verdict=FALSE_AS_STATED,
    what_holds="With items as columns, head i is V_i·softargmax(K_iᵀQ_i) with Q_i = W_iᵀQ, the transposed row form.",
    correction="The single head is right: V·softargmax(KᵀQ), with softmax over keys, is the transposed row form. The "
    "head formulas mix the conventions. With columns they are Q_i = W_iᵀQ and H_i = V_i·softargmax(K_iᵀQ_i). With rows "
    "they are Q_i = C W_i and H_i = softmax(Q_i K_iᵀ)V_i. Each is the transpose of the other.",
    check=check,
)
