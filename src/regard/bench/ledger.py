"""All cases, the conditions of a run, and one case run."""

from __future__ import annotations

import gc
import hashlib
import platform
from collections.abc import Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from regard.bench.models import models
from regard.bench.operator import operator
from regard.bench.race import Case, Measured, race
from regard.bench.watching import watching
from regard.budget.allocations import allocated
from regard.kernels import native
from regard.system import cores, cpu

__all__ = ["GROUPS", "PEERS", "cases", "conditions", "run"]

GROUPS = {"operator": operator, "watching": watching, "models": models}
PEERS = ("transformers", "onnxruntime", "openvino")


def cases(words: str | Sequence[str] = ()) -> list[Case]:
    """The cases whose group is one of the words, or whose names contain one, in any case; all without any.

    >>> [case.name for case in cases(["decoding"])][0]
    'decoding, 32 heads × 8192 × 128'
    >>> cases(["no such case"])
    Traceback (most recent call last):
    ValueError: no case is called 'no such case'; regard bench --list names all
    """
    words = [words] if isinstance(words, str) else words
    every = [case for group in GROUPS.values() for case in group()]
    for word in words:
        if not any(_meant(word, case) for case in every):
            raise ValueError(f"no case is called {word!r}; regard bench --list names all")
    return [case for case in every if not words or any(_meant(word, case) for word in words)]


def _meant(word: str, case: Case) -> bool:
    return word.lower() == case.group or (bool(word) and word.lower() in case.name.lower())


def conditions() -> dict[str, str | int]:
    """What figures depend on: CPU, threads, kernels, versions. Figures of other conditions are not to be compared.

    >>> {"CPU", "threads", "kernel", "torch", "code"} <= set(conditions())
    True
    """
    found: dict[str, str | int] = {
        "CPU": cpu(),
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "kernel": native.instruction_set() if native.built() else "reference (the native module was not built)",
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for package in ("regard", *PEERS):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found | {"code": _code()}


@cache
def _code() -> str:
    """A name for the code that is here, the compiled module included: a version lasts for many changes."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent.parent
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    if native.built():
        digest.update(Path(str(native.compiled().__file__)).read_bytes())
    return digest.hexdigest()[:8]


def run(case: Case, seconds: float = 3.0) -> Measured:
    """Race a case: its calls are compared, then timed in turns for about so many seconds, at least three rounds.

    Raises:
        Missing: what the case is raced against is not there.
        RuntimeError: a call gives something else than ours; nothing is timed then.

    >>> from regard.bench import Case
    >>> sum_of = torch.ones(100)
    >>> done = run(Case("mine", "a sum", lambda: {"regard": sum_of.sum, "Python": lambda: sum(sum_of)}), seconds=0)
    >>> done.rounds, done.ratios["Python"] > 1
    (3, True)
    """
    try:
        calls = case.make()
    except AssertionError as error:
        raise RuntimeError(f"{case.name}: results differ, nothing was timed: {' '.join(str(error).split())}") from None
    sizes = {name: allocated(call).most for name, call in calls.items()} if case.memory else {}
    best, median, rounds = race(calls, seconds, case.unit)
    del calls
    gc.collect()  # models are made of cycles, and the next case needs the memory
    return Measured(case.group, case.name, best, median, rounds, sizes, case.wanted)
