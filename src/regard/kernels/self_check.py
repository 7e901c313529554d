"""A kernel is compared with the reference, on the device where it will run, before ``auto`` uses it there.

A GPU kernel is compiled on the user's machine, by a compiler and for a device that its authors may never have seen. So
the first call per device and dtype runs a few calls there, and compares them with the reference in float64: masks,
biases, grouped heads, observables and gradients. The verdict is stored with everything that it depends on, and the next
process does not check again.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs
import torch
from torch import Tensor

from regard._config_json import LARGEST_JSON
from regard._devices import triton_version
from regard._files import read_regular, write_text
from regard._groups import Groups
from regard._lowered_scores import RelativeTerm, Scores
from regard._observables import Observe
from regard._version import __version__
from regard.kernels import reference

# The largest difference from the reference, relative to the largest number of the result.
TOLERANCES = {torch.float32: 5e-5, torch.bfloat16: 2e-2, torch.float16: 2.5e-3}
# The root mean square of the differences, relative to that of the result. It shows a small error that is everywhere,
# such as a wrong factor.
MEAN_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}
COMPARED = (
    *("logit_max", "entropy", "peak", "offset", "distance", "sink", "local", "visible"),
    *("map", "key_mass", "profile", "top", "groups"),
)


# The beginning of the problem of an error that says nothing about the kernel: too little memory, a full disk, a package
# that cannot be imported. It counts in this process only.
COULD_NOT_RUN = "could not run: "
OF_THE_MOMENT = (torch.OutOfMemoryError, MemoryError, OSError, ImportError)


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``problem`` is one line, empty if the kernel agrees with the reference."""

    problem: str

    @property
    def trusted(self) -> bool:
        """Whether ``auto`` may use the kernel."""
        return not self.problem


_verdicts: dict[str, Verdict] = {}
_lock = threading.RLock()


