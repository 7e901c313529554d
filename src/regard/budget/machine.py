"""What a machine can do: t ≥ FLOPs / peak and t ≥ bytes / bandwidth; those known by name have published figures."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

from regard.budget.accelerators import ACCELERATORS

__all__ = ["Machine", "machines", "named"]

DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "int8")


@dataclass(frozen=True)
class Machine:
    """A roofline: ``t ≥ FLOPs / peak[dtype]`` and ``t ≥ bytes / bandwidth``; they meet at ``ridge`` FLOPs a byte.

    - ``peak``: FLOP/s of matrix products (2 a multiply-add) by dtype name: float64, float32, tfloat32, bfloat16,
      float16, int8. What is not listed is not supported.
    - ``bandwidth``: bytes/s of main memory, read and written together; ``memory``: its size in bytes.
    - ``measured``: ISO date and time of the measurement; None means published figures.
    - ``attention``: FLOP/s that `regard.attention` itself reaches, by dtype, counted as 4·n·m·d a head without mask.
    - ``activation``: elements/s of a gelu in float32; infinite where nobody measured it: it then costs its bytes only.
    - ``call``: seconds that any one operation costs at least; ``attention_call``: that a call of attention does.
    - ``rows``: how many rows make a matrix product half as fast as the peak: r rows take ``1 + rows/r`` times as long.

    >>> mine = Machine("mine", peak={"float32": 1e12}, bandwidth=1e11, memory=2**34)
    >>> mine.ridge("float32")  # a product of fewer FLOPs a byte waits for memory
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
        for name, what in (("call", "seconds"), ("attention_call", "seconds"), ("rows", "rows")):
            value = getattr(self, name)
            _check(name, value, 0 <= _number(value) < math.inf, f"a number of {what}, 0 or more")
        _check("measured", self.measured, self.measured is None or _is_date(self.measured), "an ISO date-time or None")

    def rate(self, dtype: str) -> float:
        """FLOP/s of matrix products in ``dtype``.

        >>> named("A100 80GB").rate("bfloat16") / 1e12
        312.0
        """
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
        """Every field by its name; an infinite ``activation`` is null, as JSON has no infinity.

        >>> machine = named("A100 80GB")
        >>> Machine.from_json(machine.to_json()) == machine
        True
        """
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


def machines() -> tuple[str, ...]:
    """The names that `named` knows, by maker and age.

    >>> machines()[:3]
    ('T4', 'V100 SXM2 32GB', 'A100 40GB')
    """
    return tuple(ACCELERATORS)


def named(name: str) -> Machine:
    """An accelerator by its name; case, spaces, dashes and the maker's name do not matter: ``nvidia-a100-80gb``.

    >>> machine = named("nvidia-a100-80gb")
    >>> machine.name, machine.memory // 2**30, round(machine.ridge("bfloat16"))
    ('A100 80GB', 80, 153)
    """
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
