"""Checks that attention from a query to a key moves information from the key to the query, not the other way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, attention_weights, random_normal
from regard.claims._claim import FALSE_AS_STATED, Claim, Evidence
from regard.nn import Encoder

CATS = 1  # positions in: The cats [MASK] running
MASK = 2
CLEAR = 1e-6  # larger gradients and changes are not rounding errors


def mask_with_pair(n: int, query: int, key: int) -> Tensor:
    """A mask ``[n, n]`` in which every position attends to itself, and one query also to one key."""
    allowed = torch.eye(n, dtype=torch.bool)
    allowed[query, key] = True
    return allowed


def gradient_norm(function: Callable[[Tensor], Tensor], x: Tensor, source: int, target: int) -> float:
    """``‖∂y_target/∂x_source‖``, for x ``[n, d]``."""
    d = x.shape[1]
    # Every output number gets a batch entry of its own, so that one backward pass gives all gradients.
    copies = x.repeat(d, 1, 1).requires_grad_()
    (grad,) = torch.autograd.grad(function(copies)[:, target], copies, torch.eye(d, dtype=x.dtype))
    return float(grad[:, source].norm())


def change_at_mask(function: Callable[[Tensor], Tensor], x: Tensor, singular: Tensor) -> float:
    """How much the output at [MASK], which predicts the verb, changes if 'cat' replaces 'cats'."""
    replaced = x.clone()
    replaced[CATS] = singular
    with torch.no_grad():
        return float((function(x.unsqueeze(0)) - function(replaced.unsqueeze(0)))[0, MASK].norm())


def raise_one_score(
    x: Tensor, projections: Tensor, query: int, key: int, attention_fn: AttentionFn
) -> tuple[list[float], list[float]]:
    """Raise one pair's score in one head. Returns the pair's weights, and the gradient norms from 'cats' to [MASK]."""
    weights = []
    gradients = []
    for height in range(-4, 9):
        bias = torch.zeros(len(x), len(x), dtype=x.dtype)
        bias[query, key] = height

        def head(z: Tensor, bias: Tensor = bias) -> Tensor:
            q, k, v = (torch.unsqueeze(z @ projection, -3) for projection in projections)
            return attention_fn(q, k, v, bias=bias).squeeze(-3)

        q, k, _ = x @ projections
        weights.append(float(attention_weights(attention_fn, q[None], k[None], bias=bias)[0, query, key]))
        gradients.append(gradient_norm(head, x, CATS, MASK))
    return weights, gradients


def check_depth(evidence: Evidence, model: nn.Module, depth: str, x: Tensor, singular: Tensor) -> None:
    """Check both directions in one model: gradients, and the output at [MASK] if 'cat' replaces 'cats'."""
    as_written = partial(model, mask=mask_with_pair(4, CATS, MASK))
    reversed_pair = partial(model, mask=mask_with_pair(4, MASK, CATS))
    written_gradient = gradient_norm(as_written, x, CATS, MASK)
    reversed_gradient = gradient_norm(reversed_pair, x, CATS, MASK)
    written_change = change_at_mask(as_written, x, singular)
    reversed_change = change_at_mask(reversed_pair, x, singular)
    evidence.add_statement(
        f"{depth}: if 'cats' attends to [MASK], 'cats' influences the output at [MASK].",
        written_gradient > CLEAR,
        f"if 'cats' attends to [MASK], the gradient is {written_gradient:g}",
    )
    evidence.add_statement(
        f"{depth}: then 'cat' instead of 'cats' changes it.", written_change > CLEAR, f"change {written_change:g}"
    )
    evidence.add_correction(
        f"{depth}: if [MASK] attends to 'cats', 'cats' influences the output at [MASK].",
        reversed_gradient > CLEAR,
        f"if [MASK] attends to 'cats', it is {reversed_gradient:.2g}",
    )
    evidence.add_correction(
        f"{depth}: then 'cat' instead of 'cats' changes it.", reversed_change > CLEAR, f"change {reversed_change:.2g}"
    )

    # A control: its statement must be false.
    # Information flows only towards the query, so none may come back to the key.
    backward = gradient_norm(reversed_pair, x, MASK, CATS)
    evidence.add_control(
        f"{depth}: if [MASK] attends to 'cats', [MASK] influences the output at 'cats'.",
        backward > CLEAR,
        f"gradient {backward:g}",
    )
    evidence.numbers |= {f"{depth}, as written": written_gradient, f"{depth}, turned": reversed_gradient}


def check(
    *,
    d: int = 16,
    heads: int = 2,
    layers: int = 3,
    seed: int = 0,
    make: Callable[..., nn.Module] = Encoder,
    attention_fn: AttentionFn = attention,
) -> Evidence:
    """Let 'cats' attend to [MASK], and [MASK] to 'cats', in one layer and in several: compare gradients and outputs."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = random_normal(generator, 4, d)
    singular = random_normal(generator, d)
    for depth in sorted({1, layers}):
        model = make(d, heads=heads, layers=depth).double().eval()
        check_depth(evidence, model, f"{depth} layer{'s' * (depth > 1)}", x, singular)

    # In one head where all attend to all, only the weight of the right pair may matter.
    projections = random_normal(generator, 3, d, d) / d**0.5
    from_cats = raise_one_score(x, projections, CATS, MASK, attention_fn)
    from_mask = raise_one_score(x, projections, MASK, CATS, attention_fn)
    evidence.add_statement(
        "In one head where all attend to all, a larger weight from 'cats' to [MASK] increases the gradient.",
        max(from_cats[1]) - min(from_cats[1]) > CLEAR,
        f"at a weight of {from_cats[0][-1]:.3f}, the gradient is still {from_cats[1][-1]:.2g}",
    )
    growth = max(from_mask[1]) / from_mask[1][0]
    evidence.add_correction(
        "In one head, a larger weight from [MASK] to 'cats' increases the gradient.", growth > 2, f"{growth:.2g} times"
    )
    lines = {"from 'cats' to [MASK]": from_cats, "from [MASK] to 'cats'": from_mask}
    evidence.add_series("what reaches [MASK] from 'cats'", lines, x="weight of the pair", y="‖∂y/∂x‖")
    return evidence


CLAIM = Claim(
    id="information-flows-to-the-query",
    title="Attention from 'cats' to [MASK] tells [MASK] the number of 'cats'",
    citations=(("exam-answers", "2 (c)"),),
    statement="In 'The cats [MASK] running', attention from 'cats' to [MASK] makes it possible to predict the verb: "
    "the number of 'cats' reaches the position where the verb is missing.",
    formula=r"A_{\operatorname{cats},\operatorname{mask}} > 0 \quad \Rightarrow \quad "
    r"\frac{\partial y_{\operatorname{mask}}}{\partial x_{\operatorname{cats}}} \ne 0",
    refuted_by="Attention from 'cats' to [MASK] with an output at [MASK] that does not depend on 'cats'.",
    control="[MASK] attends to 'cats': nothing may flow back from [MASK] to 'cats'.",
    verdict=FALSE_AS_STATED,
    what_holds="Information flows to the query: [MASK] must attend to 'cats' to receive anything of it.",
    correction="The query receives: row i of the weights says what position i takes from the others. So [MASK] must "
    "attend to 'cats', and more information flows as that weight grows. Attention from 'cats' to [MASK] brings "
    "nothing of 'cats' to [MASK], however large the weight and through any number of layers.",
    check=check,
)