def verdict_of(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> Verdict:
    """The verdict for this device and dtype: from this process, from the file, or from a check made now.

    The first verdict of a process that is not in the kernel's favour is also a warning.
    """
    import_problem = _import_problem(kernel)
    key = import_problem or conditions(kernel, device, dtype)
    with _lock:
        if key in _verdicts:
            return _verdicts[key]
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return Verdict("a CUDA graph is being captured, in which nothing can be checked")
        problem = import_problem or _stored_problems().get(key)
        if problem is None:
            problem = find_problem(kernel, device, dtype)
            _store(key, problem)
        _verdicts[key] = Verdict(problem)
        if problem:
            name = kernel.__name__.rpartition(".")[2]
            warnings.warn(
                f"the {name} kernels are not used for {str(dtype).removeprefix('torch.')} on {device_name(device)}, "
                f"because they failed their self-check: {problem}; the reference backend computes instead "
                "(`regard doctor` repeats the check)",
                RuntimeWarning,
                stacklevel=2,
            )
        return _verdicts[key]


def check_again(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> Verdict:
    """Check now, whatever was found before, and store the verdict."""
    problem = _import_problem(kernel)
    if problem:
        return Verdict(problem)
    key = conditions(kernel, device, dtype)
    with _lock:
        problem = find_problem(kernel, device, dtype)
        _store(key, problem)
        _verdicts[key] = Verdict(problem)
        return _verdicts[key]


@cache
def _import_problem(kernel: ModuleType) -> str:
    """Why the package that the kernel needs cannot be imported, as one line; empty if it can.

    Python would try to import it again in every call.
    """
    try:
        getattr(kernel, "interpreted", bool)()
    except Exception as error:  # a damaged installation raises all kinds of errors
        return f"{COULD_NOT_RUN}{_one_line(error)}"
    return ""


# --- what a verdict depends on ----------------------------------------------------------------------------------------


def conditions(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> str:
    """Everything that a verdict depends on, as one line: device, driver, versions, code and dtype."""
    parts = [kernel.__name__, device_name(device), str(dtype), *_versions(), _code_fingerprint(kernel)]
    # What the interpreter computes says nothing about compiled kernels.
    if getattr(kernel, "interpreted", bool)():
        parts.append("interpreted")
    return " | ".join(parts)


@cache
def device_name(device: torch.device) -> str:
    """The device's name with its compute capability, or its type where the system reports none."""
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} ({major}.{minor})"
    return device.type


@cache
def _versions() -> list[str]:
    # The driver's version is not reported by torch. The file names it on Linux; without it, the runtime's must do.
    driver = "unknown driver"
    with suppress(OSError):
        lines = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").splitlines()
        driver = lines[0] if lines else driver
    versions = [f"regard {__version__}", f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    versions += [f"HIP {torch.version.hip}", driver]
    versions.append(f"triton {triton_version()}")
    return versions


@cache
def _code_fingerprint(kernel: ModuleType) -> str:
    """A fingerprint of the kernel's files, so that a changed kernel is checked again."""
    digest = hashlib.sha256()
    file = Path(str(kernel.__file__))
    files = [file]
    if file.name == "__init__.py":
        files = sorted(file.parent.glob("*.py"))
    for one in files:
        digest.update(one.read_bytes())
    return digest.hexdigest()[:16]


# --- stored verdicts --------------------------------------------------------------------------------------------------


def verdicts_file() -> Path:
    """Where verdicts are stored."""
    return platformdirs.user_cache_path("regard") / "kernel_checks.json"


def _stored_problems() -> dict[str, str]:
    """Stored problems by conditions. A file that is missing or damaged has none: then the check is repeated."""
    with suppress(OSError, ValueError, RecursionError):
        stored = json.loads(read_regular(verdicts_file(), LARGEST_JSON).decode("utf-8"))
        if isinstance(stored, dict):
            return {key: value for key, value in stored.items() if isinstance(value, str)}
    return {}


def _store(key: str, problem: str) -> None:
    if COULD_NOT_RUN in problem:
        return
    with suppress(OSError):
        problems = _stored_problems() | {key: problem}
        newest = dict(list(problems.items())[-100:])
        verdicts_file().parent.mkdir(parents=True, exist_ok=True)
        write_text(json.dumps(newest, ensure_ascii=False, indent=1) + "\n", verdicts_file())


# --- the check --------------------------------------------------------------------------------------------------------


def find_problem(kernel: ModuleType, device: torch.device, dtype: torch.dtype) -> str:
    """One line that says what is wrong with the kernel on this device; empty if nothing is.

    ``kernel`` is a module with ``forward``, ``observed`` and ``backward``, as ``regard.kernels.reference``. The
    reference computes the same calls on the CPU in float64.
    """
    place = "the first call"
    try:
        with _usual_state(device):
            for name, call in _calls(dtype):
                for part, compare in _PARTS.items():
                    place = f"{name}, {part}"
                    problem = compare(kernel, call, device)
                    if problem:
                        return f"{place}: {problem}"
    except Exception as error:  # compilers and drivers raise all kinds of errors
        problem = _one_line(error)
        if _is_of_the_moment(error):
            problem = f"{COULD_NOT_RUN}{problem}"
        elif not _is_usable(device):
            problem += " (this process cannot use the GPU any more and must be started again)"
        return f"{place}: {problem}"
    return ""


def _one_line(error: Exception) -> str:
    """The type of an error and the first line of its text."""
    first_line = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first_line[:200]}"


def _is_of_the_moment(error: Exception) -> bool:
    """Whether the next process may not have this error. Any other one, such as a refused launch, comes back."""
    # Drivers and Triton report too little memory in errors of other types.
    return isinstance(error, OF_THE_MOMENT) or "out of memory" in str(error).lower()


def _is_usable(device: torch.device) -> bool:
    """Whether the device still works: after a wrong access to memory, CUDA refuses everything in the same process."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except Exception:  # the error of the check again
        return False
    return True


@contextmanager
def _usual_state(device: torch.device) -> Iterator[None]:
    """Without gradients and autocast, with torch's own default device and dtype, whatever the caller has set."""
    default_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            torch.autocast(device.type, enabled=False),
            torch.device("cpu"),
        ):
            yield
    finally:
        torch.set_default_dtype(default_dtype)


@dataclass(frozen=True)
class _Call:
    """A call on the CPU. ``real`` are the query rows that count in observables; None: all."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    scores: Scores
    real: Tensor | None = None

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Scores]:
        """What a kernel gets."""
        return self.q.to(device), self.k.to(device), self.v.to(device), self.scores.to(device)

    def exact_inputs(self) -> tuple[Tensor, Tensor, Tensor, Scores]:
        """The same numbers in float64, on the CPU."""
        return self.q.double(), self.k.double(), self.v.double(), self.scores


def _calls(dtype: torch.dtype) -> Iterator[tuple[str, _Call]]:
    """Calls that use every option of the scores, with their names. Two are longer and wider than one tile."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32)

    def call(scores: Scores, n: int = 37, m: int = 53, d: int = 32, e: int = 32, **options: Any) -> _Call:
        q = random(2, 2, n, d).to(dtype)
        k = random(2, 1, m, d).to(dtype)
        v = random(2, 1, m, e).to(dtype)
        return _Call(q, k, v, random(2, 2, n, e).to(dtype), scores, **options)

    plain = Scores(scale=0.2)
    rows = torch.arange(37)
    keys = torch.arange(53)
    causal = (rows + 17).unsqueeze(0)
    yield "plain", call(plain)
    yield "causal", call(replace(plain, hi=causal), d=64, e=48)
    top_left = (rows - 3).clamp(min=0).unsqueeze(0)  # the first rows see nothing
    yield "window", call(replace(plain, lo=(top_left - 9).clamp(min=0), hi=top_left))
    mask = torch.rand(2, 1, 37, 53, generator=generator, dtype=torch.float32) < 0.5
    yield "mask, bias and softcap", call(replace(plain, mask=mask, bias=random(1, 2, 37, 53), softcap=3.0))
    term = RelativeTerm(random(1, 2, 1, 21), rows, keys, -10)
    yield "relative table and sinks", call(replace(plain, terms=(term,), sinks=random(2)))
    per_row = RelativeTerm(random(2, 2, 37, 9), rows, keys, -4)
    seed = torch.tensor(3)
    yield "a table per query, and dropout", call(replace(plain, terms=(per_row,), dropout=0.3, seed=seed))
    yield "scale 0", call(replace(plain, scale=0.0, bias=random(2, 1, 1, 53)))
    yield "scale ∞", call(replace(plain, scale=math.inf, hi=causal))
    hidden = call(replace(plain, hi=torch.full((1, 37), 52)))
    hidden.k[:, :, -1] = math.nan
    hidden.v[:, :, -1] = math.inf
    yield "hidden NaN", hidden

    # Sizes that multiples of 16 divide are compiled separately.
    every_row = torch.arange(272).unsqueeze(0) + 1
    real = torch.ones(2, 272, dtype=torch.bool)
    real[1, 200:] = False
    long = replace(plain, scale=0.1, hi=every_row, bias=random(1, 2, 272, 272))
    yield "long", call(long, n=272, m=272, d=128, e=128, real=real)
    wide_causal = torch.arange(37).unsqueeze(0) + 125
    yield "wide", call(replace(plain, scale=0.05, hi=wide_causal), n=37, m=161, d=256, e=200)


def _compare_forward(kernel: ModuleType, call: _Call, device: torch.device) -> str:
    ours = kernel.forward(*call.inputs(device))
    exact = reference.forward(*call.exact_inputs())
    problem = _difference("out", ours.out, exact.out, call.q.dtype)
    if problem:
        return problem
    return _difference("lse", _lse(ours), _lse(exact), torch.float32)


def _lse(result: Any) -> Tensor:
    """Log-sum-exp, and 0 in rows without keys."""
    lse = result.row_max.cpu().double() + result.row_sum.cpu().double().log()
    return torch.where(result.row_sum.cpu() == 0, 0.0, lse)


def _compare_observed(kernel: ModuleType, call: _Call, device: torch.device) -> str:
    # More bins than keys, in most calls: some bins stay empty.
    labels = torch.arange(call.k.shape[2]).unsqueeze(0) % 4 - 1
    groups = Groups(labels, ("a", "b", "c"))
    observe = Observe(map=64, key_mass=True, profile=4, top=2, groups=groups)
    on_device = replace(observe, groups=groups.for_call(1, labels.shape[1], device))
    q, k, v, scores = call.inputs(device)
    real = None if call.real is None else call.real.to(device)
    ours = kernel.observed(q, k, v, scores.detach(), on_device, real)[3]
    q, k, v, scores = call.exact_inputs()
    exact = reference.observed(q, k, v, scores.detach(), observe, call.real)[3]
    for name in COMPARED:
        # Observables are float32 for inputs of any dtype. Means of distances add many roundings.
        problem = _difference(name, ours[name], exact[name], torch.float32, slack=20)
        if problem:
            return problem
    return ""


def _compare_bins(kernel: ModuleType, call: _Call, device: torch.device) -> str:
    """The weight of each row on bins of keys. Exact tiles of weights are computed from it."""
    G, m = call.k.shape[1:3]
    # Bins within a block of keys, and over several blocks; the first key and the last one are in no bin.
    edges = torch.tensor([1, 2, 7, m // 2, m - 1])
    q, k, v, scores = call.inputs(device)
    own = kernel.forward(q, k, v, scores)
    ours = kernel.bin_masses(q, k, own.row_max, own.row_sum, scores, edges)

    # If the values of a key are 1 in the column of its bin, and else 0, the output is the weight on each bin.
    keys = torch.arange(m).unsqueeze(1)
    in_bin = (keys >= edges[:-1]) & (keys < edges[1:])
    values = in_bin.double().expand(call.q.shape[0], G, -1, -1)
    q, k, _, scores = call.exact_inputs()
    exact = reference.output(q, k, values, replace(scores, dropout=0.0, seed=None))
    return _difference("the weight on a bin", ours, exact, torch.float32, slack=20)


def _compare_backward(kernel: ModuleType, call: _Call, device: torch.device) -> str:
    q, k, v, scores = call.inputs(device)
    own = kernel.forward(q, k, v, scores)
    ours = kernel.backward(call.grad.to(device), q, k, v, own, scores)
    exact_inputs = call.exact_inputs()
    saved = reference.forward(*exact_inputs)
    exact = reference.backward(call.grad.double(), *exact_inputs[:3], saved, call.scores)
    pairs = [("dq", ours.q, exact.q), ("dk", ours.k, exact.k), ("dv", ours.v, exact.v)]
    if exact.bias is not None:
        pairs.append(("the gradient of the bias", ours.bias, exact.bias))
    if exact.sinks is not None:
        pairs.append(("the gradient of the sinks", ours.sinks, exact.sinks))
    for table, expected in zip(ours.tables, exact.tables, strict=True):
        pairs.append(("the gradient of a table", table, expected))
    for name, found, expected in pairs:
        problem = _difference(name, found, expected, call.q.dtype, slack=2)
        if problem:
            return problem
    return ""


_PARTS: dict[str, Callable[[ModuleType, _Call, torch.device], str]] = {
    "forward": _compare_forward,
    "observables": _compare_observed,
    "weights on bins": _compare_bins,
    "gradients": _compare_backward,
}


def _difference(name: str, ours: Tensor, exact: Tensor, dtype: torch.dtype, slack: float = 1.0) -> str:
    """One line if two results differ by more than rounding; empty if they do not."""
    ours = ours.cpu().double()
    exact = exact.double()
    if ours.shape != exact.shape:
        return f"{name} has shape {list(ours.shape)} instead of {list(exact.shape)}"
    # Equal infinities and NaN in the same places are no difference.
    same = (ours == exact) | (ours.isnan() & exact.isnan())
    error = torch.where(same, 0.0, (ours - exact).abs())
    numbers = torch.where(exact.isfinite(), exact, 0.0)
    size = max(float(numbers.abs().max()), 1e-3) if numbers.numel() else 1.0
    mean_size = max(float(numbers.square().mean().sqrt()), 1e-3) if numbers.numel() else 1.0
    largest = float(error.max()) if error.numel() else 0.0
    mean = float(error.square().mean().sqrt()) if error.numel() else 0.0
    # NaN is not smaller than anything.
    if largest <= slack * TOLERANCES[dtype] * size and mean <= slack * MEAN_TOLERANCES[dtype] * mean_size:
        return ""
    return f"{name} differs from the reference by {largest:.1e}, where numbers are up to {size:.1e}"
