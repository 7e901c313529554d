"""What a machine can do: t ≥ FLOPs / peak and t ≥ bytes / bandwidth; published figures, or measured on this CPU."""

from __future__ import annotations

import difflib
import json
import math
import os
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from regard.attention import attention
from regard.budget.accelerators import ACCELERATORS
from regard.files import renamed
from regard.kernels import native

__all__ = ["Machine", "machines", "measure", "named", "this"]

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "int8")
MEASURED = ("float32", "float64", "bfloat16", "float16")
KEPT = 16  # measurements in the cache: machines that share a home folder, and thread counts

Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Machine:
    """A roofline: ``t ≥ FLOPs / peak[dtype]`` and ``t ≥ bytes / bandwidth``; they meet at ``ridge`` FLOPs a byte.

    - ``peak``: FLOP/s of matrix products (2 a multiply-add) by dtype name: float64, float32, tfloat32, bfloat16,
      float16, int8. What is not listed is not supported.
    - ``bandwidth``: bytes/s of main memory, read and written together; ``memory``: its size in bytes.
    - ``measured``: ISO date and time of the measurement; None means published figures.
    - ``attention``: FLOP/s that `regard.attention` itself reaches, by dtype, counted as 4·n·m·d a head without mask.
    - ``activation``: elements/s of a gelu in float32; infinite where nobody measured it: it then costs its bytes only.
    - ``call``: seconds that any one operation costs at least.
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int
    measured: str | None = None
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    activation: float = math.inf
    call: float = 0.0

    def __post_init__(self) -> None:
        """Figures that no machine can have are refused, each by name."""
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"the name of a machine is a text, not {self.name!r}")
        for name in ("peak", "attention"):
            object.__setattr__(self, name, _rates(name, getattr(self, name)))
        if not self.peak:
            raise ValueError("peak is empty: a machine computes at least one dtype")
        _check("bandwidth", self.bandwidth, 0 < _number(self.bandwidth) < math.inf, "a positive number of bytes/s")
        whole = isinstance(self.memory, int) and not isinstance(self.memory, bool)
        _check("memory", self.memory, whole and self.memory > 0, "a positive whole number of bytes")
        _check("activation", self.activation, _number(self.activation) > 0, "a positive number of elements/s")
        _check("call", self.call, 0 <= _number(self.call) < math.inf, "a number of seconds, 0 or more")
        _check("measured", self.measured, self.measured is None or _is_date(self.measured), "an ISO date-time or None")

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in ``dtype``."""
        if dtype not in self.peak:
            raise ValueError(f"{self.name} has no figure for {dtype}: it has {', '.join(sorted(self.peak))}")
        return self.peak[dtype]

    def attention_rate(self, dtype: str) -> float:
        """FLOP/s of `regard.attention` in ``dtype`` where measured, else of matrix products."""
        return self.attention[dtype] if dtype in self.attention else self.rate(dtype)

    def ridge(self, dtype: str) -> float:
        """``peak / bandwidth``: the FLOPs a byte above which the arithmetic, not the memory, sets the time."""
        return self.rate(dtype) / self.bandwidth

    def to_json(self) -> str:
        """Every field by its name; an infinite ``activation`` is null, as JSON has no infinity."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        if math.isinf(self.activation):
            found["activation"] = None
        return json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """The machine that `to_json` wrote; anything else is a `ValueError` of one line."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"a machine is JSON, this is not: {error}") from None
        return cls._from_dict(found)

    @classmethod
    def _from_dict(cls, found: Any) -> Machine:
        if not isinstance(found, dict):
            raise ValueError(f"a machine is a JSON object, not {type(found).__name__}")
        if unknown := sorted(found.keys() - {each.name for each in fields(cls)}):
            raise ValueError(f"a machine has no {', '.join(unknown)}")
        if missing := [name for name in ("name", "peak", "bandwidth", "memory") if name not in found]:
            raise ValueError(f"a machine needs {', '.join(missing)}")
        given = dict(found)
        if given.get("activation", 0) is None:
            given["activation"] = math.inf
        return cls(**given)


def _number(value: object) -> float:
    """The value as a float; what is no number is NaN, which fails every comparison."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:  # JSON allows whole numbers of any length
        return math.nan


def _check(name: str, value: object, holds: bool, right: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}: it should be {right}")


def _is_date(text: object) -> bool:
    try:
        return isinstance(text, str) and datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def _rates(name: str, rates: object) -> dict[str, float]:
    """A copy of rates by dtype, each checked."""
    if not isinstance(rates, Mapping):
        raise ValueError(f"{name} is {rates!r}: it should map dtype names to FLOP/s")
    for dtype, rate in rates.items():
        _check(f"a dtype of {name}", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        _check(f"{name} of {dtype}", rate, 0 < _number(rate) < math.inf, "a positive number of FLOP/s")
    return {dtype: float(rate) for dtype, rate in rates.items()}


# --- published --------------------------------------------------------------------------------------------------------


def machines() -> tuple[str, ...]:
    """The names that `named` knows, by maker and age."""
    return tuple(ACCELERATORS)


def named(name: str) -> Machine:
    """An accelerator by its name; case, spaces, dashes and the maker's name do not matter: ``nvidia-a100-80gb``."""
    for known, published in ACCELERATORS.items():
        if _plain(known) == _plain(name):
            return Machine(known, *published)
    close = _closest(name)
    hint = f"close ones: {', '.join(close)}" if close else f"there are {', '.join(machines())}"
    raise ValueError(f"no machine {name!r} is known; {hint}")


