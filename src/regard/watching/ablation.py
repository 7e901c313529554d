"""What a head is worth: a model without some of its heads, and how much its loss grows.

A head's output before W_O, ``out [*B, n, E]``, is exchanged for 0, or for its mean over the rows of a reference input.
Mean ablation takes away what a head tells apart and leaves what it always says; zero ablation takes both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.observables import Observation, Observe
from regard.positions.common import check_kind, described
from regard.watching.chosen import ChosenHeads, Head
from regard.watching.visitor import UNSEEN, Visitor, ran
from regard.watching.visits import visited

__all__ = ["Ablation", "Change", "ablate", "next_token_loss"]

Given = Tensor | Callable[[], Any]


@dataclass(frozen=True)
class Change:
    """A loss with all heads, and without the chosen ones; ``change`` is how much it grew.

    >>> print(Change(before=1.5, after=2.25))
    loss 1.5000 → 2.2500 (+0.7500)
    """

    before: float
    after: float

    @property
    def change(self) -> float:
        """``after − before``: what the heads were worth."""
        return self.after - self.before

    def __str__(self) -> str:
        return f"loss {self.before:.4f} → {self.after:.4f} ({self.change:+.4f})"


def ablate(
    model: nn.Module, heads: Iterable[Head], *, by: Literal["zero", "mean"] = "zero", over: Given | None = None
) -> Ablation:
    """The model without some heads: ``with ablate(model, [(3, 0)]): …``, or ``ablate(model, [(3, 0)]).change(ids)``.

    Works on the models that ``regard.watch`` works on. A head is ``(layer, head)``; a layer is a module path or its
    number in the order of the attention calls, as in ``list(seen)``.

    - ``by="zero"`` puts 0 in place of what a head gives; ``"mean"`` its mean over all rows of ``over`` (token ids, or a
      function that runs the model); ``change`` takes its own input where ``over`` is not given.

    >>> model = regard.models.load(regard.models.bundled())
    >>> ids = torch.tensor([model.text.encode("Return the number of items in a list. " * 2)])
    >>> found = ablate(model, [(1, 0)]).change(ids)  # without the head that looks at the token before
    >>> round(found.before, 1), round(found.after, 1)
    (1.5, 2.4)
    """
    return Ablation(model, heads, by, over)


class Ablation:
    """Heads taken out of a model while this is entered; it can be entered again. ``ablate`` makes it.

    >>> model = regard.nn.MultiHeadAttention(6, heads=1, out_bias=False)
    >>> without, x = ablate(model, [("", 0)]), torch.randn(1, 5, 6)
    >>> with without:
    ...     print(model(x).abs().max().item())  # its only head is out
    0.0
    """

    def __init__(self, model: nn.Module, heads: Iterable[Head], by: str, over: Given | None) -> None:
        check_kind("model", model, nn.Module)
        if by not in ("zero", "mean"):
            raise ValueError(f"by is {by!r}; it is 'zero' or 'mean'")
        if over is not None and by == "zero":
            raise ValueError("over says where means are taken, but by='zero' takes none; leave over out")
        self.model, self.heads, self.by, self.over = model, list(heads), by, over
        ChosenHeads(self.heads)  # checks them
        self._within: list[ExitStack] = []

    def __enter__(self) -> Ablation:
        if self.by == "mean" and self.over is None:
            raise ValueError("mean ablation needs over=, token ids or a function that runs the model, to average over")
        within = ExitStack()
        within.enter_context(self._without(self.over))
        self._within.append(within)
        return self

    def __exit__(self, *error: Any) -> None:
        self._within.pop().__exit__(*error)

    @torch.no_grad()
    def change(self, given: Given) -> Change:
        """The loss before and after: next-token cross-entropy on ids ``[B, n]``, or what a function returns.

        The model is in eval mode meanwhile, or dropout would be most of the difference.
        """
        training = self.model.training
        self.model.eval()
        try:
            with visited(Visitor(self.model)):  # by the same kernels, so that the difference is the heads' alone
                before = _loss(self.model, given)
            with self._without(given if self.over is None else self.over) as chosen:
                after = _loss(self.model, given)
        finally:
            self.model.train(training)
        if not chosen.places:
            raise ValueError(f"{type(self.model).__name__} {UNSEEN}")
        return Change(before, after)

    @contextmanager
    def _without(self, over: Given | None) -> Iterator[ChosenHeads]:
        means = None
        if self.by == "mean":
            assert over is not None
            with torch.no_grad(), visited(learned := _Means(self.model)):
                _run(self.model, over)
            means = learned.means()
        cut = _Cut(self.model, ChosenHeads(self.heads), means)
        with visited(cut), ran(self.model) as calls:
            yield cut.chosen
        if calls and not cut.chosen.places:
            raise ValueError(f"{type(self.model).__name__} {UNSEEN}; nothing was taken out")
        cut.chosen.check()


class _Cut(Visitor):
    """Puts 0 or a mean in place of what the chosen heads give."""

    def __init__(self, model: nn.Module, chosen: ChosenHeads, means: dict[str, Tensor] | None) -> None:
        super().__init__(model)
        self.chosen, self.means = chosen, means

    def result(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        heads, H = self.chosen.of(path), out.shape[-3]
        if not heads:
            return out
        if max(heads) >= H:
            raise ValueError(f"{path} has heads 0 … {H - 1}, and head {max(heads)} was to be taken out")
        gone = torch.zeros(H, 1, 1, dtype=torch.bool, device=out.device)
        gone[list(heads)] = True
        instead = torch.zeros((), dtype=out.dtype, device=out.device)
        if self.means is not None:
            if path not in self.means:
                raise ValueError(f"no mean is known for {path}: what the means were taken over never reached it")
            instead = self.means[path].to(out.dtype).unsqueeze(-2)
        return torch.where(gone, instead, out)


class _Means(Visitor):
    """The mean output of every head over the rows that count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._last: dict[str, Tensor] = {}

    def spec(self, path: str, q: Tensor, k: Tensor, cross: bool, queries: Tensor | None) -> Observe:
        return Observe(queries=queries)

    def result(self, path: str, out: Tensor, v: Tensor) -> Tensor:
        self._last[path] = out
        return out

    def add(self, path: str, observation: Observation) -> None:
        out = self._last.pop(path)
        counted = observation.counted
        assert counted is not None
        out = out.reshape(-1, *out.shape[-3:])
        total = torch.where(counted.unsqueeze(-1), out.double(), 0.0).sum((0, 2))
        rows = counted.sum((0, 2)).double()
        before = self._sums.get(path)
        self._sums[path] = (total, rows) if before is None else (before[0] + total, before[1] + rows)

    def means(self) -> dict[str, Tensor]:
        """``[H, E]`` by place."""
        return {path: total / rows.clamp(min=1).unsqueeze(-1) for path, (total, rows) in self._sums.items()}


def next_token_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each token of ``ids [B, n]`` given those before it.

    >>> model = regard.models.load(regard.models.bundled())
    >>> once, twice = (torch.tensor([model.text.encode("Return the number of items. " * i)]) for i in (1, 2))
    >>> bool(next_token_loss(model, twice) < next_token_loss(model, once))  # what comes again is easier
    True
    """
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        raise ValueError(f"ids must be whole numbers [B, n] with n of 2 at least, got {described(ids)}")
    result = model(ids)
    logits = getattr(result, "logits", result)
    if not isinstance(logits, Tensor) or logits.ndim != 3 or logits.shape[:2] != ids.shape:
        raise ValueError(
            f"{type(model).__name__} gives no logits [B, n, vocabulary] for ids; give a function that returns a loss"
        )
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def _run(model: nn.Module, given: Given) -> Any:
    return given() if callable(given) else model(given)


def _loss(model: nn.Module, given: Given) -> float:
    loss = given() if callable(given) else next_token_loss(model, given)
    if not isinstance(loss, int | float | Tensor) or (isinstance(loss, Tensor) and loss.numel() != 1):
        raise TypeError(f"the function must return one number, the loss, got {described(loss)}")
    return float(loss)
