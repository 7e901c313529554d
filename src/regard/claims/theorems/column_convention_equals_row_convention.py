"""Items as columns or as rows: the same attention, unless a formula mixes the two."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention import attention
from regard.claims.claim import FAILS, Claim, Evidence

Maps = tuple[Tensor, Tensor, Tensor]
Head = Callable[[Tensor, Tensor, Tensor, Maps, float], Tensor]
Case = tuple[str, list[Tensor], Maps]


def columns(q: Tensor, k: Tensor, v: Tensor, beta: float) -> Tensor:
    """``H = V · softargmax_β(KᵀQ)``: one item a column; the weights of a query are a column that sums to 1."""
    return v @ (beta * k.T @ q).softmax(0)


def head_of_columns(q: Tensor, k: Tensor, v: Tensor, w: Maps, beta: float) -> Tensor:
    """As written: ``Q_i = W Q`` with W of d × d/h, and ``H_i = softmax(K_iᵀ Q_i) V_i``."""
    q, k, v = w[0] @ q, w[1] @ k, w[2] @ v
    return (beta * k.T @ q).softmax(-1) @ v


def head_of_rows(q: Tensor, k: Tensor, v: Tensor, w: Maps, beta: float) -> Tensor:
    """As written for self-attention: ``Q_i = C W`` with one item a row, and ``H_i = softmax(K_iᵀ Q_i) V_i``."""
    q, k, v = q @ w[0], k @ w[1], v @ w[2]
    return (beta * k.T @ q).softmax(-1) @ v


def corrected_columns(q: Tensor, k: Tensor, v: Tensor, w: Maps, beta: float) -> Tensor:
    """``Q_i = Wᵀ Q``, ``H_i = V_i · softargmax_β(K_iᵀ Q_i)``."""
    return columns(w[0].T @ q, w[1].T @ k, w[2].T @ v, beta)


def corrected_rows(q: Tensor, k: Tensor, v: Tensor, w: Maps, beta: float) -> Tensor:
    """``Q_i = C W``, ``H_i = softmax(Q_i K_iᵀ) V_i``."""
    q, k, v = q @ w[0], k @ w[1], v @ w[2]
    return (beta * q @ k.T).softmax(-1) @ v


def distance(head: Head, items: list[Tensor], w: Maps, beta: float, wanted: Tensor) -> tuple[float, str]:
    """How far a head is from the wanted one, −1 where its shapes do not fit, and that in words."""
    try:
        got = head(items[0], items[1], items[2], w, beta)
    except RuntimeError as error:
        sizes = re.search(r"(\d+)x(\d+) and (\d+)x(\d+)", str(error))
        return -1.0, "no such product: {} × {} times {} × {}".format(*sizes.groups()) if sizes else "no such product"
    if got.shape != wanted.shape:
        return -1.0, f"the result is {list(got.shape)}, not {list(wanted.shape)}"
    far = float((got - wanted).abs().max())
    return far, f"off by {far:.2g}"


def drawn(shapes: list[tuple[int, int]], draw: torch.Generator) -> list[Tensor]:
    return [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]


def ask(found: Evidence, name: str, of: tuple[Head, Head], case: Case, beta: float, attend: Callable[..., Any]) -> None:
    """A head formula as it is written and as it is corrected, against the operator on rows."""
    said, items, w = case
    rows = [one.T for one in items] if name == "columns" else items
    q, k, v = (one @ a for one, a in zip(rows, w, strict=True))
    wanted = attend(q[None], k[None], v[None], scale=beta)[0]
    wanted = wanted.T if name == "columns" else wanted
    far, words = distance(of[0], items, w, beta, wanted)
    found.written(f"{name}, {said}: the head formula is attention", 0 <= far < 1e-12, f"head of {name}, {words}")
    far, words = distance(of[1], items, w, beta, wanted)
    found.corrected(f"{name}, {said}: kept to one convention it is", 0 <= far < 1e-12, f"kept to {name}, {words}")


def cases(n: int, m: int, d: int, t: int, heads: int, draw: torch.Generator) -> dict[str, list[Case]]:
    """Sizes that differ, and sizes so equal that every product exists; self-attention where items are rows."""
    square = f"n = m = d = {d} and one head, so that all products exist"
    e, u = d // heads, t // heads
    wide, flat = [(d, n), (d, m), (t, m)], [(d, d)] * 3
    first, second = drawn(wide, draw), drawn(flat, draw)
    c = torch.randn(n, d, generator=draw, dtype=torch.float64)
    maps = [drawn(shapes, draw) for shapes in ([(d, e), (d, e), (t, u)], flat, [(d, e), (d, e), (d, u)])]
    w = [(q, k, v) for q, k, v in maps]
    return {
        "columns": [(f"{heads} heads", first, w[0]), (square, second, w[1])],
        "rows": [(f"{heads} heads", [c, c, c], w[2]), (square, [second[0]] * 3, w[1])],
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
    attend: Callable[..., Any] = attention,
    single: Callable[[Tensor, Tensor, Tensor, float], Tensor] = columns,
    head: tuple[Head, Head] = (head_of_columns, head_of_rows),
    corrected: tuple[Head, Head] = (corrected_columns, corrected_rows),
) -> Evidence:
    """The column form against the operator, which has items as rows; then the head formulas of the same document."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    q, k, v = drawn([(d, n), (d, m), (t, m)], draw)
    wanted = attend(q.T[None], k.T[None], v.T[None], scale=beta)[0].T
    far = float((single(q, k, v, beta) - wanted).abs().max())
    found.written("V · softargmax(KᵀQ) is the row form transposed", far < 1e-12, f"single head: within {far:.1e}")
    for name, of in zip(("columns", "rows"), zip(head, corrected, strict=True), strict=True):
        for case in cases(n, m, d, t, heads, draw)[name]:
            ask(found, name, of, case, beta, attend)
    found.corrected("V · softargmax(KᵀQ) is the row form transposed", far < 1e-12, f"the single head is: {far:.1e}")
    other = float((v @ (beta * k.T @ q).softmax(-1) - wanted).abs().max())
    found.control("softmax over queries instead of keys gives it too", other < 1e-12, f"off by {other:.3g}")
    betas = [step / 8 for step in range(17)]
    rows = [attend(q.T[None], k.T[None], v.T[None], scale=b)[0].T for b in betas]
    over = {"over keys": columns, "over queries": lambda q, k, v, b: v @ (b * k.T @ q).softmax(-1)}
    lines = {
        name: (betas, [float((f(q, k, v, b) - y).abs().max()) for b, y in zip(betas, rows, strict=True)])
        for name, f in over.items()
    }
    found.draw("distance of the column form from the row form, by where softmax is taken", lines, x="β", y="distance")
    found.numbers |= {"single head: largest difference": far, "softmax over queries": other}
    return found


CLAIM = Claim(
    id="column-convention-equals-row-convention",
    sources=("002",),
    statement="With items as columns attention is V·softargmax(KᵀQ), the row form transposed; and head i of it is "
    "softmax(K_iᵀQ_i)V_i, with Q_i = W_i Q for columns and Q_i = C W_i for rows, W_i of d × d/h.",
    formula=r"H = V \operatorname{softargmax}_\beta(K^\top Q), \qquad Q_i = W_Q^i Q, \quad W_Q^i \in "
    r"\mathbb{R}^{d \times \frac{d}{h}}, \qquad H_i = \operatorname{softmax}_\beta(K_i^\top Q_i) V_i",
    refuted="A formula whose shapes do not fit, or whose value is not the row form's.",
    control="The column form with softmax taken over queries.",
    verdict=FAILS,
    correction="The single head is right: V·softargmax(KᵀQ), with softmax over keys, is the row form transposed. The "
    "head formulas mix the conventions. With columns it is Q_i = W_iᵀQ and H_i = V_i·softargmax(K_iᵀQ_i), with rows "
    "Q_i = C W_i and H_i = softmax(Q_i K_iᵀ)V_i, and the two are each other's transposes.",
    check=check,
)
