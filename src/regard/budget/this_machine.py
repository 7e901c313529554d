"""This machine's CPU, measured once and kept with its date: products, attention, bandwidth, what a call costs."""

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
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from regard.attention import attention
from regard.budget.machine import Machine
from regard.files import renamed
from regard.kernels import native
from regard.masks import Causal
from regard.shapes import number
from regard.system import cpu
from regard.version import __version__

__all__ = ["kept", "kept_in", "measure", "this"]

MEASURED = ("float32", "float64", "bfloat16", "float16")
FEW = 64  # rows of a product that is too small to be fast
KEPT = 16  # measurements in the cache: machines that share a home folder, and thread counts

Progress = Callable[[int, int], object]


def this(refresh: bool = False, progress: Progress | None = None) -> Machine:
    """This machine's CPU as `measure` found it, once: the result is kept in the user's cache with its date.

    Another CPU, thread count, instruction set or version of torch or regard is measured anew; so is everything with
    ``refresh``. The file is ``regard/machine.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. One that cannot be read is
    replaced; where none can be written, a warning says so.

    >>> machine = kept() or regard.budget.named("A100 80GB")  # `this` itself takes 5 seconds where nothing is kept
    >>> regard.budget.plan(regard.budget.attention(512, 8), tokens=512, machine=machine).seconds > 0
    True
    """
    key = _key()
    known = _read()
    if key in known and not refresh:
        return known[key]
    found = measure(progress)
    known.pop(key, None)  # the newest stands last, and the oldest falls out
    try:
        _write({**known, key: found})
    except OSError as error:
        warnings.warn(f"this machine's figures are not kept: {error}", RuntimeWarning, stacklevel=2)
    return found


def kept() -> Machine | None:
    """What `this` would give without measuring; None where it would measure."""
    return _read().get(_key())


def _key() -> str:
    """All that a measurement depends on."""
    kernels = native.instruction_set() if native.built() else "no native module"
    return f"{_name()}; torch {torch.__version__}; regard {__version__}, {kernels}"


def kept_in() -> Path:
    """Where measurements are kept."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # the XDG specification ignores relative ones
        try:
            folder = str(Path.home() / ".cache")
        except RuntimeError as error:
            raise OSError(f"there is no home folder: {error}") from None
    return Path(folder) / "regard" / "machine.json"


def _read() -> dict[str, Machine]:
    """Kept measurements by key; what is not one of ours is left out."""
    try:
        found = json.loads(kept_in().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    entries = found.get("machines") if isinstance(found, dict) else None
    kept = {}
    for key, entry in entries.items() if isinstance(entries, dict) else ():
        try:
            kept[key] = Machine._from_dict(entry)
        except ValueError:
            continue
    return kept


def _write(kept: Mapping[str, Machine]) -> None:
    file = kept_in()
    file.parent.mkdir(parents=True, exist_ok=True)
    newest = list(kept.items())[-KEPT:]
    content = {"machines": {key: json.loads(machine.to_json()) for key, machine in newest}}
    with renamed(file) as draft:
        draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name() -> str:
    """The CPU's model and the threads that torch uses on it."""
    threads = torch.get_num_threads()
    return f"{cpu()}, {threads} {'thread' if threads == 1 else 'threads'}"


def _memory() -> int:
    """Bytes of physical memory; where the system does not tell, all that can be addressed: no limit is known."""
    try:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize
    return page * pages if min(page, pages) > 0 else sys.maxsize  # sysconf says −1 for "unknown"


def measure(progress: Progress | None = None, seconds: float = 5.0) -> Machine:
    """This machine's CPU with torch's present thread count, in about ``seconds``; ``progress(done, of)`` as it goes.

    Each figure is the median of several runs in a share of the time, at sizes that double until the share is spent.
    So 5 seconds give the rates of large products, and a fraction of a second gives those of small ones. int8 is not
    measured: torch has no plain int8 product on CPUs.

    >>> machine = measure(seconds=0.02)  # rough
    >>> machine.rate("float32") > 0, machine.measured is not None
    (True, True)
    """
    if not 0 < number("seconds", seconds) < math.inf:
        raise ValueError(f"seconds is {seconds}; it must be a positive number")
    pieces: dict[str, tuple[float, Callable[[float], float]]] = {}  # share of the time, and what to do with it
    for dtype in MEASURED:
        pieces[f"peak {dtype}"] = (0.14 if dtype == "float32" else 0.10, partial(_products, dtype))
        pieces[f"attention {dtype}"] = (0.08, partial(_attention, dtype))
    pieces |= {"bandwidth": (0.14, _bandwidth), "activation": (0.05, _activation), "call": (0.03, _call)}
    pieces |= {"attention call": (0.03, _attention_call), "few rows": (0.04, _few_rows)}

    found: dict[str, float] = {}
    with _plain_torch():
        for done, (piece, (share, run)) in enumerate(pieces.items(), 1):
            found[piece] = run(share * seconds)
            if progress is not None:
                progress(done, len(pieces))
    return Machine(
        name=_name(),
        peak={dtype: found[f"peak {dtype}"] for dtype in MEASURED},
        bandwidth=found["bandwidth"],
        memory=_memory(),
        measured=datetime.now().astimezone().isoformat(timespec="seconds"),
        attention={dtype: found[f"attention {dtype}"] for dtype in MEASURED},
        activation=found["activation"],
        call=found["call"],
        attention_call=found["attention call"],
        rows=max(0.0, FEW * (found["peak float32"] / found["few rows"] - 1)),
    )


