"""The self-test: random calls against float64, their errors beside torch's own. About two seconds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import attention
from regard.doctor.corners import CORNERS, attempt
from regard.doctor.formula import Case, formula, torchs_own
from regard.kernels import native
from regard.masks import Causal, Dense, Padding, Prefix, Segments, Window
from regard.observables import Observe
from regard.positions import ALiBi, RelativeKeys, RelativeTable, T5Buckets
from regard.scores import Bias

__all__ = ["Row", "self_test"]

# How many times torch's own error ours may be. Roundings fall as they fall: with 25 seeds on one CPU the largest ratio
# was 7, of gradients of few queries, and other CPUs sum in other orders; what is computed wrong is wrong by thousands.
MOST = 32.0
SIZES = (1, 2, 3, 5, 13, 16, 17, 31, 64, 65, 127)
WIDTHS = (1, 3, 8, 16, 17, 33, 64)


@dataclass
class Row:
    """One kind of call: the largest relative errors of its cases, ours and torch's, and what went wrong."""

    what: str
    dtype: str = "float32"
    cases: int = 0
    error: dict[str, float] = field(default_factory=dict)  # forward and backward, ours
    torchs: dict[str, float] = field(default_factory=dict)
    wrong: str = ""

    def add(self, part: str, ours: Sequence[Tensor], torchs: Sequence[Tensor], exact: Sequence[Tensor]) -> None:
        """Results of one case: the largest error over the largest number of all."""
        size = max(x.abs().max().item() for x in exact) or 1.0
        for kept, found in ((self.error, ours), (self.torchs, torchs)):
            for x, truth in zip(found, exact, strict=True):
                error = (x.double() - truth).abs().max().item() / size
                if not error <= kept.setdefault(part, 0.0):  # NaN is kept too
                    kept[part] = error

    def ratio(self, part: str) -> float:
        """Our largest error over torch's; a quarter of a rounding counts as none."""
        least = torch.finfo(getattr(torch, self.dtype)).eps / 4
        return self.error[part] / max(self.torchs[part], least)

    def judge(self) -> None:
        """What is wrong, if anything is."""
        for part in self.error:
            if not self.wrong and not self.ratio(part) <= MOST:  # NaN is wrong too
                self.wrong = f"{part} errs by {self.error[part]:.1e}, {self.ratio(part):.3g} × torch's own error"

    def to_dict(self) -> dict[str, Any]:
        ratios = {part: self.ratio(part) for part in self.error}
        return asdict(self) | {"ratio": ratios, "passed": not self.wrong}


def self_test() -> dict[str, Any]:
    """``{"backend", "rows", "corners", "seconds", "passed", "failed"}``: everything on the backend that ``auto`` takes.

    The largest errors against float64, and how many times they are those of torch's own attention on the same inputs.
    What that does not have, softcap and sinks, is held against the same formula in float32. On one thread: where others
    use the machine too, waiting for a second one takes far longer than such small calls.
    """
    start, threads = time.perf_counter(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):  # what is learned starts at random
            found = _tested("native" if native.built() else "reference")
        return found | {"seconds": time.perf_counter() - start}
    finally:
        torch.set_num_threads(threads)


