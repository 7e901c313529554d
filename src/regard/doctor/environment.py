"""Describes this machine: CPU, memory, native module, threads, versions, and the files that regard writes."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from regard import _cpu as system
from regard._devices import describe_device, list_devices
from regard._version import __version__
from regard.budget import _machine_benchmark as machine_benchmark
from regard.kernels import native

# CPU features that the kernels use, in the names of Linux.
FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16")
# Name of the extra → the package that it installs, and what it is for.
EXTRAS = {
    "hf": ("transformers", "its models"),
    "gguf": ("gguf", "quantised GGUF files"),
    "plot": ("matplotlib", "figures"),
    "train": ("scikit-learn", "the digits"),
    "gpu": ("triton", "kernels for GPUs"),
}
RUNTIMES = re.compile(r"lib(?:g|i)?omp5?[-.][^/]*so[^/]*")  # libgomp.so.1, libiomp5.so, libomp-….so


def versions() -> dict[str, str]:
    """Versions of regard, Python, torch and NumPy."""
    return {
        "regard": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _version("numpy") or "missing",
    }


def extras() -> dict[str, dict[str, str | None]]:
    """Optional packages: their versions, and how to install them. None of them is imported."""
    packages = {}
    for extra, (package, purpose) in EXTRAS.items():
        packages[extra] = {
            "package": package,
            "version": _version(package),
            "for": purpose,
            "install": f"pip install 'regard[{extra}]'",
        }
    return packages


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def cpu() -> dict[str, Any]:
    """Model, usable cores, and which of the relevant features it has and lacks; None if the system does not report."""
    features = missing = None
    flags = system.cpu_flags()
    if flags is not None and platform.machine() in ("x86_64", "AMD64"):  # other CPUs have other features
        features = [name for name in FEATURES if name in flags]
        missing = [name for name in FEATURES if name not in flags]
    return {
        "model": system.cpu_name(),
        "architecture": platform.machine(),
        "cores": system.usable_cores(),
        "has": features,
        "lacks": missing,
    }


def memory() -> dict[str, int | None]:
    """Total and free bytes, within a container's limit; None if the system does not report them."""
    total = _meminfo("MemTotal")
    available = _meminfo("MemAvailable")
    # A container's limit is lower than the machine's memory.
    limit = system.read_system_file("/sys/fs/cgroup/memory.max").strip()
    used = system.read_system_file("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and total is not None and available is not None and int(limit) < total:
        total = int(limit)
        available = min(available, max(0, total - int(used or 0)))
    return {"total": total, "available": available}


def _meminfo(name: str) -> int | None:
    """Bytes of one line of /proc/meminfo."""
    line = re.search(rf"^{name}:\s*(\d+) kB", system.read_system_file("/proc/meminfo"), re.MULTILINE)
    if line is None:
        return None
    return 1024 * int(line.group(1))


def native_module() -> dict[str, Any]:
    """The native module: whether it is built, its instruction sets, the one in use, and whether REGARD_ISA chose it."""
    if not native.built():
        return {"built": False, "why": native.refusal(torch.zeros(1)), "install": native.INSTALL}
    return {
        "built": True,
        "instruction_sets": list(native.instruction_sets()),
        "in_use": native.instruction_set(),
        "forced": os.environ.get("REGARD_ISA") or None,
    }


def devices() -> dict[str, Any]:
    """The GPUs that torch can use, each with its name and the versions of what drives it; often there is none."""
    return {str(device): describe_device(device) for device in list_devices()}


def threads() -> dict[str, Any]:
    """Number of threads of torch and the kernels, the setting, and the OpenMP runtimes that are loaded."""
    return {
        "torch": torch.get_num_threads(),
        "cores": system.usable_cores(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or None,
        "openmp": openmp_runtimes(system.read_system_file("/proc/self/maps").splitlines()),
    }


def openmp_runtimes(maps: Iterable[str]) -> list[str]:
    """The OpenMP runtimes among the lines of /proc/self/maps; with several, their threads compete."""
    files = {line[line.index("/") :].strip() for line in maps if "/" in line}
    return sorted(file for file in files if RUNTIMES.fullmatch(file.rpartition("/")[2]))


def state_files() -> dict[str, str]:
    """Where regard writes its files, even if they do not exist yet."""
    from regard.lab.workspace import default_state_folder

    return {"lab": str(default_state_folder()), "machine": str(machine_benchmark.measurements_file())}
