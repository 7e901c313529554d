"""Checks that computing one head at a time needs n² numbers instead of h·n² only if no gradients are needed."""

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

from regard._operator import attention
from regard.claims._check_helpers import largest_difference, random_normal
from regard.claims._claim import HOLDS_CONDITIONALLY, Claim, Evidence
from regard.claims._statistics import slope_interval

ALL = "all heads at once"
SEQUENTIAL = "one by one"
RECOMPUTED = "one by one, recomputed"


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The document's lines 20 to 31 for all heads: scores, weights and their product with the values, all stored."""
    return (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v


def sequential(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other."""
    return torch.stack([plain(q[:, h], k[:, h], v[:, h]) for h in range(q.shape[1])], dim=1)


def recomputed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One head after the other, each recomputed in the backward pass."""
    heads = [checkpoint(plain, q[:, h], k[:, h], v[:, h], use_reentrant=False) for h in range(q.shape[1])]
    return torch.stack(heads, dim=1)


def saved_tensors(call: Callable[[], Any], excluded: Sequence[Tensor] = ()) -> list[Tensor]:
    """The tensors that autograd keeps for the backward pass, without duplicates and without the excluded ones."""
    tensors: dict[tuple[int, int], Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        tensors.setdefault((x.data_ptr(), x.numel()), x)
        return x

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = call()  # the tensors stay alive as long as the result does
    del result
    excluded_keys = {(x.data_ptr(), x.numel()) for x in excluded}
    return [x for key, x in tensors.items() if key not in excluded_keys]


class PeakMemory(TorchDispatchMode):
    """Records the peak number of elements in new tensors of a call. Views share memory and are not counted again."""

    def __init__(self) -> None:
        super().__init__()
        self.current = 0
        self.peak = 0
        self.sizes: dict[int, int] = {}  # numbers in each piece of memory
        self.owners: dict[int, int] = {}  # how many tensors use it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        input_pointers = {x.untyped_storage().data_ptr() for x in inputs}
        for x in tree_leaves(out):
            storage = x.untyped_storage()
            pointer = storage.data_ptr()
            if pointer not in self.sizes:
                if pointer in input_pointers:
                    continue  # a view of a tensor from before the call
                self.sizes[pointer] = storage.nbytes() // x.element_size()
                self.owners[pointer] = 0
                self.current += self.sizes[pointer]
            self.owners[pointer] += 1
            weakref.finalize(x, self._release, pointer)
        self.peak = max(self.peak, self.current)
        return out

    def _release(self, pointer: int) -> None:
        self.owners[pointer] -= 1
        if self.owners[pointer] == 0:
            del self.owners[pointer]
            self.current -= self.sizes.pop(pointer)


def peak_without_gradients(call: Callable[[], Any]) -> int:
    """The peak number of elements in memory during inference."""
    with torch.no_grad(), PeakMemory() as memory:
        call()
    return memory.peak


def check(
    *,
    n: int = 128,
    d: int = 4,
    heads: int = 8,
    seed: int = 0,
    one_by_one: Callable[..., Tensor] = sequential,
    one_by_one_recomputed: Callable[..., Tensor] = recomputed,
) -> Evidence:
    """Count the numbers kept for gradients and held in inference, for all heads at once and one after the other."""
    evidence = Evidence()
    generator = torch.Generator().manual_seed(seed)
    head_counts = sorted({1, 2, 3, heads})  # a slope needs at least three
    methods = {ALL: plain, SEQUENTIAL: one_by_one, RECOMPUTED: one_by_one_recomputed}
    training: dict[str, list[float]] = {name: [] for name in methods}
    inference: dict[str, list[float]] = {name: [] for name in methods}
    error = 0.0
    for count in head_counts:
        shape = (1, count, n, d)
        q = random_normal(generator, *shape).requires_grad_()
        k = random_normal(generator, *shape).requires_grad_()
        v = random_normal(generator, *shape).requires_grad_()
        expected = attention(q, k, v)
        for name, method in methods.items():
            call = partial(method, q, k, v)
            training[name].append(sum(x.numel() for x in saved_tensors(call)) / n**2)
            inference[name].append(peak_without_gradients(call) / n**2)
            error = max(error, largest_difference(call(), expected))

    def growth(sizes: list[float]) -> float:
        """How many times n² each further head adds."""
        return slope_interval(head_counts, sizes).value

    evidence.add_statement(
        "In training, one head at a time keeps n² numbers instead of h·n².",
        growth(training[SEQUENTIAL]) < 0.5,
        f"with {head_counts[-1]} heads one by one, {training[SEQUENTIAL][-1]:.2f} n² are kept for gradients, all at "
        f"once {training[ALL][-1]:.2f} n²",
    )
    evidence.add_condition(
        "Without gradients, one head at a time does not hold n² more per head.",
        growth(inference[SEQUENTIAL]) < 0.5 and inference[SEQUENTIAL][-1] < inference[ALL][-1] / 2,
        f"in inference, {inference[SEQUENTIAL][-1]:.2f} n² are held at once instead of {inference[ALL][-1]:.2f} n²",
    )
    evidence.add_condition(
        "If each head is recomputed in the backward pass, training does not keep n² more per head.",
        growth(training[RECOMPUTED]) < 0.5,
        f"recomputed: {training[RECOMPUTED][-1]:.2f} n² kept with {head_counts[-1]} heads",
    )
    evidence.add_condition("Every method gives the operator's output.", error < 1e-12, f"within {error:.0e}")

    # A control: its statement must be false. All heads at once store the weights of every head together.
    parallel = growth(inference[ALL])
    evidence.add_control(
        "In inference, all heads at once do not hold n² more per head.", parallel < 0.5, f"{parallel:.2f} n² per head"
    )
    curves = {f"{name}, kept for gradients": sizes for name, sizes in training.items()}
    for name in (ALL, SEQUENTIAL):
        curves[f"{name}, inference"] = inference[name]
    title = f"numbers held, in n² (n = {n}, d_head = {d})"
    evidence.add_curves(title, head_counts, curves, x="heads", y="numbers / n²", log="xy")
    evidence.numbers |= {"n": n, "heads": heads}
    evidence.numbers |= {f"{name}, kept / n²": sizes[-1] for name, sizes in training.items()}
    return evidence


CLAIM = Claim(
    id="sequential-heads-save-memory",
    title="Heads computed one after the other need n² numbers instead of h·n²",
    citations=(("exam-answers", "2 (b)"),),
    statement="If memory is short, heads are computed one after the other, which needs n² numbers instead of h·n².",
    formula=r"M_{turn} = n^2, \qquad M_{once} = h n^2",
    refuted_by="A way to compute heads one after the other whose memory still grows by n² with each head.",
    control="All heads at once in inference: their memory must grow with the number of heads.",
    verdict=HOLDS_CONDITIONALLY,
    what_holds="Without gradients, or with recomputation, heads in turn need n² numbers. Otherwise all h·n² weights "
    "are kept.",
    correction="No gradients are needed, or each head is recomputed in the backward pass. Otherwise automatic "
    "differentiation keeps the weights of every head for the backward pass, h·n² numbers, in whatever order the heads "
    "were computed.",
    check=check,
)
