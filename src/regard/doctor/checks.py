"""Runs all checks of ``regard doctor``; a check that raises does not stop the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from regard.doctor import environment
from regard.doctor.device_test import REFUSED, run_device_test, run_kernel_check
from regard.doctor.self_test import run_self_test

CHECKS: dict[str, Callable[[], Any]] = {
    "versions": environment.versions,
    "cpu": environment.cpu,
    "memory": environment.memory,
    "native": environment.native_module,
    "devices": environment.devices,
    "kernel_check": run_kernel_check,
    "device_test": run_device_test,
    "self_test": run_self_test,
    "threads": environment.threads,  # after the self-test, which may load an OpenMP runtime
    "extras": environment.extras,
    "kept": environment.state_files,
}


def run_checks() -> dict[str, Any]:
    """The result of every check by name, and three summaries.

    ``problems`` has one line per problem, ``notes`` has advice, and ``well`` is True if there are no problems.
    A check that raises has the result ``{"error": …}`` and is a problem.

    >>> report = run_checks()
    >>> report["versions"]["regard"] == regard.__version__, report["problems"]
    (True, [])
    """
    report: dict[str, Any] = {}
    problems = []
    for name, check in CHECKS.items():
        try:
            report[name] = check()
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
            problems.append(f"{name.replace('_', '-')} could not be checked: {report[name]['error']}")
    for device, verdicts in report["kernel_check"].items():
        if device == "error":
            continue
        for dtype, problem in verdicts.items():
            if problem and not problem.startswith(REFUSED):
                problems.append(f"the Triton kernels are not used for {dtype} on {device}: {problem}")
    for name, result in report["device_test"].items():
        if name != "error" and result["problem"]:
            problems.append(f"{name} computes wrong results: {result['problem']}")
    failed = report["self_test"].get("failed", [])
    if failed:
        problem = f"self-test failed: {failed[0]}"
        if len(failed) > 1:
            problem += f" (and {len(failed) - 1} more)"
        problems.append(problem)
    return report | {"problems": problems, "notes": _advice(report), "well": not problems}


def _advice(report: dict[str, Any]) -> list[str]:
    """One line per setting that costs speed."""
    notes = []
    module = report["native"]
    threads = report["threads"]
    if module.get("built") is False:
        notes.append(f"{module['why']}: everything runs on the reference backend; to get it, {module['install']}")
    if module.get("forced"):
        note = f"REGARD_ISA selects {module['in_use']}"
        best = module["instruction_sets"][-1]  # they are in ascending order
        if module["in_use"] != best:
            note += f", though {best} is available"
        notes.append(note)
    if threads.get("torch", 0) > threads.get("cores", 1):
        torch_threads = threads["torch"]
        cores = threads["cores"]
        notes.append(f"torch uses {torch_threads} threads on {cores} cores, which is slow; set OMP_NUM_THREADS={cores}")
    if len(threads.get("openmp", ())) > 1:
        notes.append("more than one OpenMP runtime is loaded: their threads compete, and calls become slow")
    return notes
