"""What is here: processor, memory, the native module, threads, versions, and where things are kept."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from regard import system
from regard.budget import this_machine
from regard.kernels import native
from regard.version import __version__

__all__ = ["cpu", "extras", "kept", "memory", "module", "openmp", "threads", "versions"]

# What the kernels make use of, by the names of Linux.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
# Extra → the package that it brings, and what it is for.
EXTRAS = {
    "hf": ("transformers", "its models"),
    "plot": ("matplotlib", "figures"),
    "train": ("scikit-learn", "the digits"),
}
RUNTIMES = re.compile(r"lib(?:g|i)?omp5?[-.][^/]*so[^/]*")  # libgomp.so.1, libiomp5.so, libomp-….so


def versions() -> dict[str, str]:
    """regard and what it computes with."""
    return {
        "regard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy") or "missing",
    }


def extras() -> dict[str, dict[str, str | None]]:
    """Optional packages: their versions, or how to install them. None is imported."""
    return {
        extra: {
            "package": package,
            "version": _version(package),
            "for": what,
            "install": f"pip install 'regard[{extra}]'",
        }
        for extra, (package, what) in EXTRAS.items()
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and which features that matter it has; None where Linux does not tell."""
    found: dict[str, Any] = {"model": system.cpu(), "architecture": platform.machine(), "cores": system.cores()}
    flags = system.flags() if platform.machine() in ("x86_64", "AMD64") else None
    found["has"] = None if flags is None else [name for name in FEATURES if name in flags]
    found["lacks"] = None if flags is None else [name for name in FEATURES if name not in flags]
    return found


def memory() -> dict[str, int | None]:
    """Bytes in all, and bytes that are free; a container's limit counts too. None where the system is silent."""
    said = dict(re.findall(r"^(MemTotal|MemAvailable):\s*(\d+) kB", system.told("/proc/meminfo"), re.MULTILINE))
    total, available = (1024 * int(said[x]) if x in said else None for x in ("MemTotal", "MemAvailable"))
    most, used = (system.told(f"/sys/fs/cgroup/memory.{x}").strip() for x in ("max", "current"))
    if most.isdigit() and total is not None and available is not None and int(most) < total:
        total = int(most)
        available = min(available, max(0, total - int(used or 0)))
    return {"total": total, "available": available}


def module() -> dict[str, Any]:
    """The native module: whether it is there, what it can run, what is in use, and whether REGARD_ISA decided that."""
    if not native.built():
        return {"built": False, "why": native.refusal(torch.zeros(1)), "install": native.INSTALL}
    return {
        "built": True,
        "instruction_sets": list(native.instruction_sets()),
        "in_use": native.instruction_set(),
        "forced": os.environ.get("REGARD_ISA") or None,
    }


def threads() -> dict[str, Any]:
    """How many threads torch, and so the kernels, use, what was asked for, and whose OpenMP runs them."""
    return {
        "torch": torch.get_num_threads(),
        "cores": system.cores(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or None,
        "openmp": openmp(system.told("/proc/self/maps").splitlines()),
    }


def openmp(maps: Iterable[str]) -> list[str]:
    """The OpenMP runtimes among the files of a process's memory: more than one have threads that compete."""
    files = {line[line.index("/") :].strip() for line in maps if "/" in line}
    return sorted(file for file in files if RUNTIMES.fullmatch(file.rpartition("/")[2]))


def kept() -> dict[str, str]:
    """Where regard keeps things, whether they are there yet or not."""
    from regard.lab.lab import default_state

    return {"lab": str(default_state()), "machine": str(this_machine.kept_in())}
