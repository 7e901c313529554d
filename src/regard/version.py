"""The version of the installed package.

>>> __version__.split(".")[0].isdigit()
True
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__"]

UNKNOWN = "0+unknown"  # sources on PYTHONPATH that nobody installed: no file says which version they are


def _installed() -> str:
    """What pip has recorded, for an editable installation too."""
    try:
        return version("regard")
    except PackageNotFoundError:
        return UNKNOWN


__version__ = _installed()
