"""Measure this machine's CPU once, and save the result with its date."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import platformdirs
import torch
from torch import Tensor
from torch.nn import functional

from regard._checks import check_number
from regard._cpu import cpu_name, read_system_file
from regard._errors import RegardError
from regard._files import write_text
from regard._operator import attention
from regard._version import __version__
from regard.budget._machine import Machine
from regard.kernels import native
from regard.masks import Causal

DTYPES = ("float32", "float64", "bfloat16", "float16")
FEW_ROWS = 64  # a matrix product with so few rows does not reach the peak rate
MAX_SAVED = 16  # measurements in the file: several machines may share it, and each thread count has its own

Progress = Callable[[int, int], object]


def this_machine(refresh: bool = False, progress: Progress | None = None) -> Machine:
    """Measure this machine's CPU with `measure_machine`, and save the result; later calls return the saved result.

    If the CPU, thread count, instruction set, or version of torch or regard changes, the machine is measured again.
    The file is ``regard/machine.json`` in the user's cache folder, on Linux ``$XDG_CACHE_HOME`` or ``~/.cache``. A file
    that cannot be read is replaced; one that cannot be written causes a warning.

    - `refresh`: measure again, even if there is a saved result.
    - `progress`: called as ``progress(done, total)``.

    >>> machine = saved_machine() or regard.budget.find_machine("A100 80GB")  # `this_machine()` may take 5 s
    >>> regard.budget.plan(regard.budget.attention(512, 8), tokens=512, machine=machine).seconds > 0
    True
    """
    key = _measurement_key()
    saved = _read_measurements()
    if key in saved and not refresh:
        return _with_present_memory(saved[key])
    machine = measure_machine(progress)

    # The newest is last, so that the oldest is dropped first.
    saved.pop(key, None)
    try:
        _write_measurements({**saved, key: machine})
    except OSError as error:
        warnings.warn(f"the measurement of this machine is not saved: {error}", RuntimeWarning, stacklevel=2)
    return machine


def saved_machine() -> Machine | None:
    """Return the saved result that `this_machine` would return; None if `this_machine` would measure."""
    machine = _read_measurements().get(_measurement_key())
    return None if machine is None else _with_present_memory(machine)


def _with_present_memory(machine: Machine) -> Machine:
    """The machine with the memory that this process may use now: a container's limit may have changed."""
    return replace(machine, memory=_memory_bytes())


def _measurement_key() -> str:
    """Return a key that contains everything that a measurement depends on."""
    # A measurement is valid only for the kernels that ran.
    kernels = native.instruction_set() if native.built() else "no native module"
    return f"{_machine_name()}; torch {torch.__version__}; regard {__version__}, {kernels}"


def measurements_file() -> Path:
    """Return the file with the saved measurements. Raises `OSError` if there is no home folder."""
    try:
        return platformdirs.user_cache_path("regard") / "machine.json"
    except RuntimeError as error:
        raise OSError(f"there is no home folder: {error}") from None


def _read_measurements() -> dict[str, Machine]:
    """Return the saved measurements by key; invalid entries are skipped."""
    try:
        entries = dict(json.loads(measurements_file().read_text(encoding="utf-8"))["machines"])
    except (OSError, ValueError, RecursionError, TypeError, KeyError):
        return {}
    saved = {}
    for key, entry in entries.items():
        try:
            saved[key] = Machine.from_entries(entry)
        except ValueError:
            continue
    return saved


def _write_measurements(measurements: Mapping[str, Machine]) -> None:
    file = measurements_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    newest = list(measurements.items())[-MAX_SAVED:]
    content = {"machines": {key: json.loads(machine.to_json()) for key, machine in newest}}
    write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", file)


def _machine_name() -> str:
    """The CPU's model and the number of threads that torch uses."""
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _memory_bytes() -> int:
    """Return the bytes that this process may use: physical memory, or a container's limit if that is smaller.

    A huge number, which limits nothing, if the system does not report them.
    """
    physical = sys.maxsize
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        pages = os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        pass
    else:
        # sysconf returns −1 for an unknown value.
        if min(page, pages) > 0:
            physical = page * pages
    return min([physical, *_container_limits()])


