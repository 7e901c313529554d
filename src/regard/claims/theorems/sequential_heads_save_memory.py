"""One head at a time needs n², not h·n²: where no gradient is wanted."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from regard.attention import attention
from regard.claims.claim import HOLDS_IF, Claim, Evidence
from regard.claims.statistics import slope


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The document's lines 20 to 31: scores, weights and their product with values, each stored."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """All heads in one call."""
    return plain(q, k, v)


def in_turn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other."""
    return torch.stack([plain(q[:, h], k[:, h], v[:, h]) for h in range(q.shape[1])], dim=1)


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other, each computed again for its gradients."""
    heads = [checkpoint(plain, q[:, h], k[:, h], v[:, h], use_reentrant=False) for h in range(q.shape[1])]
    return torch.stack(heads, dim=1)


def kept(call: Callable[[], Any], but: Sequence[Tensor] = ()) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass, each piece of memory once, without those of ``but``."""
    seen: dict[tuple[int, int], Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        seen.setdefault((x.data_ptr(), x.numel()), x)
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = call()
    del held
    own = {(x.data_ptr(), x.numel()) for x in but}
    return [x for at, x in seen.items() if at not in own]


class Live(TorchDispatchMode):
    """The most numbers that tensors of a call held at once, each piece of memory once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.held: dict[int, list[int]] = {}  # memory → how many tensors look at it, and its numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            at = x.untyped_storage().data_ptr()
            if at not in self.held and at in given:
                continue  # a view of what was there before
            if at not in self.held:
                self.held[at] = [0, x.untyped_storage().nbytes() // x.element_size()]
                self.now += self.held[at][1]
            self.held[at][0] += 1
            weakref.finalize(x, self._gone, at)
        self.most = max(self.most, self.now)
        return out

    def _gone(self, at: int) -> None:
        self.held[at][0] -= 1
        if not self.held[at][0]:
            self.now -= self.held.pop(at)[1]


def most(call: Callable[[], Any]) -> int:
    """The most numbers held at once where no gradient is wanted."""
    with torch.no_grad(), Live() as live:
        call()
    return live.most


def check(
    *,
    n: int = 128,
    d: int = 4,
    heads: int = 8,
    seed: int = 0,
    one_by_one: Callable[..., Tensor] = in_turn,
    again: Callable[..., Tensor] = recomputed,
) -> Evidence:
    """Numbers that autograd keeps, and that inference holds at once, for all heads together and one after the other."""
    found = Evidence()
    draw = torch.Generator().manual_seed(seed)
    many = sorted({1, 2, 3, heads})  # three at least, for a slope
    ways = {"all heads at once": together, "one by one": one_by_one, "one by one, recomputed": again}
    train: dict[str, list[float]] = {name: [] for name in ways}
    infer: dict[str, list[float]] = {name: [] for name in ways}
    far = 0.0
    for h in many:
        q, k, v = (torch.randn(1, h, n, d, generator=draw, dtype=torch.float64).requires_grad_() for _ in range(3))
        wanted = attention(q, k, v)
        for name, way in ways.items():
            train[name].append(sum(x.numel() for x in kept(partial(way, q, k, v))) / n**2)
            infer[name].append(most(partial(way, q, k, v)) / n**2)
            far = max(far, float((way(q, k, v) - wanted).detach().abs().max()))
    _ask(found, many, train, infer, far)
    lines = {f"{name}, kept for gradients": (many, y) for name, y in train.items()}
    lines |= {f"{name}, inference": (many, y) for name, y in infer.items() if "rec" not in name}
    found.draw(f"numbers held, in n² (n = {n}, d_head = {d})", lines, x="heads", y="numbers / n²", log="xy")
    found.numbers |= {"n": n, "heads": heads, **{f"{name}, kept / n²": y[-1] for name, y in train.items()}}
    return found


def _ask(
    found: Evidence, many: list[int], train: dict[str, list[float]], infer: dict[str, list[float]], far: float
) -> None:
    heads = many[-1]

    def grows(y: list[float]) -> float:
        return slope(many, y).value

    kept_in_turn, kept_again, live = (
        grows(train["one by one"]),
        grows(train["one by one, recomputed"]),
        grows(infer["one by one"]),
    )
    found.written(
        "in training, one head at a time keeps n² and not h·n²",
        kept_in_turn < 0.5,
        f"for gradients {train['one by one'][-1]:.2f} n² are kept at {heads} heads one by one, "
        f"{train['all heads at once'][-1]:.2f} n² all at once",
    )
    found.condition(
        "without gradients, one head at a time holds no n² more for each head",
        live < 0.5 and infer["one by one"][-1] < infer["all heads at once"][-1] / 2,
        f"in inference {infer['one by one'][-1]:.2f} n² are held at once, not {infer['all heads at once'][-1]:.2f} n²",
    )
    found.condition(
        "with each head computed again for its gradients, no n² more is kept for each head",
        kept_again < 0.5,
        f"recomputed: {train['one by one, recomputed'][-1]:.2f} n² kept at {heads} heads",
    )
    found.condition("every order gives what the operator gives", far < 1e-12, f"within {far:.0e}")
    found.control(
        "all heads at once hold no n² more for each head in inference",
        grows(infer["all heads at once"]) < 0.5,
        f"{grows(infer['all heads at once']):.2f} n² more for each head",
    )


CLAIM = Claim(
    id="sequential-heads-save-memory",
    sources=("001",),
    statement="Where memory is short, heads are computed one after the other: n² numbers are then needed, not h·n².",
    formula=r"M_{turn} = n^2, \qquad M_{once} = h n^2",
    refuted="A way to run the heads in turn in which what is stored still grows by n² with each head.",
    control="All heads at once, asked whether what they hold in inference stays the same with more heads.",
    verdict=HOLDS_IF,
    correction="No gradient must be wanted, or each head must be computed again in the backward pass. Otherwise "
    "automatic differentiation keeps the weights of every head until then, h·n² of them, in whatever order heads ran.",
    check=check,
)