def _plain(name: str) -> str:
    """Letters and digits of a name, in lower case, without its maker and product line."""
    makers = {"nvidia", "tesla", "geforce", "amd", "instinct", "google", "cloud"}
    return "".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in makers)


def _closest(name: str) -> list[str]:
    """Up to four names that begin like this one or are spelled like it."""
    plain = {_plain(known): known for known in ACCELERATORS}
    wanted = _plain(name)
    begins = [known for key, known in plain.items() if wanted and key.startswith(wanted)]
    alike = [plain[key] for key in difflib.get_close_matches(wanted, plain, n=4, cutoff=0.5)]
    return list(dict.fromkeys(begins + alike))[:4]


# --- this machine, measured once --------------------------------------------------------------------------------------


def this(refresh: bool = False, progress: Progress | None = None) -> Machine:
    """This machine's CPU as `measure` found it, once: the result is kept in the user's cache with its date.

    Another CPU, thread count, instruction set or version of torch or regard is measured anew; so is everything with
    ``refresh``. The file is ``regard/machine.json`` in ``$XDG_CACHE_HOME`` or ``~/.cache``. One that cannot be read is
    replaced; where none can be written, a warning says so.
    """
    key = _key()
    kept = _read()
    if key in kept and not refresh:
        return kept[key]
    found = measure(progress)
    kept.pop(key, None)  # the newest stands last, and the oldest falls out
    try:
        _write({**kept, key: found})
    except OSError as error:
        warnings.warn(f"this machine's figures are not kept: {error}", RuntimeWarning, stacklevel=2)
    return found


def _key() -> str:
    """All that a measurement depends on."""
    kernels = native.instruction_set() if native.built() else "no native module"
    return f"{_name()}; torch {torch.__version__}; regard {version('regard')}, {kernels}"


def _file() -> Path:
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
        found = json.loads(_file().read_text(encoding="utf-8"))
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
    file = _file()
    file.parent.mkdir(parents=True, exist_ok=True)
    newest = list(kept.items())[-KEPT:]
    content = {"machines": {key: json.loads(machine.to_json()) for key, machine in newest}}
    with renamed(file) as draft:
        draft.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name() -> str:
    """The CPU's model and the threads that torch uses on it."""
    try:
        found = re.search(r"^model name\s*:(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, ValueError):
        found = None
    cpu = " ".join(found[1].split()) if found else ""
    threads = torch.get_num_threads()
    cpu = cpu or platform.processor() or platform.machine() or "CPU"
    return f"{cpu}, {threads} {'thread' if threads == 1 else 'threads'}"


def _memory() -> int:
    """Bytes of physical memory; where the system does not tell, all that can be addressed: no limit is known."""
    try:
        page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return sys.maxsize
    return page * pages if min(page, pages) > 0 else sys.maxsize  # sysconf says −1 for "unknown"


# --- measuring --------------------------------------------------------------------------------------------------------


def measure(progress: Progress | None = None, seconds: float = 5.0) -> Machine:
    """This machine's CPU with torch's present thread count, in about ``seconds``; ``progress(done, of)`` as it goes.

    Each figure is the best of several runs in a share of the time, at sizes that double until the share is spent.
    So 5 seconds give the rates of large products, and a fraction of a second gives those of small ones. int8 is not
    measured: torch has no plain int8 product on CPUs.
    """
    if not 0 < _number(seconds) < math.inf:
        raise ValueError(f"seconds is {seconds!r}: it should be a positive number")
    pieces: dict[str, tuple[float, Callable[[float], float]]] = {}  # share of the time, and what to do with it
    for dtype in MEASURED:
        pieces[f"peak {dtype}"] = (0.14 if dtype == "float32" else 0.10, partial(_products, dtype))
        pieces[f"attention {dtype}"] = (0.08, partial(_attention, dtype))
    pieces |= {"bandwidth": (0.14, _bandwidth), "activation": (0.05, _activation), "call": (0.05, _call)}

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


def _call(seconds: float) -> float:
    """Seconds of one operation with next to nothing to do: the median over chains of an addition and a linear map."""
    x, w = _numbers("float32", 1, 8), _numbers("float32", 8, 8)
    end = time.perf_counter() + seconds
    times: list[float] = []
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(50):
            functional.linear(torch.add(x, x), w)
        times.append((time.perf_counter() - start) / 100)
    return statistics.median(times)


def _numbers(dtype: str, *shape: int) -> Tensor:
    """Numbers from −1 to 1. Not random ones: the caller's generators stay as they are, and large arrays come fast."""
    count = math.prod(shape)
    return torch.linspace(-1, 1, count, dtype=torch.float32).to(getattr(torch, dtype)).reshape(shape)


def _rate(
    work: Callable[[int], Work], sizes: Sequence[int], growth: float, seconds: float, sizes_kept: int = 2
) -> float:
    """The best work/s at the largest sizes that can be run three times in the time; ``growth`` is a step's factor.

    Smaller sizes only tell how long larger ones take: in a cache, a slow kernel looks better than it is.
    """
    end = time.perf_counter() + seconds
    rates = []
    for index, size in enumerate(sizes, 1):
        amount, run = work(size)
        run()  # the first call touches memory and wakes threads
        best = min(_time(run), _time(run))
        last = index == len(sizes) or time.perf_counter() + 3 * growth * best > end
        while last and time.perf_counter() + best < end:
            best = min(best, _time(run))
        rates.append(amount / best)
        if last:
            break
    return max(rates[-sizes_kept:])


def _time(run: Callable[[], object]) -> float:
    """Seconds of one call; at least the clock's own step, so that a rate stays finite."""
    start = time.perf_counter()
    run()
    return max(time.perf_counter() - start, time.get_clock_info("perf_counter").resolution)
