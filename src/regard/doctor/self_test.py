"""The self-test: random calls of the fast backend, compared with the reference backend in float64. About 2 s.

Each error is divided by the error of torch's own ``scaled_dot_product_attention`` on the same inputs, because rounding
depends on the CPU. The tests of this library compare the reference backend with independent formulas.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard._devices import CPU
from regard._groups import Groups
from regard._lowered_scores import Bias
from regard._observables import Observe
from regard._operator import attention
from regard.doctor.edge_cases import EDGE_CASES, find_problem
from regard.kernels import native
from regard.masks import Causal, Dense, Mask, Padding, Prefix, Segments, Window
from regard.positions import ALiBi, RelativeKeys, RelativeTable, T5Buckets

# Largest accepted ratio of our error to torch's. With 25 seeds on one CPU the largest ratio was 7 (gradients of few
# queries), and other CPUs sum in another order. Wrong results have ratios of thousands.
MAX_RATIO = 32.0
SIZES = (1, 2, 3, 5, 13, 16, 17, 31, 64, 65, 127)
WIDTHS = (1, 3, 8, 16, 17, 33, 64)

# Observables compared together, because their scale is the same: weights; distances and entropies (tokens, nats).
WEIGHT_OBSERVABLES = ("peak", "sink", "local", "map", "key_mass", "profile", "groups")
DISTANCE_OBSERVABLES = ("entropy", "offset", "distance")

AnyBias = Bias | Tensor | None
MakeMask = Callable[[int, int, int], Mask]  # (n, m, d) → a mask
MakeBias = Callable[[int, int, int], Bias | Tensor]


@dataclass(frozen=True)
class Case:
    """One call: inputs in float64, and the options of ``regard.attention``."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Mask | None = None
    bias: AnyBias = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Row:
    """One kind of call: the largest relative errors of its cases, ours and torch's, and the first problem."""

    name: str
    dtype: str = "float32"
    cases: int = 0
    error: dict[str, float] = field(default_factory=dict)  # by part: forward, backward
    torch_error: dict[str, float] = field(default_factory=dict)
    problem: str = ""

    def add(self, part: str, error: float, torch_error: float) -> None:
        """Keep the largest errors. ``not ≤`` instead of ``>`` also keeps NaN."""
        if not error <= self.error.setdefault(part, 0.0):
            self.error[part] = error
        if not torch_error <= self.torch_error.setdefault(part, 0.0):
            self.torch_error[part] = torch_error

    def ratio(self, part: str) -> float:
        """Our largest error divided by torch's; torch's error counts as at least a quarter of eps."""
        least = torch.finfo(getattr(torch, self.dtype)).eps / 4
        return self.error[part] / max(self.torch_error[part], least)

    def judge(self) -> None:
        """Set ``problem`` if an error is too large or NaN."""
        for part in self.error:
            if not self.problem and not self.ratio(part) <= MAX_RATIO:
                self.problem = f"{part} errs by {self.error[part]:.1e}, {self.ratio(part):.3g} × torch's own error"

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON."""
        return {
            "what": self.name,
            "dtype": self.dtype,
            "cases": self.cases,
            "error": self.error,
            "torchs": self.torch_error,
            "wrong": self.problem,
            "ratio": {part: self.ratio(part) for part in self.error},
            "passed": not self.problem,
        }


def relative_error(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest absolute error of several tensors, divided by the largest absolute value of the exact ones."""
    size = max(x.abs().max().item() for x in exact) or 1.0
    errors = [(x.double() - y).abs().max() for x, y in zip(values, exact, strict=True)]
    return torch.stack(errors).max().item() / size  # torch's max keeps NaN, Python's does not