def _container_limits(groups: str = "/proc/self/cgroup", root: str = "/sys/fs/cgroup") -> list[int]:
    """Return the memory limits of the control groups of this process, in bytes; none outside Linux.

    - `groups`: the file that names the groups of the process.
    - `root`: the folder with the settings of all groups.
    """
    limits = []
    for line in read_system_file(groups).splitlines():
        # For example "0::/user.slice" in version 2, and "4:memory:/docker/abc" in version 1.
        number, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if number == "0" and not controllers:
            folder = Path(root)
            name = "memory.max"
        elif "memory" in controllers.split(","):
            folder = Path(root) / "memory"
            name = "memory.limit_in_bytes"
        else:
            continue

        # A limit holds for all groups below it. In a container the path may be that of the host, which is not visible
        # there; then only the top folder exists, and it is the container's own group.
        own = folder / group.strip("/")
        for level in (own, *own.parents):
            text = read_system_file(str(level / name)).strip()
            if text.isdigit() and int(text) > 0:  # "max" means no limit
                limits.append(int(text))
            if level == folder:
                break
    return limits


def _load_per_core() -> float | None:
    """The load average of the last minute per core; None if the system does not report it."""
    try:
        return round(os.getloadavg()[0] / (os.cpu_count() or 1), 2)
    except (AttributeError, OSError):
        return None


def measure_machine(progress: Progress | None = None, seconds: float = 5.0) -> Machine:
    """Measure this machine's CPU with torch's current thread count, in about `seconds`.

    Each figure gets a share of the time, and is a median over several runs. For the rates of square products,
    attention and gelu, and for the bandwidth, the sizes of the tensors grow until the share is used. So 5 seconds give
    the rates of large products, and less time gives the rates of smaller ones. int8 is not measured: torch has no plain
    int8 product on CPUs.

    - `progress`: called as ``progress(done, total)`` after each figure.

    >>> machine = measure_machine(seconds=0.02)  # rough
    >>> machine.rate("float32") > 0, machine.measured is not None
    (True, True)
    """
    if not 0 < check_number("seconds", seconds) < math.inf:
        raise RegardError(f"seconds must be a positive number, got {seconds}")

    # Each figure, its share of the time, and the function that measures it.
    tasks: dict[str, tuple[float, Callable[[float], float]]] = {}
    for dtype in DTYPES:
        tasks[f"peak {dtype}"] = (0.14 if dtype == "float32" else 0.10, partial(_product_rate, dtype))
        tasks[f"attention {dtype}"] = (0.08, partial(_attention_rate, dtype))
    tasks["bandwidth"] = (0.14, _bandwidth)
    tasks["activation"] = (0.05, _activation_rate)
    tasks["call"] = (0.03, _call_seconds)
    tasks["attention call"] = (0.03, _attention_call_seconds)
    tasks["few rows"] = (0.04, _few_rows_rate)

    # Read before the measurement, which itself adds to the load.
    load = _load_per_core()
    figures: dict[str, float] = {}
    with _plain_torch():
        for done, (name, (share, measure)) in enumerate(tasks.items(), 1):
            figures[name] = measure(share * seconds)
            if progress is not None:
                progress(done, len(tasks))
    return Machine(
        name=_machine_name(),
        peak={dtype: figures[f"peak {dtype}"] for dtype in DTYPES},
        bandwidth=figures["bandwidth"],
        memory=_memory_bytes(),
        measured=datetime.now().astimezone().isoformat(timespec="seconds"),
        attention={dtype: figures[f"attention {dtype}"] for dtype in DTYPES},
        activation=figures["activation"],
        call=figures["call"],
        attention_call=figures["attention call"],
        # A product of r rows takes 1 + rows/r times as long as its FLOPs at the peak rate.
        rows=max(0.0, FEW_ROWS * (figures["peak float32"] / figures["few rows"] - 1)),
        load=load,
    )


