"""Numbers as people write them: 110M, 2GiB, 10ms; and back."""

from __future__ import annotations

import re

__all__ = ["bytes_said", "count_said", "parse", "parse_whole", "seconds_said"]

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "p": 10**15, "e": 10**18}
SIZES = {"b": 1} | {
    f"{letter}{i}b": (1024 if i else 1000) ** power for power, letter in enumerate("kmgt", start=1) for i in ("", "i")
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
_NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\W\d_]*)")


def parse(name: str, given: str, what: str = "count") -> float:
    """A count (110M), a size (2GiB, 500MB) or a time (10ms); anything else is refused with what would be right.

    >>> parse("params", "110M"), parse("memory", "2GiB", "size"), parse("time", "10ms", "time")
    (110000000.0, 2147483648.0, 0.01)
    """
    units, example = {"count": (COUNTS, "110M"), "size": (SIZES, "2GiB"), "time": (TIMES, "10ms")}[what]
    found = _NUMBER.fullmatch(given.strip())
    unit = found[2].lower() if found else None
    if found is None or unit not in units:
        raise ValueError(f"{name} is {given!r}; it must be a positive {what} such as {example}")
    value = float(re.sub("[_,]", "", found[1])) * units[unit]
    if not 0 < value < 1e30:
        raise ValueError(f"{name} is {given!r}; it must be a positive {what} such as {example}")
    return value


def parse_whole(name: str, given: str, least: int = 1) -> int:
    """A whole number, perhaps with k or M.

    >>> parse_whole("tokens", "32k"), parse_whole("d", "1,024")
    (32000, 1024)
    """
    try:
        value = float(given) if re.fullmatch(r"-?[0-9]+", given.strip()) else parse(name, given)
    except ValueError:
        raise ValueError(f"{name} is {given!r}; it must be a whole number ≥ {least}") from None
    if value != int(value) or not least <= value < 2**53:
        raise ValueError(f"{name} is {given!r}; it must be a whole number ≥ {least}")
    return int(value)


def count_said(x: float) -> str:
    """Three digits and a letter.

    >>> count_said(124439808), count_said(3.2e12), count_said(512)
    ('124 M', '3.20 T', '512')
    """
    for letter, power in (("E", 18), ("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if x >= 0.9995 * 10**power:
            return f"{_three(x / 10**power)} {letter}"
    return f"{x:,.0f}"


def bytes_said(x: float) -> str:
    """Bytes with a binary unit, as memory is sold.

    >>> bytes_said(2**31), bytes_said(3 * 2**19), bytes_said(100)
    ('2.00 GiB', '1.50 MiB', '100 B')
    """
    for unit, power in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if x >= 0.9995 * 2**power:
            return f"{_three(x / 2**power)} {unit}"
    return f"{x:,.0f} B"


def seconds_said(x: float) -> str:
    """Seconds, or a smaller unit, or a larger one.

    >>> seconds_said(0.0123), seconds_said(3.0), seconds_said(7200)
    ('12.3 ms', '3.00 s', '2.00 h')
    """
    for unit, size, most in (("µs", 1e-6, 0.9995e-3), ("ms", 1e-3, 0.9995), ("s", 1.0, 600.0), ("min", 60.0, 7200.0)):
        if x < most:
            return f"{_three(x / size)} {unit}"
    return f"{_three(x / 3600)} h"


def _three(x: float) -> str:
    return f"{x:.2f}" if x < 9.995 else f"{x:.1f}" if x < 99.95 else f"{x:,.0f}"
