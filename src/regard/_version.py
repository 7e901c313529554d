"""The version of the installed package.

>>> __version__.split(".")[0].isdigit()
True
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def _installed() -> str:
    """The version that pip recorded, also for an editable installation."""
    try:
        return version("regard")
    except PackageNotFoundError:
        return "0+unknown"  # sources on PYTHONPATH without an installation have no version


__version__ = _installed()
