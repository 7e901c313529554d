"""Under the causal mask no output depends on a later input: by gradient, and by changing what comes later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.claims.claim import HOLDS, Claim, Evidence
from regard.masks import Causal, Mask
from regard.nn import Decoder, Encoder


def influence(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``[n, n]``: ‖∂y_i/∂x_j‖ for x ``[n, d]``; every output in a batch entry of its own, so one pass is enough."""
    n, d = x.shape
    copies = x.repeat(n * d, 1, 1).requires_grad_()
    y = f(copies).flatten(1)
    (grad,) = torch.autograd.grad(y, copies, torch.eye(n * d, dtype=x.dtype))
    return grad.view(n, d, n, d).square().sum((1, 3)).sqrt()


def operator(
    mask: Mask | None, d: int, draw: torch.Generator, attend: Callable[..., Any]
) -> Callable[[Tensor], Tensor]:
    """One head of self-attention, ``x → attention(x W_q, x W_k, x W_v)``."""
    W = torch.randn(3, d, d, generator=draw, dtype=torch.float64) / d**0.5

    def layer(x: Tensor) -> Tensor:
        q, k, v = (torch.unsqueeze(x @ w.to(x), -3) for w in W)
        out: Tensor = attend(q, k, v, mask=mask)
        return out.squeeze(-3)

    return layer


def disturbed(f: Callable[[Tensor], Tensor], x: Tensor, draw: torch.Generator) -> float:
    """The largest change of outputs 0 … t when inputs after t become others, large ones too, for every t."""
    y, worst = f(x), 0.0
    for t in range(len(x) - 1):
        other = x.clone()
        other[t + 1 :] = 100 * torch.randn(x[t + 1 :].shape, generator=draw).to(x)
        worst = max(worst, float((f(other)[: t + 1] - y[: t + 1]).abs().max()))
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
    attend: Callable[..., Any] = attention,
) -> Evidence:
    """Gradients of every output by every input, of one head and of a stack; and the same with later inputs changed."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    x = torch.randn(n, d, generator=draw, dtype=torch.float64)
    stack = make(d, heads=heads, layers=layers).double().eval()
    head, free = operator(mask(), d, draw, attend), Encoder(d, heads=heads, layers=layers).double().eval()
    later, earlier = torch.ones(n, n).triu(1).bool(), torch.ones(n, n).tril().bool()
    seen = {f"a decoder of {layers} layers": influence(stack, x), "one head": influence(head, x)}
    open_ = influence(free, x)
    for name, map_ in seen.items():
        most, least = float(map_[later].max()), float(map_[earlier].min())
        count = f"largest of {int(later.sum())} gradients by later inputs"
        found.written(
            f"{name}: no gradient by a later input",
            most == 0,
            f"{name}: {count} is {most:g}, without a mask {float(open_[later].max()):.2g}",
        )
        found.written(f"{name}: a gradient by every earlier input", least > 0, f"smallest {least:.1e}")
    with torch.no_grad():
        changed = disturbed(stack, x, draw)
        single = disturbed(head, x.float(), draw)
    found.written("a decoder: outputs stay, bit for bit, when later inputs change", changed == 0, f"change {changed:g}")
    found.written("one head in float32: the same", single == 0, f"change {single:g}")
    slip = influence(operator(Causal(offset=1), d, draw, attend), x)
    found.control("without a mask: no gradient by a later input", float(open_[later].max()) == 0)
    found.control("a mask that is off by one: no gradient by a later input", float(slip[later].max()) == 0)
    offsets = range(1 - n, n)
    lines = {
        name: (offsets, [float(map_.diagonal(o).mean()) for o in offsets])
        for name, map_ in {"causal": next(iter(seen.values())), "no mask": open_, "off by one": slip}.items()
    }
    found.draw("mean ‖∂y_i/∂x_j‖ by offset", lines, x="j − i", y="gradient")
    found.numbers |= {"later pairs": int(later.sum()), "largest gradient without mask": float(open_[later].max())}
    return found


CLAIM = Claim(
    id="causal-mask",
    sources=("001", "003"),
    statement="Under the causal mask, −∞ for every key after the query, no output depends on a later input, through "
    "any number of layers.",
    formula=r"\frac{\partial y_i}{\partial x_j} = 0 \quad \forall j > i",
    refuted="A gradient of an output by a later input that is not exactly 0, or an output that changes with one.",
    control="No mask, and a mask that is shifted by one position, asked the same.",
    verdict=HOLDS,
    check=check,
)
