"""Checks, by gradients and by changing later inputs, that no output depends on a later input under the causal mask."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from regard._operator import attention
from regard.claims._check_helpers import AttentionFn, largest_difference, random_normal
from regard.claims._claim import HOLDS, Claim, Evidence
from regard.masks import Causal, Mask
from regard.nn import Decoder, Encoder


def influence(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``‖∂y_i/∂x_j‖`` as ``[n, n]``, for x ``[n, d]``."""
    n, d = x.shape
    # Every output number gets a batch entry of its own, so that one backward pass gives all gradients.
    copies = x.repeat(n * d, 1, 1).requires_grad_()
    y = function(copies).flatten(1)
    (grad,) = torch.autograd.grad(y, copies, torch.eye(n * d, dtype=x.dtype))
    return grad.view(n, d, n, d).square().sum((1, 3)).sqrt()


def one_head(
    mask: Mask | None, d: int, generator: torch.Generator, attention_fn: AttentionFn
) -> Callable[[Tensor], Tensor]:
    """One head of self-attention, ``x → attention(x W_q, x W_k, x W_v)``."""
    projections = random_normal(generator, 3, d, d) / d**0.5

    def layer(x: Tensor) -> Tensor:
        q, k, v = (torch.unsqueeze(x @ projection.to(x), -3) for projection in projections)
        return attention_fn(q, k, v, mask=mask).squeeze(-3)

    return layer


def change_by_later_inputs(function: Callable[[Tensor], Tensor], x: Tensor, generator: torch.Generator) -> float:
    """The largest change of outputs 0 … t when all inputs after t are replaced by large ones, over all t."""
    y = function(x)
    worst = 0.0  # exactly 0 is expected
    for t in range(len(x) - 1):
        replaced = x.clone()
        replaced[t + 1 :] = 100 * torch.randn(x[t + 1 :].shape, generator=generator).to(x)
        worst = max(worst, largest_difference(function(replaced)[: t + 1], y[: t + 1]))
    return worst


def check(
    *,
    n: int = 10,
    d: int = 8,
    heads: int = 2,
    layers: int = 3,
    seed: int = 0,
    mask: Callable[[], Mask | None] = Causal,
    make: Callable[..., nn.Module] = Decoder,
    attention_fn: AttentionFn = attention,
) -> Evidence:
    """Compute gradients of every output by every input, for one head and a stack, and change later inputs."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = random_normal(generator, n, d)
    decoder = make(d, heads=heads, layers=layers).double().eval()
    head = one_head(mask(), d, generator, attention_fn)
    encoder = Encoder(d, heads=heads, layers=layers).double().eval()
    later = torch.ones(n, n).triu(1).bool()  # j > i
    earlier = torch.ones(n, n).tril().bool()  # j ≤ i
    unmasked = influence(encoder, x)
    unmasked_later = float(unmasked[later].max())
    masked = {f"a decoder of {layers} layers": influence(decoder, x), "one head": influence(head, x)}
    for name, gradient_norms in masked.items():
        largest = float(gradient_norms[later].max())
        smallest = float(gradient_norms[earlier].min())
        evidence.add_statement(
            f"In {name}, no output has a gradient by a later input.",
            largest == 0,
            f"{name}: the largest of {int(later.sum())} gradients by later inputs is {largest:g}, without a mask it is "
            f"{unmasked_later:.2g}",
        )
        evidence.add_statement(
            f"In {name}, earlier inputs all have gradients.", smallest > 0, f"smallest {smallest:.1e}"
        )
    with torch.no_grad():
        decoder_change = change_by_later_inputs(decoder, x, generator)
        head_change = change_by_later_inputs(head, x.float(), generator)
    evidence.add_statement(
        "The outputs of a decoder do not change in any bit when later inputs change.",
        decoder_change == 0,
        f"they change by {decoder_change:g}",
    )
    evidence.add_statement(
        "The outputs of one head in float32 do not either.", head_change == 0, f"they change by {head_change:g}"
    )

    # Controls: their statements must be false.
    # Both controls let an output see at least one later input, so a gradient by it must appear.
    shifted = influence(one_head(Causal(offset=1), d, generator, attention_fn), x)
    evidence.add_control("Without a mask, no output has a gradient by a later input.", unmasked_later == 0)
    evidence.add_control(
        "With a mask that is shifted by one, no output has a gradient by a later input.",
        float(shifted[later].max()) == 0,
    )
    offsets = range(1 - n, n)
    curves = {}
    for name, gradient_norms in (("causal", next(iter(masked.values()))), ("no mask", unmasked), ("shifted", shifted)):
        curves[name] = [float(gradient_norms.diagonal(offset).mean()) for offset in offsets]
    evidence.add_curves("mean ‖∂y_i/∂x_j‖ by offset", offsets, curves, x="j − i", y="gradient")
    evidence.numbers |= {"later pairs": int(later.sum()), "largest gradient without mask": unmasked_later}
    return evidence


CLAIM = Claim(
    id="causal-mask",
    title="Under the causal mask, no output depends on a later input",
    citations=(("exam-answers", "2 (b)"), ("solution-sheet", "2 (b)")),
    papers=("vaswani-2017",),
    statement="Under the causal mask, which adds −∞ to the score of every key after the query, no output depends on a "
    "later input, through any number of layers.",
    formula=r"\frac{\partial y_i}{\partial x_j} = 0 \quad \forall j > i",
    refuted_by="A gradient of an output by a later input that is not exactly 0, or an output that changes with one.",
    control="No mask, and a mask that is shifted by one position: both must let later inputs through.",
    verdict=HOLDS,
    check=check,
)
