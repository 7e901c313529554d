"""List all benchmark cases, describe the conditions of a run, and run one case."""

from __future__ import annotations

import gc
import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from regard._cpu import cpu_name, usable_cores
from regard._devices import CPU, describe_device
from regard._errors import RegardError
from regard.bench._instruction_set_cases import instruction_set_cases
from regard.bench._model_cases import model_cases
from regard.bench._observation_cases import group_cases, observation_cases
from regard.bench._operator_cases import operator_cases
from regard.bench._race import Case, Measurement, race
from regard.budget._allocation_profiler import measure_allocations
from regard.kernels import native

GROUPS = {
    "operator": operator_cases,
    "instructions": instruction_set_cases,
    "watching": observation_cases,
    "groups": group_cases,
    "models": model_cases,
}
PEERS = ("transformers", "onnxruntime", "openvino")


def cases(words: str | Sequence[str] = (), device: torch.device = CPU) -> list[Case]:
    """Return the cases whose group is one of ``words`` or whose name contains one; without words, all cases.

    Upper and lower case are equal. The cases run on ``device``; a GPU has more dtypes, and no libraries for CPUs.

    Raises:
        RegardError: no case matches one of the words.

    >>> [case.name for case in cases(["decoding"])][0]
    'decoding, 32 heads × 8192 × 128'
    >>> cases(["no such case"])
    Traceback (most recent call last):
    regard._errors.RegardError: no case is called 'no such case'; regard bench --list prints all names
    """
    if isinstance(words, str):
        words = [words]
    all_cases: list[Case] = []
    for group in GROUPS.values():
        all_cases += group(device)
    if not words:
        return all_cases

    for word in words:
        if not any(_matches(word, case) for case in all_cases):
            raise RegardError(f"no case is called {word!r}; regard bench --list prints all names")
    return [case for case in all_cases if any(_matches(word, case) for word in words)]


def _matches(word: str, case: Case) -> bool:
    return word.lower() == case.group or (bool(word) and word.lower() in case.name.lower())


def conditions(device: torch.device = CPU) -> dict[str, str | int]:
    """Return what the figures depend on: CPU, threads, kernel and versions; a GPU with its driver and Triton.

    Compare only figures that were measured under the same conditions.

    >>> {"CPU", "threads", "kernel", "torch", "code"} <= set(conditions())
    True
    """
    kernel = "reference (the native module was not built)"
    if native.built():
        kernel = native.instruction_set()
    values: dict[str, str | int] = {
        "CPU": cpu_name(),
        "threads": torch.get_num_threads(),
        "cores": usable_cores(),
        "kernel": kernel,
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    values |= describe_device(device)
    # A missing library is part of the conditions too: its column is then empty.
    packages = ("regard", *PEERS) if device.type == "cpu" else ("regard", "transformers")
    for package in packages:
        try:
            values[package] = version(package)
        except PackageNotFoundError:
            values[package] = "not installed"
    values["code"] = _code_fingerprint()
    return values


@cache
def _code_fingerprint() -> str:
    """Return a fingerprint of the code and the compiled module, which change more often than the version number."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    if native.built():
        digest.update(Path(str(native.compiled().__file__)).read_bytes())
    return digest.hexdigest()[:8]


def run(case: Case, seconds: float = 3.0) -> Measurement:
    """Run a case: compare the results of its calls, then time the calls alternately.

    - ``seconds``: the approximate measuring time; there are at least three rounds.

    Raises:
        MissingPeer: a library that the case needs is not installed.
        RuntimeError: the result of a call differs from regard's; then nothing is timed.

    >>> from regard.bench import Case
    >>> ones = torch.ones(100)
    >>> result = run(Case("mine", "a sum", lambda: {"regard": ones.sum, "Python": lambda: sum(ones)}), seconds=0)
    >>> result.rounds, result.ratios["Python"] > 1
    (3, True)
    """
    try:
        calls = case.make()
    except AssertionError as error:
        raise RuntimeError(f"{case.name}: results differ, nothing was timed: {' '.join(str(error).split())}") from None
    # Memory is measured in separate calls, so that its bookkeeping does not slow the timed calls.
    sizes = {}
    if case.memory:
        sizes = {name: measure_allocations(call).peak for name, call in calls.items()}

    best, median, rounds = race(calls, seconds, case.units_per_call, case.device)

    # Models contain reference cycles, and the next case needs their memory.
    del calls
    gc.collect()
    return Measurement(case.group, case.name, best, median, rounds, sizes, case.target)
