"""What the system tells of itself: the CPU's name and flags, and how many cores a process may use."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

__all__ = ["cores", "cpu", "flags", "told"]


def cpu() -> str:
    """The CPU's model, as the system names it."""
    found = re.search(r"^model name\s*:(.*)$", told("/proc/cpuinfo"), re.MULTILINE)
    named = " ".join(found[1].split()) if found else ""
    return named or platform.processor() or platform.machine() or "CPU"


def flags() -> set[str] | None:
    """The features that an x86 CPU has, by Linux' names; None where nobody tells."""
    found = re.search(r"^flags\s*:(.*)$", told("/proc/cpuinfo"), re.MULTILINE)
    return None if found is None else set(found[1].split())


def cores() -> int:
    """As many as this process may run on at once: a container's share of time counts too."""
    try:
        allowed = len(os.sched_getaffinity(0))
    except AttributeError:  # another system than Linux
        allowed = os.cpu_count() or 1
    share = re.match(r"(\d+) (\d+)", told("/sys/fs/cgroup/cpu.max"))
    return allowed if share is None else max(1, min(allowed, -(-int(share[1]) // int(share[2]))))


def told(file: str) -> str:
    """What a file of the system says; nothing where there is none."""
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