@contextmanager
def _plain_torch() -> Iterator[None]:
    """Switch off gradients and autocast, and use the CPU, whatever settings the caller has."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


Work = tuple[float, Callable[[], object]]  # an amount of work, and a call that does it


def _product_rate(dtype: str, seconds: float) -> float:
    """FLOP/s of ``x Wᵀ``, where x and W are n × n: 2·n³ FLOPs."""

    # Layers store W in this layout; ``x W`` in half precision can be 20 times slower.
    def work(n: int) -> Work:
        x = _test_tensor(dtype, n, n)
        w = _test_tensor(dtype, n, n)
        return 2 * n**3, lambda: functional.linear(x, w)

    return _rate(work, (128, 256, 512, 1024, 2048, 4096), 8, seconds)


def _attention_rate(dtype: str, seconds: float) -> float:
    """FLOP/s of `regard.attention` with 8 heads of width 64, n queries and n keys: 4·n²·64 FLOPs per head."""

    def work(n: int) -> Work:
        q, k, v = (_test_tensor(dtype, 1, 8, n, 64) for _ in range(3))
        return 8 * 4 * n**2 * 64, lambda: attention(q, k, v)

    return _rate(work, (64, 128, 256, 512, 1024, 2048), 4, seconds)


def _bandwidth(seconds: float) -> float:
    """Bytes/s of ``c = a + b``: two arrays are read, one is written. They grow to 128 MiB each, to exceed the cache."""

    def work(n: int) -> Work:
        a, b, c = (torch.ones(n, dtype=torch.float32) for _ in range(3))
        return 12 * n, lambda: torch.add(a, b, out=c)

    return _rate(work, (2**19, 2**21, 2**23, 2**25), 4, seconds, sizes_used=1)


def _activation_rate(seconds: float) -> float:
    """Elements/s of gelu in float32, at up to 4 Mi elements."""

    def work(n: int) -> Work:
        x = _test_tensor("float32", n)
        return n, lambda: functional.gelu(x)

    return _rate(work, (2**16, 2**19, 2**22), 8, seconds, sizes_used=1)


def _few_rows_rate(seconds: float) -> float:
    """FLOP/s of a product of few rows with one of many 512 × 512 matrices, like the layers of a model."""
    x = _test_tensor("float32", FEW_ROWS, 512)
    # Many matrices, because a single one would stay in the cache.
    matrices = [_test_tensor("float32", 512, 512) for _ in range(32)]
    duration = _median_seconds(seconds, lambda: [functional.linear(x, w) for w in matrices], len(matrices))
    return 2 * FEW_ROWS * 512**2 / duration


def _attention_call_seconds(seconds: float) -> float:
    """Seconds of an attention call with almost nothing to compute."""
    q = _test_tensor("float32", 1, 4, 8, 8)  # small, so that only the overhead is measured
    return _median_seconds(seconds, lambda: [attention(q, q, q, mask=Causal()) for _ in range(10)], 10)


def _call_seconds(seconds: float) -> float:
    """Seconds of one operator with almost nothing to compute: an addition and a linear map alternate."""
    x = _test_tensor("float32", 1, 8)
    w = _test_tensor("float32", 8, 8)
    return _median_seconds(seconds, lambda: [functional.linear(torch.add(x, x), w) for _ in range(50)], 100)


def _median_seconds(seconds: float, run: Callable[[], object], operations: int) -> float:
    """Median seconds of one operation, over runs of `operations` each."""
    end = time.perf_counter() + seconds
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        times.append(_time(run) / operations)
    return statistics.median(times)


def _test_tensor(dtype: str, *shape: int) -> Tensor:
    """Numbers from −1 to 1. Not random: fast to create, and the caller's generators stay unchanged."""
    count = math.prod(shape)
    return torch.linspace(-1, 1, count, dtype=torch.float32).to(getattr(torch, dtype)).reshape(shape)


def _rate(
    work: Callable[[int], Work], sizes: Sequence[int], growth: float, seconds: float, sizes_used: int = 2
) -> float:
    """Measure the work per second at the largest sizes that can be run three times within `seconds`.

    The median of the runs is used, because a rate that a machine reaches only for a moment does not help in planning.
    Smaller sizes only predict how long larger ones will take: their data is in the cache, so they can look too fast.

    - `growth`: the factor by which the work grows from one size to the next.
    - `sizes_used`: the result is the best rate among this many of the largest sizes.
    """
    end = time.perf_counter() + seconds
    rates = []
    for index, size in enumerate(sizes, 1):
        amount, run = work(size)
        run()  # the first call touches memory and wakes threads
        times = [_time(run), _time(run)]
        last = index == len(sizes) or time.perf_counter() + 3 * growth * min(times) > end
        while last and time.perf_counter() + min(times) < end:
            times.append(_time(run))
        rates.append(amount / statistics.median(times))
        if last:
            break
    return max(rates[-sizes_used:])


def _time(run: Callable[[], object]) -> float:
    """Seconds of one call; at least the resolution of the clock, so that a rate stays finite."""
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, time.get_clock_info("perf_counter").resolution)
