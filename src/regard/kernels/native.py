"""The door to the compiled module `regard._native`: is it there, what can it run, and why not, if not.

The module is optional. A build without a compiler leaves it out; then this file says so once, when `regard` is
imported, and everything runs on the reference backend.
"""

import importlib
import warnings
from types import ModuleType

# Without --no-cache-dir pip would install the pure package that it built the first time once more.
_REMEDY = "everything runs on the reference backend; to get it, install again with --no-cache-dir and a C++17 compiler"


def _load() -> tuple[ModuleType | None, str]:
    """The compiled module, or None and the reason why it is missing."""
    try:
        return importlib.import_module("regard._native"), ""
    except ModuleNotFoundError:
        return None, "the native module of regard was not built"
    except ImportError as error:
        return None, f"the native module of regard was built but cannot be loaded ({error})"


_module, _missing = _load()
if _module is None:
    warnings.warn(f"{_missing}: {_REMEDY}", RuntimeWarning, stacklevel=2)


def built() -> bool:
    """Whether the compiled module is there. It says nothing about attention: see `available`."""
    return _module is not None


def available() -> bool:
    """Whether `backend="native"` can be honoured. Never in this version: it has no native attention kernel."""
    return False


def refusal() -> str:
    """One line that says why `backend="native"` cannot be honoured."""
    return _missing or "the native attention kernel is not part of this version"


def instruction_sets() -> tuple[str, ...]:
    """What the compiled module can run on this machine, weakest first, best last; empty if it was not built.

    Each contains those before it: `portable` (plain C++, everywhere), `avx2` (with FMA and F16C), `avx512`
    (F, BW, DQ and VL), `avx512bf16`. A set counts only if the operating system saves its registers too.
    """
    return () if _module is None else tuple(_module.instruction_sets())


def instruction_set() -> str:
    """The instruction set in use: the best one, or the one that the environment variable `REGARD_ISA` names.

    The variable is read once, at the first call.

    Raises:
        ValueError: `REGARD_ISA` is unknown or this machine cannot run it; the message lists what it can run.
        RuntimeError: the compiled module was not built.
    """
    if _module is None:
        raise RuntimeError(f"no instruction set is in use: {_missing}")
    return str(_module.chosen())
