"""Find the largest batch or length whose memory stays within a limit."""

from __future__ import annotations

from collections.abc import Callable

from regard._checks import check_integer
from regard._errors import RegardTypeError
from regard.budget._units import parse_quantity

LARGEST_LIMIT = 2**50  # 1 PiB
LARGEST_SIZE = 2**53  # fits only if memory does not grow: otherwise every token needs at least one byte


def largest_size(needed: Callable[[int], int], limit: int) -> int | None:
    """Return the largest size from 1 on whose need is within the limit; 0 if not even 1 fits, None if all sizes fit.

    - `needed`: bytes by size. It must not decrease.
    - `limit`: bytes.

    >>> largest_size(lambda n: 100 + 7 * n, 1000)
    128
    >>> largest_size(lambda n: min(n, 50), 1000) is None
    True
    """
    low = 1
    need_low = needed(low)
    if need_low > limit:
        return 0
    high = LARGEST_SIZE
    need_high = needed(high)
    if need_high <= limit:
        return None

    # Invariant: `low` fits and `high` does not. Memory is nearly linear in the size, so interpolation needs only a few
    # steps. Every second step halves the range, which bounds the number of steps for any other function.
    halve = False
    while high - low > 1:
        middle = (low + high) // 2
        if not halve:
            middle = low + (limit - need_low) * (high - low) // (need_high - need_low)
            middle = min(max(middle, low + 1), high - 1)
        need = needed(middle)
        if need <= limit:
            low = middle
            need_low = need
        else:
            high = middle
            need_high = need
        halve = not halve
    return low


def parse_memory_limit(limit: int | str) -> int:
    """Return a limit of memory in bytes; text has a unit, as in "24GB" or "80GiB".

    >>> parse_memory_limit("24GB")
    24000000000
    """
    if isinstance(limit, str):
        limit = int(parse_quantity("memory_limit", limit, "size"))
    elif not isinstance(limit, int) or isinstance(limit, bool):
        raise RegardTypeError(f'memory_limit must be bytes, or text such as "24GB", got {type(limit).__name__}')
    check_integer("memory_limit", limit, least=1, most=LARGEST_LIMIT)
    return limit
