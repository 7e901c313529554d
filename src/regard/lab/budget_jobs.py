"""The room «budget»: this machine, measured in a process of its own, as nothing else should run beside it there."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from regard.budget.this_machine import this

__all__ = ["machine"]


def machine(args: dict[str, Any], progress: Callable[..., None]) -> dict[str, Any]:
    """This machine's figures: those that are kept, unless it is measured ``again``."""
    found = this(bool(args["again"]), lambda done, of: progress(done, of, "measuring"))
    told: dict[str, Any] = json.loads(found.to_json())
    return told
