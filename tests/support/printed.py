"""Compare printed text: words exactly, decimals as numbers, so that a test passes on every CPU."""

from __future__ import annotations

import doctest
import math
import re
from types import ModuleType
from typing import Any

# A decimal, with or without an exponent. Integers stay text: they are counts, sizes and indices.
DECIMAL = re.compile(r"[-−+]?\d[\d,]*\.\d*(?:e[-+]?\d+)?|[-−+]?\d+e[-+]?\d+")


def decimals(text: str) -> list[float]:
    """Every decimal of a text, in order."""
    return [_value(number) for number in DECIMAL.findall(text)]


def _value(number: str) -> float:
    return float(number.replace(",", "").replace("−", "-"))


def _last_digit(number: str) -> float:
    """The size of one unit in the last printed digit: 0.001 for "7.130", 1e-13 for "4.8e-12"."""
    mantissa, _, exponent = number.partition("e")
    digits = len(mantissa.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - digits)


def same_print(expected: str, actual: str, *, relative: float = 0.0) -> bool:
    """Whether two texts have the same words, and decimals that differ by at most two units of their last digit.

    Another instruction set sums in another order, which may change the last printed digit. The number of spaces does
    not count either: a sign or a digit more moves a column. ``relative`` allows more, for numbers of half precision.
    """
    if " ".join(DECIMAL.sub("#", expected).split()) != " ".join(DECIMAL.sub("#", actual).split()):
        return False
    for a, b in zip(DECIMAL.findall(expected), DECIMAL.findall(actual), strict=True):
        tolerance = 2 * max(_last_digit(a), _last_digit(b))
        if not math.isclose(_value(a), _value(b), rel_tol=relative, abs_tol=tolerance):
            return False
    return True


class NumberChecker(doctest.OutputChecker):
    """The checker of doctest, which also accepts decimals that agree within a tolerance."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return super().check_output(want, got, optionflags) or same_print(want, got)


FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def run_module_examples(module: ModuleType, names: dict[str, Any]) -> int:
    """Run the examples of a module's docstrings; return how many failed."""
    runner = doctest.DocTestRunner(checker=NumberChecker(), optionflags=FLAGS)
    for test in doctest.DocTestFinder().find(module, extraglobs=names):
        runner.run(test)
    return runner.failures


def run_text_examples(text: str, name: str) -> int:
    """Run the examples of a page; return how many failed."""
    test = doctest.DocTestParser().get_doctest(text, {}, name, name, 0)
    return doctest.DocTestRunner(checker=NumberChecker(), optionflags=FLAGS).run(test).failed
