"""Machines: their peak rates, bandwidth and memory; accelerators by name with published figures."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from regard._errors import RegardError
from regard.budget._accelerators import ACCELERATORS

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "int8")
BUSY_LOAD = 0.3  # load per core above which a measurement is disturbed


@dataclass(frozen=True)
class Machine:
    """A roofline: ``t ≥ FLOPs / peak[dtype]`` and ``t ≥ bytes / bandwidth``; equal at `ridge` FLOPs per byte.

    - `peak`: FLOP/s of matrix products (2 per multiply–add) by dtype name: float64, float32, tfloat32, bfloat16,
      float16, int8. A dtype that is not listed is not supported.
    - `bandwidth`: bytes/s of main memory, read and written together; `memory`: its size in bytes.
    - `measured`: ISO date and time of the measurement; None for published figures. `load`: the load average per core
      before it, from which 1 means that every core was busy with something else; None if it is not known.
    - `attention`: FLOP/s that `regard.attention` reaches, by dtype, counted as 4·n·m·d per head without mask.
    - `activation`: elements/s of gelu in float32; infinite if not measured (then only its memory traffic takes time).
    - `call`: the shortest time of any operator, in seconds; `attention_call`: the shortest time of an attention call.
    - `rows`: a matrix product with r rows takes ``1 + rows/r`` times as long as its FLOPs at the peak rate.

    >>> mine = Machine("mine", peak={"float32": 1e12}, bandwidth=1e11, memory=2**34)
    >>> mine.ridge("float32")  # a product with fewer FLOPs per byte waits for memory
    10.0
    >>> plan = regard.budget.plan(regard.budget.attention(512, 8), tokens=512, machine=mine)
    >>> round(plan.seconds * 1000, 2)  # ms, for 1.61 GFLOP
    1.66
    """

    name: str
    peak: Mapping[str, float] = field(hash=False)
    bandwidth: float
    memory: int
    measured: str | None = None
    attention: Mapping[str, float] = field(default_factory=dict, hash=False)
    activation: float = math.inf
    call: float = 0.0
    attention_call: float = 0.0
    rows: float = 0.0
    load: float | None = None

    def __post_init__(self) -> None:
        """Raise a `RegardError` for figures that no machine can have."""
        _check("name", self.name, isinstance(self.name, str) and bool(self.name), "a text that is not empty")
        for name in ("peak", "attention"):
            # Copied: a later change of the caller's dictionary must not change the machine.
            object.__setattr__(self, name, _checked_rates(name, getattr(self, name)))
        _check("peak", self.peak, bool(self.peak), "rates of at least one dtype")
        _check("bandwidth", self.bandwidth, 0 < _as_float(self.bandwidth) < math.inf, "a positive number of bytes/s")
        is_integer = isinstance(self.memory, int) and not isinstance(self.memory, bool)
        _check("memory", self.memory, is_integer and self.memory > 0, "a positive integer of bytes")
        _check("activation", self.activation, _as_float(self.activation) > 0, "a positive number of elements/s")
        for name, unit in (("call", "seconds"), ("attention_call", "seconds"), ("rows", "rows")):
            value = getattr(self, name)
            _check(name, value, 0 <= _as_float(value) < math.inf, f"a number of {unit}, 0 or more")
        _check("measured", self.measured, self.measured is None or _is_date(self.measured), "an ISO date-time or None")
        is_load = self.load is None or 0 <= _as_float(self.load) < math.inf
        _check("load", self.load, is_load, "a number, 0 or more, or None")

    @property
    def measurement(self) -> str:
        """When this machine was measured, and whether other processes disturbed it; "" for published figures.

        >>> find_machine("A100 80GB").measurement
        ''
        """
        if self.measured is None:
            return ""
        text = f"measured {self.measured[:10]}"
        if self.load is None:
            return f"{text}, load unknown"
        text += f", load {self.load:.1f} per core"
        if self.load > BUSY_LOAD:
            return f"{text}: it was busy, so times may be too long"
        return text

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in `dtype`.

        >>> find_machine("A100 80GB").rate("bfloat16") / 1e12
        312.0
        """
        if dtype not in self.peak:
            raise RegardError(f"dtype must be one of {', '.join(sorted(self.peak))} on {self.name}, got {dtype}")
        return self.peak[dtype]

    def attention_rate(self, dtype: str) -> float:
        """FLOP/s of `regard.attention` in `dtype` if measured, otherwise of matrix products."""
        return self.attention.get(dtype) or self.rate(dtype)

    def ridge(self, dtype: str) -> float:
        """``peak / bandwidth``: the FLOPs per byte above which arithmetic, not memory, sets the time."""
        return self.rate(dtype) / self.bandwidth

    def to_json(self) -> str:
        """All fields as JSON; an infinite `activation` is null, because JSON has no infinity.

        >>> machine = find_machine("A100 80GB")
        >>> Machine.from_json(machine.to_json()) == machine
        True
        """
        entries = dict(vars(self))
        if math.isinf(self.activation):
            entries["activation"] = None
        return json.dumps(entries, indent=2, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """Read what `to_json` wrote; anything else raises a `RegardError`."""
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RegardError(f"a machine must be JSON: {error}") from None
        return cls.from_entries(entries)

    @classmethod
    def from_entries(cls, entries: Any) -> Machine:
        """Build a machine from the entries of its JSON object."""
        if not isinstance(entries, dict):
            raise RegardError(f"a machine must be a JSON object, not {type(entries).__name__}")
        if unknown := sorted(entries.keys() - cls.__dataclass_fields__.keys()):
            raise RegardError(f"a machine has no {', '.join(unknown)}")
        if missing := [name for name in ("name", "peak", "bandwidth", "memory") if name not in entries]:
            raise RegardError(f"a machine needs {', '.join(missing)}")
        if entries.get("activation", 0) is None:  # JSON has no infinity
            entries = entries | {"activation": math.inf}
        return cls(**entries)


def _as_float(value: object) -> float:
    """Return the value as a float; if it is not a number, return NaN, which fails every comparison."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        # JSON allows integers of any length.
        return math.nan


def _check(name: str, value: object, is_right: bool, accepted: str) -> None:
    if not is_right:
        raise RegardError(f"{name} must be {accepted}, got {value!r}")


def _is_date(text: object) -> bool:
    try:
        return isinstance(text, str) and datetime.fromisoformat(text) is not None
    except ValueError:
        return False


def _checked_rates(name: str, rates: object) -> dict[str, float]:
    """Check rates by dtype, and return a copy."""
    if not isinstance(rates, Mapping):
        raise RegardError(f"{name} must map dtype names to FLOP/s, got {rates!r}")
    for dtype, rate in rates.items():
        _check(f"a dtype of {name}", dtype, dtype in DTYPES, f"one of {', '.join(DTYPES)}")
        _check(f"{name} of {dtype}", rate, 0 < _as_float(rate) < math.inf, "a positive number of FLOP/s")
    return {dtype: float(rate) for dtype, rate in rates.items()}


def machines() -> tuple[str, ...]:
    """The names that `find_machine` knows, by maker and age.

    >>> machines()[:3]
    ('T4', 'V100 SXM2 32GB', 'A100 40GB')
    """
    return tuple(ACCELERATORS)


def find_machine(name: str) -> Machine:
    """Find an accelerator by its name; case, spaces, dashes and the maker's name do not matter.

    >>> machine = find_machine("nvidia-a100-80gb")
    >>> machine.name, machine.memory // 2**30, round(machine.ridge("bfloat16"))
    ('A100 80GB', 80, 153)
    """
    for known, published in ACCELERATORS.items():
        if _normalized(known) == _normalized(name):
            return Machine(known, *published)
    close = _close_names(name)
    if close:
        raise RegardError(f"unknown machine {name!r}; did you mean {', '.join(close)}?")
    raise RegardError(f"unknown machine {name!r}; known are {', '.join(machines())}")


def _normalized(name: str) -> str:
    """Return the letters and digits of a name in lower case, without the maker and the product line."""
    # Users may write the maker's name or leave it out.
    makers = {"nvidia", "tesla", "geforce", "amd", "instinct", "google", "cloud"}
    return "".join(word for word in re.findall(r"[a-z0-9]+", name.lower()) if word not in makers)


def _close_names(name: str) -> list[str]:
    """Up to four known names that begin like this one or are spelled similarly."""
    known = {_normalized(each): each for each in ACCELERATORS}
    typed = _normalized(name)
    prefixed = [each for key, each in known.items() if typed and key.startswith(typed)]
    similar = [known[key] for key in difflib.get_close_matches(typed, known, n=4, cutoff=0.5)]
    return list(dict.fromkeys(prefixed + similar))[:4]
