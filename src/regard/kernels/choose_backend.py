"""Which kernel runs a call: ``auto`` is native where it can run the call, else the reference."""

from __future__ import annotations

from torch import Tensor

from regard._errors import RegardError
from regard.kernels import native

BACKENDS = ("auto", "native", "reference")


def resolve_backend(backend: str, q: Tensor) -> str:
    """``"native"`` or ``"reference"``; a backend that cannot run the call is refused with the reason."""
    if backend == "reference":
        return "reference"
    if backend not in BACKENDS:
        raise RegardError(f"backend must be {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    reason = native.refusal(q)
    if not reason:
        return "native"
    if backend == "native":
        raise RegardError(f"backend='native' cannot be honoured: {reason}")
    return "reference"
