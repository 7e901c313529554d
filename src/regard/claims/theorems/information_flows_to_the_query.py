"""Attention from a query to a key moves what the key holds to the query, not the other way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.claims.claim import FAILS, Claim, Evidence
from regard.nn import Encoder

CATS, MASK = 1, 2  # places in: The cats [MASK] running
CLEAR = 1e-6


def sees(n: int, query: int, key: int) -> Tensor:
    """Who may attend to whom: each to itself, and one query to one key."""
    allowed = torch.eye(n, dtype=torch.bool)
    allowed[query, key] = True
    return allowed


def flow(f: Callable[[Tensor], Tensor], x: Tensor, source: int, sink: int) -> float:
    """``‖∂y_sink/∂x_source‖``; every entry of the output in a batch entry of its own."""
    n, d = x.shape
    copies = x.repeat(d, 1, 1).requires_grad_()
    (grad,) = torch.autograd.grad(f(copies)[:, sink], copies, torch.eye(d, dtype=x.dtype))
    return float(grad[:, source].norm())


def verb(f: Callable[[Tensor], Tensor], x: Tensor, singular: Tensor) -> float:
    """By how much the output at [MASK], of which the verb is predicted, differs for 'cats' and for 'cat'."""
    other = x.clone()
    other[CATS] = singular
    with torch.no_grad():
        return float((f(x.unsqueeze(0)) - f(other.unsqueeze(0)))[0, MASK].norm())


def raised(x: Tensor, W: Tensor, query: int, key: int, attend: Callable[..., Any]) -> tuple[list[float], list[float]]:
    """One head in which the score of a pair is raised: the pair's weight, and what flows from 'cats' to [MASK]."""
    weights, flows = [], []
    for height in range(-4, 9):
        bias = torch.zeros(len(x), len(x), dtype=x.dtype)
        bias[query, key] = height

        def head(z: Tensor, bias: Tensor = bias) -> Tensor:
            q, k, v = (torch.unsqueeze(z @ w, -3) for w in W)
            out: Tensor = attend(q, k, v, bias=bias)
            return out.squeeze(-3)

        eye = torch.eye(len(x), dtype=x.dtype)
        q, k = ((x @ w).unsqueeze(0) for w in W[:2])
        weights.append(float(attend(q, k, eye.unsqueeze(0), bias=bias)[0, query, key]))
        flows.append(flow(head, x, CATS, MASK))
    return weights, flows


def check(
    *,
    d: int = 16,
    heads: int = 2,
    layers: int = 3,
    seed: int = 0,
    make: Callable[..., nn.Module] = Encoder,
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """Four words; 'cats' attends to [MASK], or [MASK] to 'cats': gradients and outputs, in a layer and in several."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(4, d, generator=draw, dtype=torch.float64)
    singular = torch.randn(d, generator=draw, dtype=torch.float64)
    as_written, turned = sees(4, CATS, MASK), sees(4, MASK, CATS)
    for depth in sorted({1, layers}):
        model = make(d, heads=heads, layers=depth).double().eval()
        run = {name: partial(model, mask=to) for name, to in (("as", as_written), ("turned", turned))}
        none, some = (flow(run[name], x, CATS, MASK) for name in ("as", "turned"))
        still, moved = (verb(run[name], x, singular) for name in ("as", "turned"))
        at = f"{depth} layer{'s' * (depth > 1)}"
        found.written(
            f"{at}, 'cats' attends to [MASK]: 'cats' acts on [MASK]",
            none > CLEAR,
            f"as written the gradient is {none:g}",
        )
        found.written(f"{at}: 'cat' for 'cats' changes what [MASK] gives", still > CLEAR, f"change {still:g}")
        found.corrected(
            f"{at}, [MASK] attends to 'cats': 'cats' acts on [MASK]", some > CLEAR, f"turned round {some:.2g}"
        )
        found.corrected(f"{at}: 'cat' for 'cats' changes what [MASK] gives", moved > CLEAR, f"change {moved:.2g}")
        back = flow(run["turned"], x, MASK, CATS)
        found.control(f"{at}, [MASK] attends to 'cats': [MASK] acts on 'cats'", back > CLEAR, f"gradient {back:g}")
        found.numbers |= {f"{at}, as written": none, f"{at}, turned": some}
    W = torch.randn(3, d, d, generator=draw, dtype=torch.float64) / d**0.5
    lines = {
        "from 'cats' to [MASK]": raised(x, W, CATS, MASK, attend),
        "from [MASK] to 'cats'": raised(x, W, MASK, CATS, attend),
    }
    flat, grown = (part[1] for part in lines.values())
    said = f"raised to {lines[next(iter(lines))][0][-1]:.3f} the flow stays {flat[-1]:.2g}"
    found.written("one head, all attend to all: raising it raises the flow", max(flat) - min(flat) > CLEAR, said)
    more = max(grown) / grown[0]
    found.corrected("one head: raising that from [MASK] to 'cats' raises the flow", more > 2, f"up to {more:.2g} times")
    found.draw("what reaches [MASK] from 'cats'", lines, x="weight of the pair", y="‖∂y/∂x‖")
    return found


CLAIM = Claim(
    id="information-flows-to-the-query",
    sources=("001",),
    statement="In 'The cats [MASK] running', attention from 'cats' to [MASK] lets the verb be predicted: the number of "
    "'cats' reaches the place where the verb is missing.",
    formula=r"A_{\operatorname{cats},\operatorname{mask}} > 0 \quad \Rightarrow \quad "
    r"\frac{\partial y_{\operatorname{mask}}}{\partial x_{\operatorname{cats}}} \ne 0",
    refuted="That attention, with a prediction at [MASK] that does not depend on 'cats'.",
    control="[MASK] attends to 'cats', asked whether something then flows back to 'cats'.",
    verdict=FAILS,
    correction="The query receives: row i of the weights says what position i takes from others. The [MASK] position "
    "must attend to 'cats', and what flows grows with that weight; attention from 'cats' to [MASK] brings nothing of "
    "'cats' to [MASK], however large it is and through any number of layers.",
    check=check,
)
