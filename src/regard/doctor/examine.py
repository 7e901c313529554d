"""All checks, each of which may fail without the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.doctor import surroundings
from regard.doctor.selftest import self_test

__all__ = ["CHECKS", "examine"]

CHECKS: dict[str, Callable[[], Any]] = {
    "versions": surroundings.versions,
    "cpu": surroundings.cpu,
    "memory": surroundings.memory,
    "native": surroundings.module,
    "self_test": self_test,
    "threads": surroundings.threads,  # after the self-test: what that has loaded counts
    "extras": surroundings.extras,
    "kept": surroundings.kept,
}


def examine() -> dict[str, Any]:
    """Every check's answer by name; ``problems``, what is wrong in a line each, ``notes``, advice, and ``well``.

    A check that raises has ``{"error": …}`` for its answer, and is a problem.

    >>> found = examine()
    >>> found["versions"]["regard"] == regard.__version__, found["problems"]
    (True, [])
    """
    found: dict[str, Any] = {}
    problems = []
    for name, check in CHECKS.items():
        try:
            found[name] = check()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            problems.append(f"{name.replace('_', '-')} could not be checked: {found[name]['error']}")
    failed = found["self_test"].get("failed", [])
    if failed:
        others = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        problems.append(f"self-test failed: {failed[0]}{others}")
    return found | {"problems": problems, "notes": _notes(found), "well": not problems}


def _notes(found: dict[str, Any]) -> list[str]:
    notes = []
    module, threads = found["native"], found["threads"]
    if module.get("built") is False:
        notes.append(f"{module['why']}: everything runs on the reference backend; to get it, {module['install']}")
    if module.get("forced"):
        best = module["instruction_sets"][-1]
        weaker = f", though {best} could be" if module["in_use"] != best else ""
        notes.append(f"REGARD_ISA has {module['in_use']} in use{weaker}")
    if threads.get("torch", 0) > threads.get("cores", 1):
        many, few = threads["torch"], threads["cores"]
        notes.append(f"torch uses {many} threads on {few} cores, which is slow; set OMP_NUM_THREADS={few}")
    if len(threads.get("openmp", ())) > 1:
        notes.append("more than one OpenMP runtime is loaded: their threads compete, and calls become slow")
    return notes