def run_self_test(backend: str | None = None, device: torch.device = CPU) -> dict[str, Any]:
    """``{"backend", "rows", "corners", "seconds", "passed", "failed"}``.

    It runs on one thread: on a busy machine, waiting for a second thread takes far longer than such small calls.

    - ``backend``: default: the fast backend of the CPU.
    - ``device``: where this backend and torch's attention compute. The exact results always come from the CPU. For the
      backend "triton" the corners are left out: they compute on the CPU.
    """
    if backend is None:
        backend = "native" if native.built() else "reference"
    start = time.perf_counter()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):  # learned tables start with random values
            report = _run_all(backend, device)
        return report | {"seconds": time.perf_counter() - start}
    finally:
        torch.set_num_threads(threads)


def _run_all(backend: str, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for name, cases in _cases_by_kind(generator).items():
        rows.append(_run_row(Row(name), cases, backend, device=device))
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        rows.append(_run_row(Row(name, name), _masked_cases(generator), backend, dtype, device))
    # With the native module, the reference backend in float32 gets its own row.
    if backend == "native":
        rows.append(_run_row(Row("reference backend"), _mixed_cases(generator), "reference"))
    rows.append(_run_observables(Row("observables"), _mixed_cases(generator), backend, device))

    edge_cases = {}
    if backend != "triton":
        edge_cases = {name: find_problem(check, backend) for name, check in EDGE_CASES.items()}
    failed = [f"{row.name}: {row.problem}" for row in rows if row.problem]
    failed += [f"{name}: {problem}" for name, problem in edge_cases.items() if problem]
    return {
        "backend": backend,
        "rows": [row.to_dict() for row in rows],
        "corners": edge_cases,
        "passed": not failed,
        "failed": failed,
    }


# --- outputs and gradients --------------------------------------------------------------------------------------------


def _run_row(
    row: Row, cases: Iterator[Case], backend: str, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> Row:
    try:
        for case in cases:
            row.cases += 1
            ours = _output_and_gradients(case, dtype, dtype, _regard_attention(case, backend), device)
            exact = _output_and_gradients(case, dtype, torch.float64, _regard_attention(case, "reference"))
            torch_values, torch_exact = _torch_results(case, dtype, exact, device)
            row.add("forward", relative_error(ours[:1], exact[:1]), relative_error(torch_values[:1], torch_exact[:1]))
            row.add("backward", relative_error(ours[1:], exact[1:]), relative_error(torch_values[1:], torch_exact[1:]))
    except Exception as error:
        row.problem = f"{type(error).__name__}: {error}"
    row.judge()
    return row


Call = Callable[[Tensor, Tensor, Tensor, AnyBias], Tensor]


def _regard_attention(case: Case, backend: str, **replaced: Any) -> Call:
    options = case.options | replaced

    def call(q: Tensor, k: Tensor, v: Tensor, bias: AnyBias) -> Tensor:
        if isinstance(options.get("sinks"), Tensor):
            options["sinks"] = options["sinks"].to(q.device)
        return attention(q, k, v, mask=case.mask, bias=bias, backend=backend, **options)

    return call


def _torch_results(
    case: Case, dtype: torch.dtype, exact: list[Tensor], device: torch.device = CPU
) -> tuple[list[Tensor], list[Tensor]]:
    """The results of torch's attention and their exact values, without softcap and sinks, which torch does not have."""

    def call(q: Tensor, k: Tensor, v: Tensor, bias: AnyBias) -> Tensor:
        n = q.shape[2]
        m = k.shape[2]
        attn_mask = None
        if bias is not None:
            attn_mask = bias.dense(q, m) if isinstance(bias, Bias) else bias
        if case.mask is not None:
            visible = case.mask.dense(n, m, q.device)
            attn_mask = visible if attn_mask is None else torch.where(visible, attn_mask, -torch.inf)
        repeats = q.shape[1] // k.shape[1]  # query heads per key head
        k = k.repeat_interleave(repeats, 1)
        v = v.repeat_interleave(repeats, 1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, scale=case.options.get("scale"))

    if "softcap" in case.options or "sinks" in case.options:
        exact_call = _regard_attention(case, "reference", softcap=None, sinks=None)
        exact = _output_and_gradients(case, dtype, torch.float64, exact_call)
    return _output_and_gradients(case, dtype, dtype, call, device), exact


def _output_and_gradients(
    case: Case, rounded: torch.dtype, dtype: torch.dtype, call: Call, device: torch.device = CPU
) -> list[Tensor]:
    """The output, then gradients of q, k, v and of a bias's parameters, computed in ``dtype`` on the device.

    The results are on the CPU. Inputs are first rounded to ``rounded``, so that the float64 result belongs to the same
    inputs.
    """
    q, k, v, bias = _inputs(case, rounded, dtype, device)
    # Gradients are compared for everything that attention can train.
    leaves = [q.requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    if isinstance(bias, Tensor):
        leaves.append(bias.requires_grad_())
    elif isinstance(bias, nn.Module):
        leaves += [parameter.requires_grad_() for parameter in bias.parameters()]
    out = call(q, k, v, bias)
    gradients = torch.autograd.grad(out, leaves, case.grad.to(rounded).to(dtype).to(device))
    return [out.detach().cpu(), *(gradient.cpu() for gradient in gradients)]


def _inputs(
    case: Case, rounded: torch.dtype, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, AnyBias]:
    """q, k, v and the bias of a case on a device, rounded to one dtype and converted to another; no gradients."""
    q = case.q.to(rounded).to(dtype).to(device)
    k = case.k.to(rounded).to(dtype).to(device)
    v = case.v.to(rounded).to(dtype).to(device)
    bias = case.bias
    if isinstance(bias, nn.Module):
        bias = copy.deepcopy(bias).to(rounded).to(dtype).to(device).requires_grad_(False)
    elif isinstance(bias, Tensor):
        bias = bias.to(rounded).to(dtype).to(device)
    return q, k, v, bias


# --- observables ------------------------------------------------------------------------------------------------------


def _run_observables(row: Row, cases: Iterator[Case], backend: str, device: torch.device = CPU) -> Row:
    try:
        for case in cases:
            row.cases += 1
            ours = _observables(case, torch.float32, backend, device)
            exact = _observables(case, torch.float64, "reference")
            outputs = _output_and_gradients(case, torch.float32, torch.float64, _regard_attention(case, "reference"))
            torch_values, torch_exact = _torch_results(case, torch.float32, outputs, device)
            torch_error = relative_error(torch_values[:1], torch_exact[:1])
            for names in (WEIGHT_OBSERVABLES, DISTANCE_OBSERVABLES):
                error = relative_error([ours[name] for name in names], [exact[name] for name in names])
                row.add("forward", error, torch_error)
    except Exception as error:
        row.problem = f"{type(error).__name__}: {error}"
    row.judge()
    return row


def _observables(case: Case, dtype: torch.dtype, backend: str, device: torch.device = CPU) -> dict[str, Tensor]:
    q, k, v, bias = _inputs(case, torch.float32, dtype, device)
    # Count all rows: otherwise a Padding in the mask would exclude some.
    queries = torch.ones(2, q.shape[2], dtype=torch.bool)
    groups = Groups(torch.arange(k.shape[2]) % 4 - 1, names=("a", "b", "c"))
    observe = Observe(map=5, profile=3, key_mass=True, sink=2, local=2, queries=queries, groups=groups)
    _, observation = attention(q, k, v, mask=case.mask, bias=bias, observe=observe, backend=backend)
    return {name: getattr(observation, name).cpu() for name in (*WEIGHT_OBSERVABLES, *DISTANCE_OBSERVABLES)}


# --- random cases -----------------------------------------------------------------------------------------------------


def _case(
    generator: torch.Generator,
    n: int = 0,
    m: int = 0,
    d: int = 0,
    mask: MakeMask | None = None,
    bias: MakeBias | None = None,
    options: dict[str, Any] | None = None,
) -> Case:
    """A random case; sizes of 0 are random too. There are at least as many keys as queries: no causal row is empty."""

    def choose(sizes: tuple[int, ...]) -> int:
        return sizes[int(torch.randint(len(sizes), (), generator=generator))]

    n = n or choose(SIZES)
    m = m or max(n, choose(SIZES))
    d = d or choose(WIDTHS)
    e = choose(WIDTHS)  # the width of values need not be d

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    # Two key heads serve four query heads.
    q = random(2, 4, n, d)
    k = random(2, 2, m, d)
    v = random(2, 2, m, e)
    grad = random(2, 4, n, e)
    case_mask = mask(n, m, d) if mask is not None else None
    case_bias = bias(n, m, d) if bias is not None else None
    return Case(q, k, v, grad, case_mask, case_bias, options or {})


def _masks(generator: torch.Generator) -> list[MakeMask]:
    def lengths(m: int) -> Tensor:
        return torch.randint(1, m + 1, (2,), generator=generator)

    def ids(size: int) -> Tensor:
        return torch.arange(size) * 3 // size

    def random_dense(n: int, m: int, d: int) -> Mask:
        visible = torch.rand(n, m, generator=generator) < 0.5
        visible[:, 0] = True  # no row may be empty
        return Dense(visible)

    return [
        lambda n, m, d: Causal(),
        lambda n, m, d: Causal() & Window(3),
        lambda n, m, d: Window(2, 1),
        lambda n, m, d: Padding(lengths(m)),
        lambda n, m, d: Segments(ids(n), ids(m)),
        lambda n, m, d: Causal() | Prefix(lengths(m)),
        random_dense,
    ]


def _biases(generator: torch.Generator) -> list[MakeBias]:
    def randomised(module: Any) -> Any:
        for parameter in module.double().parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return module

    return [
        lambda n, m, d: ALiBi(),
        lambda n, m, d: randomised(RelativeTable(4, 7)),
        lambda n, m, d: randomised(T5Buckets(4, buckets=8, max_distance=16)),
        lambda n, m, d: randomised(RelativeKeys(d, 5, heads=4)),
        lambda n, m, d: torch.randn(4, n, m, generator=generator, dtype=torch.float64),
    ]


def _cases_by_kind(generator: torch.Generator) -> dict[str, Iterator[Case]]:
    """Kinds of call in float32, with their cases."""
    sinks = torch.randn(4, generator=generator, dtype=torch.float64)
    options: list[dict[str, Any]] = [{"softcap": 1.5}, {"sinks": sinks}, {"scale": 0.7}, {"softcap": 2, "sinks": sinks}]
    few_queries = ((1, 900), (3, 700), (16, 500))
    long_rows = ((257, 257), (130, 600))
    masks = _masks(generator) * 2
    biases = _biases(generator) * 2
    return {
        # Generators: a row makes its cases when it runs, so that no two rows hold tensors at once.
        "no mask, no bias": (_case(generator) for _ in range(8)),
        "long rows": (_case(generator, n, m, 64, mask=lambda n, m, d: Causal()) for n, m in long_rows),
        "few queries": (_case(generator, n, m) for n, m in few_queries),
        "masks": (_case(generator, mask=mask) for mask in masks),
        "biases": (_case(generator, bias=bias) for bias in biases),
        "softcap, sinks, scale": (_case(generator, options=chosen) for chosen in options),
    }


def _masked_cases(generator: torch.Generator) -> Iterator[Case]:
    """No mask, and four masks."""
    for mask in (None, *_masks(generator)[:4]):
        yield _case(generator, mask=mask)


def _mixed_cases(generator: torch.Generator) -> Iterator[Case]:
    """Every mask, each with a bias."""
    biases = _biases(generator)
    for i, mask in enumerate(_masks(generator)):
        yield _case(generator, mask=mask, bias=biases[i % len(biases)])
