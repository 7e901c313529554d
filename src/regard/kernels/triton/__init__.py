"""Attention on a GPU: kernels in Triton, with the same functions as ``regard.kernels.native``.

Triton is optional, and it is imported at the first call that uses it. With ``TRITON_INTERPRET=1`` in the environment
before Triton is imported, the kernels run on the CPU in Triton's interpreter, slowly, for tests.

No function here uses another kernel in place of its own, or waits for the GPU. (On a grid, `observed` computes the
output here, and the reference measures.) The native kernel reports results that are not finite, and the reference
repeats the call. A GPU would have to wait for that report. Instead:

- Scores of hidden pairs are replaced before anything is computed from them, so their NaN has no effect.
- A hidden pair may still form 0 · NaN in the products with values, keys and queries. If a call can hide keys, each
  program writes whether its sums are finite, and the same kernel is started again. Its programs end at once, except
  those whose sums were not finite: they compute them again without the numbers that are not finite, and then enter
  NaN or ±inf where such a number was visible.
- A product that overflows float32 stays ±inf or NaN, as in the reference, which computes in float32 on a GPU. A sum of
  biases that overflows downwards stays at the smallest float32, so it never hides a key.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache

import torch
from torch import Tensor

from regard._devices import triton_version
from regard._lowered_scores import Scores
from regard._observables import Observe
from regard.kernels.reference import Forward, Gradients
from regard.kernels.triton._tile_sizes import MAX_WIDTH

INSTALL = "pip install 'regard[gpu]'"

DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def installed() -> bool:
    """Whether the package Triton is installed. It is not imported."""
    return _find_package()


@cache
def _find_package() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter. This imports Triton, which must be installed."""
    from regard.kernels.triton._launch import INTERPRETED

    return INTERPRETED


# Version 3.4 does not compile the kernels; 3.5 and 3.6 were not tried.
LEAST_VERSION = (3, 7)


@cache
def _version() -> tuple[int, ...]:
    """The first two numbers of the version of Triton, without importing it; that of ``LEAST_VERSION`` if unknown."""
    found = re.match(r"(\d+)\.(\d+)", triton_version())
    return LEAST_VERSION if found is None else (int(found[1]), int(found[2]))


# Older GPUs have no bfloat16 and less shared memory.
LEAST_CAPABILITY = (8, 0)


@cache
def _capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA GPU; None if torch cannot use the device.

    AMD GPUs have other numbers, which are not checked.
    """
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return LEAST_CAPABILITY
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor


def refusal(q: Tensor, v: Tensor | None = None) -> str:
    """One line that says why `backend="triton"` cannot compute a call; empty if it can."""
    reason = device_refusal(str(q.device), q.dtype)
    if reason:
        return reason
    for name, x in (("q", q), ("v", v)):
        if x is not None and x.shape[-1] > MAX_WIDTH:
            return f"the Triton kernels take widths up to {MAX_WIDTH}, {name} has {x.shape[-1]}"
    return ""


def device_refusal(device: str, dtype: torch.dtype) -> str:
    """The part of ``refusal`` that depends on the device and the dtype alone."""
    where = torch.device(device)
    if not installed():
        return f"the package triton is not installed ({INSTALL})"
    if _version() < LEAST_VERSION:
        found = ".".join(map(str, _version()))
        return f"the Triton kernels need Triton 3.7 or newer, version {found} is installed"
    if where.type not in ("cuda", "cpu"):
        return f"the Triton kernels run on CUDA and ROCm devices, q is on {device}"
    if dtype not in DTYPES:
        return f"the Triton kernels take float32, bfloat16 and float16, q is {dtype}"
    if where.type == "cuda":
        capability = _capability(where)
        if capability is None:
            return f"torch cannot use {device} here"
        if capability < LEAST_CAPABILITY:
            return f"the Triton kernels need compute capability 8.0, {device} has {capability[0]}.{capability[1]}"
        return ""
    # Last, because it imports Triton.
    if not interpreted():
        return "the Triton kernels run on CUDA and ROCm devices, q is on cpu (TRITON_INTERPRET=1 allows it, for tests)"
    return ""


# torch.compile asks once, when it meets the call, and keeps the answer: it cannot trace what is asked. The decorator
# that sets this attribute, torch.compiler.assume_constant_result, would import torch's compiler, which takes seconds.
device_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]


def output(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
    """``out`` of ``forward`` alone."""
    from regard.kernels.triton._run_forward import run_forward

    return run_forward(q, k, v, scores, None)[1]


def forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Forward:
    """``out [B, H, n, e]`` in q's dtype, ``row_max`` and ``row_sum [B, H, n]``, as ``reference.forward``."""
    from regard.kernels.triton._run_forward import new_row_sums, run_forward

    row_max, row_sum = new_row_sums(q)
    _, out = run_forward(q, k, v, scores, (row_max, row_sum))
    return Forward(out, row_max, row_sum)


def row_max_and_sum(q: Tensor, k: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """``row_max`` and ``row_sum [B, H, n]`` alone."""
    from regard.kernels.triton._run_forward import new_row_sums, run_forward

    # The kernel needs values: one column of zeros, which takes the memory of one number.
    v = k.new_zeros(1).expand(*k.shape[:3], 1)
    row_sums = new_row_sums(q)
    run_forward(q, k, v, scores, row_sums)
    return row_sums


def observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward`` and every observable: row values and the map in the same pass, the rest in a second one."""
    from regard.kernels.triton._run_observed import run_observed

    return run_observed(q, k, v, scores, observe, real)


def bin_masses(q: Tensor, k: Tensor, row_max: Tensor, row_sum: Tensor, scores: Scores, edges: Tensor) -> Tensor:
    """``[B, H, n, bins]``: each row's weight on the keys ``edges[t] ≤ j < edges[t + 1]``."""
    from regard.kernels.triton._run_observed import run_bin_masses

    return run_bin_masses(q, k, row_max, row_sum, scores, edges)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, result: Forward, scores: Scores, *, biases: bool = True
) -> Gradients:
    """Gradients of all inputs, as ``reference.backward``."""
    from regard.kernels.triton._run_backward import run_backward

    return run_backward(grad, q, k, v, result, scores, biases=biases)
