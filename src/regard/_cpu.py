"""The CPU's name and flags, and how many cores this process may use."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """Return the name of the CPU model, as the system reports it."""
    match = re.search(r"^model name\s*:(.*)$", read_system_file("/proc/cpuinfo"), re.MULTILINE)
    name = "" if match is None else " ".join(match[1].split())
    return name or platform.processor() or platform.machine() or "CPU"


def cpu_flags() -> set[str] | None:
    """The features of an x86 CPU by their names in Linux; None if the system does not report them."""
    match = re.search(r"^flags\s*:(.*)$", read_system_file("/proc/cpuinfo"), re.MULTILINE)
    return None if match is None else set(match[1].split())


def usable_cores() -> int:
    """The number of cores this process may use at once; the CPU quota of a container is respected."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # systems other than Linux
        allowed = os.cpu_count() or 1
    quota = re.match(r"(\d+) (\d+)", read_system_file("/sys/fs/cgroup/cpu.max"))
    if quota is None:
        return allowed
    # Quota and period in microseconds; a fraction of a core is rounded up.
    cores = -(-int(quota[1]) // int(quota[2]))
    return max(1, min(allowed, cores))


def read_system_file(file: str) -> str:
    """The text of a file of the system; "" if it does not exist."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
