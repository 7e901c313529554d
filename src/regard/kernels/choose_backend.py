"""Which kernel runs a call: ``auto`` is native on the CPU and triton on a GPU where they can, else the reference."""

from __future__ import annotations

import os
from types import ModuleType

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from regard._errors import RegardError
from regard.kernels import native, self_check, triton

BACKENDS = ("auto", "native", "triton", "reference")
VARIABLE = "REGARD_BACKEND"


def resolve_backend(backend: str, q: Tensor, v: Tensor | None = None) -> str:
    """``"native"``, ``"triton"`` or ``"reference"``; a backend that cannot run the call is refused with the reason.

    The environment variable ``REGARD_BACKEND`` replaces ``"auto"``. Only ``"auto"`` depends on the self-check of the
    Triton kernels: a backend that is named runs as it is.

    ``v`` may be missing where the values are not known yet; then their width is not checked.
    """
    name = "backend"
    if backend == "auto":
        backend = os.environ.get(VARIABLE) or "auto"
        name = VARIABLE if backend != "auto" else name
    if backend == "reference":
        return "reference"
    if backend not in BACKENDS:
        raise RegardError(f"{name} must be {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if backend == "auto":
        return _choose(q, v)
    reason = native.refusal(q) if backend == "native" else triton.refusal(q, v)
    if reason:
        raise RegardError(f"{name}={backend!r} cannot be honoured: {reason}")
    return backend


def fast_kernel(q: Tensor) -> ModuleType | None:
    """The module that ``auto`` chooses for queries and keys alone; None for the reference."""
    return {"native": native, "triton": triton, "reference": None}[resolve_backend("auto", q)]


def _choose(q: Tensor, v: Tensor | None) -> str:
    # On a CPU, triton is for tests only, and must be requested.
    if _is_on_gpu(q):
        if triton.refusal(q, v) or not _passes_self_check(str(q.device), q.dtype):
            return "reference"
        return "triton"
    return "reference" if native.refusal(q) else "native"


def _is_on_gpu(q: Tensor) -> bool:
    return q.device.type == "cuda"


def _passes_self_check(device: str, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels compute correctly on this device; the first call per device and dtype checks it."""
    # While a model is traced, tensors have no values; the check needs real ones.
    with _disable_current_modes():
        return self_check.verdict_of(triton, torch.device(device), dtype).trusted


# torch.compile runs the check when it meets the call, and keeps the answer. The decorator that sets this attribute,
# torch.compiler.assume_constant_result, would import torch's compiler, which takes seconds.
_passes_self_check._dynamo_marked_constant = True  # type: ignore[attr-defined]
