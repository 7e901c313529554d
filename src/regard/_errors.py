"""The errors that regard raises when a caller made a mistake.

Catch ``RegardError`` for all of them. Each message is one line with three parts: what is wrong, what was given, and
what is accepted.
"""

from __future__ import annotations


class RegardError(ValueError):
    """An argument, a file or an option that regard cannot accept.

    It is a ``ValueError``, so code that already catches that one keeps working.

    >>> try:
    ...     regard.Causal(offset=1.5)
    ... except regard.RegardError as error:
    ...     print(type(error).__name__)
    RegardTypeError
    """


class RegardTypeError(RegardError, TypeError):
    """An argument of the wrong type; it is a ``TypeError`` too."""


class RankError(RegardError, RuntimeError):
    """Another process of a ``torch.distributed`` group has ended or did not answer in time.

    It is a ``RuntimeError`` too, the class that torch itself raises for this.
    """
