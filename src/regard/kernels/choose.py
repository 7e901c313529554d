"""Which kernel runs: ``auto`` is native where it can honour the call, else the reference."""

from __future__ import annotations

from torch import Tensor

from regard.kernels import native

BACKENDS = ("auto", "native", "reference")


def choose(backend: str, q: Tensor) -> str:
    """``"native"`` or ``"reference"``; a backend that cannot honour the call is refused with the reason."""
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; known are {', '.join(map(repr, BACKENDS))}")
    reason = "" if backend == "reference" else native.refusal(q)
    if backend == "native" and reason:
        raise ValueError(f"backend='native' cannot be honoured: {reason}")
    return "reference" if backend == "reference" or reason else "native"
