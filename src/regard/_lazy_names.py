"""Import a package's public names when they are first used, because torch takes seconds to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def import_at_first_use(
    package: str, sources: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the functions ``__getattr__`` and ``__dir__`` of a package.

    - ``package``: the name of the package.
    - ``sources``: name → the module that has it. A name whose module ends with that name is the module itself.
    """

    def get(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source = sources[name]
        module = import_module(source)
        value: Any = module
        if source != f"{package}.{name}":
            value = getattr(module, name)
        # The next use finds the name in the package and does not come here.
        setattr(sys.modules[package], name, value)
        return value

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *sources})

    return get, list_names