def _tested(backend: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = [_run(Row(what), cases, backend) for what, cases in _kinds(generator).items()]
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        rows.append(_run(Row(name, name), _halves(generator), backend, dtype))
    if backend == "native":
        rows.append(_run(Row("reference backend"), _mixed(generator), "reference"))
    rows.append(_observed(Row("observables"), _mixed(generator), backend))
    corners = {what: attempt(check, backend) for what, check in CORNERS.items()}
    failed = [f"{row.what}: {row.wrong}" for row in rows if row.wrong]
    failed += [f"{what}: {wrong}" for what, wrong in corners.items() if wrong]
    return {
        "backend": backend,
        "rows": [row.to_dict() for row in rows],
        "corners": corners,
        "passed": not failed,
        "failed": failed,
    }


def _run(row: Row, cases: Iterator[Case], backend: str, dtype: torch.dtype = torch.float32) -> Row:
    try:
        for case in cases:
            row.cases += 1
            ours = _results(case, dtype, lambda q, k, v, c, b: _ours(q, k, v, c, b, backend))
            torchs = _results(case, dtype, torchs_own)
            exact = _results(case, torch.float64, lambda *given: formula(*given)[0], rounded=dtype)
            row.add("forward", ours[:1], torchs[:1], exact[:1])
            row.add("backward", ours[1:], torchs[1:], exact[1:])
    except Exception as error:
        row.wrong = f"{type(error).__name__}: {error}"
    row.judge()
    return row


def _ours(q: Tensor, k: Tensor, v: Tensor, case: Case, bias: Bias | Tensor | None, backend: str) -> Tensor:
    return attention(q, k, v, mask=case.mask, bias=bias, backend=backend, **case.options)


Call = Callable[[Tensor, Tensor, Tensor, Case, Bias | Tensor | None], Tensor]


def _results(case: Case, dtype: torch.dtype, call: Call, rounded: torch.dtype | None = None) -> list[Tensor]:
    """The output, then gradients to q, k, v and what a bias has learned; inputs are those of ``rounded``."""
    q, k, v, grad = (x.to(rounded or dtype).to(dtype) for x in (case.q, case.k, case.v, case.grad))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    bias = case.bias
    if isinstance(bias, Tensor):
        bias = bias.to(dtype).requires_grad_()
        leaves.append(bias)
    elif isinstance(bias, nn.Module):
        bias = copy.deepcopy(bias).to(dtype)
        leaves += list(bias.parameters())
    out = call(q, k, v, case, bias)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def _case(g: torch.Generator, n: int = 0, m: int = 0, d: int = 0, **given: Any) -> Case:
    """Sizes at random where none are given; as many keys as queries at least, so that no causal row is empty."""

    def one_of(sizes: tuple[int, ...]) -> int:
        return sizes[int(torch.randint(len(sizes), (), generator=g))]

    n = n or one_of(SIZES)
    m = m or max(n, one_of(SIZES))
    d, e = d or one_of(WIDTHS), one_of(WIDTHS)
    shapes = ((2, 4, n, d), (2, 2, m, d), (2, 2, m, e), (2, 4, n, e))
    q, k, v, grad = (torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes)
    made = {name: value(n, m, d) if callable(value) and name != "options" else value for name, value in given.items()}
    return Case(q, k, v, grad, **made)


def _masks(g: torch.Generator) -> list[Callable[..., Any]]:
    def lengths(m: int) -> Tensor:
        return torch.randint(1, m + 1, (2,), generator=g)

    def ids(size: int) -> Tensor:
        return torch.arange(size) * 3 // size

    return [
        lambda n, m, d: Causal(),
        lambda n, m, d: Causal() & Window(3),
        lambda n, m, d: Window(2, 1),
        lambda n, m, d: Padding(lengths(m)),
        lambda n, m, d: Segments(ids(n), ids(m)),
        lambda n, m, d: Causal() | Prefix(lengths(m)),
        lambda n, m, d: Dense((torch.rand(n, m, generator=g) < 0.5).index_fill(1, torch.tensor([0]), True)),
    ]


def _biases(g: torch.Generator) -> list[Callable[..., Any]]:
    def learned(module: nn.Module) -> nn.Module:
        for x in module.double().parameters():
            x.data = torch.randn(x.shape, generator=g, dtype=torch.float64)
        return module

    return [
        lambda n, m, d: ALiBi(),
        lambda n, m, d: learned(RelativeTable(4, 7)),
        lambda n, m, d: learned(T5Buckets(4, buckets=8, max_distance=16)),
        lambda n, m, d: learned(RelativeKeys(d, 5, heads=4)),
        lambda n, m, d: torch.randn(4, n, m, generator=g, dtype=torch.float64),
    ]


def _kinds(g: torch.Generator) -> dict[str, Iterator[Case]]:
    """Kinds of call in float32, with their cases."""
    sinks = torch.randn(4, generator=g, dtype=torch.float64)
    scores: tuple[dict[str, Any], ...] = ({"softcap": 1.5}, {"sinks": sinks}, {"scale": 0.7})
    scores = (*scores, {"softcap": 2.0, "sinks": sinks})
    decoding = ((1, 900), (3, 700), (16, 500))
    return {
        "no mask, no bias": (_case(g) for _ in range(8)),
        "long rows": (_case(g, n, m, 64, mask=lambda n, m, d: Causal()) for n, m in ((257, 257), (130, 600))),
        "few queries": (_case(g, n, m) for n, m in decoding),
        "masks": (_case(g, mask=mask) for _ in range(2) for mask in _masks(g)),
        "biases": (_case(g, bias=bias) for _ in range(2) for bias in _biases(g)),
        "softcap, sinks, scale": (_case(g, options=one) for one in scores),
    }


def _halves(g: torch.Generator) -> Iterator[Case]:
    for mask in (None, *_masks(g)[:4]):
        yield _case(g, mask=mask)


def _mixed(g: torch.Generator) -> Iterator[Case]:
    biases = _biases(g)
    for at, mask in enumerate(_masks(g)):
        yield _case(g, mask=mask, bias=biases[at % len(biases)])


# --- observables ------------------------------------------------------------------------------------------------------

BINS, RADIUS = 5, 3
MASSES = ("peak", "sink", "local", "map", "key_mass", "profile")
LENGTHS = ("entropy", "offset", "distance")


def _observed(row: Row, cases: Iterator[Case], backend: str) -> Row:
    try:
        for case in cases:
            row.cases += 1
            ours = _seen(case, backend)
            by_torch, exact = (_measured(case, dtype) for dtype in (torch.float32, torch.float64))
            for names in (MASSES, LENGTHS):
                row.add("forward", *([found[name] for name in names] for found in (ours, by_torch, exact)))
    except Exception as error:
        row.wrong = f"{type(error).__name__}: {error}"
    row.judge()
    return row


def _seen(case: Case, backend: str) -> dict[str, Tensor]:
    q, k, v, bias = _inputs(case, torch.float32)
    every = torch.ones(2, q.shape[2], dtype=torch.bool)  # a padding in the mask would name the rows that count
    what = Observe(map=BINS, profile=RADIUS, key_mass=True, sink=2, local=2, queries=every)
    _, seen = attention(q, k, v, mask=case.mask, bias=bias, observe=what, backend=backend)
    return {name: getattr(seen, name) for name in (*MASSES, *LENGTHS)}


def _measured(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """The same from stored weights."""
    q, k, v, bias = _inputs(case, dtype)
    weights = formula(q, k, v, case, bias)[1]
    n, m = weights.shape[2:]
    away = (torch.arange(m) - torch.arange(n).unsqueeze(-1) - (m - n)).to(dtype)
    mean = weights.mean(0)
    bins = [torch.nn.functional.one_hot(torch.arange(x) * BINS // x, BINS).to(dtype) for x in (n, m)]
    rows = bins[0].sum(0).clamp(min=1).unsqueeze(-1)
    steps = range(-RADIUS, RADIUS + 1)
    return {
        "entropy": -(weights * weights.clamp(min=torch.finfo(dtype).tiny).log()).sum(-1),
        "peak": weights.amax(-1),
        "offset": (weights * away).sum(-1),
        "distance": (weights * away.abs()).sum(-1),
        "sink": weights[..., :2].sum(-1),
        "local": (weights * (away.abs() <= 2)).sum(-1),
        "map": bins[0].T @ mean @ bins[1] / rows,
        "key_mass": mean.mean(1),
        "profile": torch.stack([_at(weights, away == step) for step in steps], -1),
    }


def _at(weights: Tensor, there: Tensor) -> Tensor:
    """``[H]``: the mean weight at one offset, over the rows that see a key there."""
    seen = there & (weights > 0)
    return (weights * there).sum((0, 2, 3)) / seen.sum((0, 2, 3)).clamp(min=1)


def _inputs(case: Case, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Bias | Tensor | None]:
    q, k, v = (x.float().to(dtype) for x in (case.q, case.k, case.v))
    bias = case.bias
    if isinstance(bias, nn.Module):
        bias = copy.deepcopy(bias).float().to(dtype).requires_grad_(False)
    return q, k, v, bias.float().to(dtype) if isinstance(bias, Tensor) else bias