@contextmanager
def _plain_torch() -> Iterator[None]:
    """No gradients, no autocast, and the CPU, whatever surrounds the measurement."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        yield


Work = tuple[float, Callable[[], object]]  # how much, and a call that does it


def _products(dtype: str, seconds: float) -> float:
    """FLOP/s of ``x Wᵀ``, both n × n, 2·n³: as layers store W; ``x W`` in half precision can be 20 times slower."""

    def work(n: int) -> Work:
        x, w = _numbers(dtype, n, n), _numbers(dtype, n, n)
        return 2 * n**3, lambda: functional.linear(x, w)

    return _rate(work, (128, 256, 512, 1024, 2048, 4096), 8, seconds)


def _attention(dtype: str, seconds: float) -> float:
    """FLOP/s of `regard.attention`: 8 heads of n queries and keys, 64 wide: 4·n²·64 each."""

    def work(n: int) -> Work:
        q, k, v = (_numbers(dtype, 1, 8, n, 64) for _ in range(3))
        return 8 * 4 * n**2 * 64, lambda: attention(q, k, v)

    return _rate(work, (64, 128, 256, 512, 1024, 2048), 4, seconds)


def _bandwidth(seconds: float) -> float:
    """Bytes/s of ``c = a + b``: two arrays read, one written, 128 MiB each, far more than a cache holds."""

    def work(n: int) -> Work:
        a, b, c = (torch.ones(n, dtype=torch.float32) for _ in range(3))
        return 12 * n, lambda: torch.add(a, b, out=c)

    return _rate(work, (2**19, 2**21, 2**23, 2**25), 4, seconds, sizes_kept=1)


def _activation(seconds: float) -> float:
    """Elements/s of gelu in float32, at 4 Mi elements."""

    def work(n: int) -> Work:
        x = _numbers("float32", n)
        return n, lambda: functional.gelu(x)

    return _rate(work, (2**16, 2**19, 2**22), 8, seconds, sizes_kept=1)


def _few_rows(seconds: float) -> float:
    """FLOP/s of a product of few rows with one of many 512 × 512 matrices, as a model's layers are."""
    x, several = _numbers("float32", FEW, 512), [_numbers("float32", 512, 512) for _ in range(32)]
    times = _times(seconds, lambda: [functional.linear(x, w) for w in several], len(several))
    return 2 * FEW * 512**2 / statistics.median(times)


def _attention_call(seconds: float) -> float:
    """Seconds of attention with next to nothing to do."""
    q = _numbers("float32", 1, 4, 8, 8)
    return statistics.median(_times(seconds, lambda: [attention(q, q, q, mask=Causal()) for _ in range(10)], 10))


def _call(seconds: float) -> float:
    """Seconds of one operation with next to nothing to do: an addition and a linear map in turn."""
    x, w = _numbers("float32", 1, 8), _numbers("float32", 8, 8)
    return statistics.median(_times(seconds, lambda: [functional.linear(torch.add(x, x), w) for _ in range(50)], 100))


def _times(seconds: float, run: Callable[[], object], operations: int) -> list[float]:
    """Seconds of one operation, in each of several runs of many."""
    end = time.perf_counter() + seconds
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        times.append(_time(run) / operations)
    return times


def _numbers(dtype: str, *shape: int) -> Tensor:
    """Numbers from −1 to 1. Not random ones: the caller's generators stay as they are, and large arrays come fast."""
    count = math.prod(shape)
    return torch.linspace(-1, 1, count, dtype=torch.float32).to(getattr(torch, dtype)).reshape(shape)


def _rate(
    work: Callable[[int], Work], sizes: Sequence[int], growth: float, seconds: float, sizes_kept: int = 2
) -> float:
    """Work/s at the largest sizes that can be run three times in the time; ``growth`` is a step's factor.

    The median of the runs: what a machine does for a moment, before others want it too, is no help in planning.
    Smaller sizes only tell how long larger ones take: in a cache, a slow kernel looks better than it is.
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
    return max(rates[-sizes_kept:])


def _time(run: Callable[[], object]) -> float:
    """Seconds of one call; at least the clock's own step, so that a rate stays finite."""
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, time.get_clock_info("perf_counter").resolution)
