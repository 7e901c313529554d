"""Parse and print numbers with units: 110M, 2GiB, 10ms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import ROUND_HALF_UP, Decimal

from regard._errors import RegardError

COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12, "p": 10**15, "e": 10**18}
SIZES = {
    "b": 1,
    **{"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "min": 60.0, "h": 3600.0}
# What a quantity measures: its units, and an example for error messages.
QUANTITIES: dict[str, tuple[Mapping[str, float], str]] = {
    "count": (COUNTS, "110M"),
    "size": (SIZES, "2GiB"),
    "time": (TIMES, "10ms"),
}

# A number with separators and an exponent, then letters.
_NUMBER = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([^\W\d_]*)")


def parse_quantity(name: str, text: str, quantity: str = "count") -> float:
    """Parse a count (110M), a size in bytes (2GiB, 500MB) or a time in seconds (10ms).

    - `name`: the name of the option; error messages contain it.
    - `quantity`: "count", "size" or "time".

    >>> parse_quantity("params", "110M"), parse_quantity("memory", "2GiB", "size")
    (110000000.0, 2147483648.0)
    """
    units, example = QUANTITIES[quantity]
    match = _NUMBER.fullmatch(text.strip())
    if match is not None and match[2].lower() in units:
        value = float(re.sub("[_,]", "", match[1])) * units[match[2].lower()]
        # Larger numbers are typing errors, and would overflow later.
        if 0 < value < 1e30:
            return value
    raise RegardError(f"{name} must be a positive {quantity} such as {example}, got {text!r}")


def parse_integer(name: str, text: str) -> int:
    """Parse an integer of at least 1; k, M and separators are allowed.

    >>> parse_integer("tokens", "32k"), parse_integer("d", "1,024")
    (32000, 1024)
    """
    problem = RegardError(f"{name} must be an integer ≥ 1, got {text!r}")
    try:
        value = parse_quantity(name, text)
    except RegardError:
        raise problem from None
    # Above 2**53 a float no longer holds every integer.
    if value != int(value) or value >= 2**53:
        raise problem
    return int(value)


def format_count(x: float) -> str:
    """Print a count with three digits and an SI prefix. Only what is not a whole number has decimals, such as a rate.

    >>> format_count(124439808), format_count(3.2e12), format_count(512), format_count(0.25)
    ('124 M', '3.20 T', '512', '0.250')
    """
    for letter, power in (("E", 18), ("P", 15), ("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        # 0.9995: a number that rounds to 1.00 of this unit is printed in it.
        if x >= 0.9995 * 10**power:
            return f"{_three_digits(x / 10**power)} {letter}"
    if x == int(x):
        return f"{x:,.0f}"
    return _three_digits(x)


def format_bytes(x: float) -> str:
    """Print a number of bytes with three digits and a binary unit.

    >>> format_bytes(2**31), format_bytes(3 * 2**19), format_bytes(100)
    ('2.00 GiB', '1.50 MiB', '100 B')
    """
    for unit, power in (("PiB", 50), ("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if x >= 0.9995 * 2**power:
            return f"{_three_digits(x / 2**power)} {unit}"
    return f"{x:,.0f} B"


def format_seconds(x: float) -> str:
    """Print a time with three digits, from microseconds to hours.

    >>> format_seconds(0.0123), format_seconds(3.0), format_seconds(7200)
    ('12.3 ms', '3.00 s', '2.00 h')
    """
    for unit, size, limit in (("µs", 1e-6, 0.9995e-3), ("ms", 1e-3, 0.9995), ("s", 1.0, 600.0), ("min", 60.0, 7200.0)):
        if x < limit:
            return f"{_three_digits(x / size)} {unit}"
    return f"{_three_digits(x / 3600)} h"


def _three_digits(x: float) -> str:
    digits = 0
    if 0 < x < 0.9995:
        # Leading zeros are not digits. Rates of less than a millionth are printed as 0.
        digits = min(8, 2 - math.floor(math.log10(1.0005 * x)))
    elif x < 9.995:
        digits = 2
    elif x < 99.95:
        digits = 1
    # Halves are rounded up, as the lab's pages do. Python's own formatting would print 1.125 as 1.12.
    rounded = Decimal(x).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP)
    return f"{rounded:,f}"
