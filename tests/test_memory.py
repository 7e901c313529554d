"""Memory grows with n, never with n²: forward, backward and observables."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Peak resident memory is a property of a process: each measurement runs in one of its own.
PROGRAM = """
import resource, sys, torch, regard
torch.set_num_threads(1)
n, watch = int(sys.argv[1]), sys.argv[2] == "observe"
def call(q, k, v):
    observe = regard.Observe(map=64, key_mass=True, profile=64, top=4) if watch else None
    out = regard.attention(q, k, v, mask=regard.Causal(), bias=regard.ALiBi(), observe=observe, backend="reference")
    out = out[0] if watch else out
    out.sum().backward()
def inputs(n):
    return [torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3)]
call(*inputs(256))
real = inputs(n)
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
call(*real)
print(peak() - before)
"""


def extra_bytes(n: int, observe: bool) -> int:
    """Peak memory above the inputs for one causal + ALiBi call, forward and backward."""
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(n), "observe" if observe else "plain"]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=3000).stdout)


def test_memory_is_linear() -> None:
    """From 2,048 to 8,192 keys n² grows 16 ×; what is needed above the inputs may grow 4 × and a constant."""
    small, large = extra_bytes(2048, True), extra_bytes(8192, True)
    tensors = 8192 * 64 * 4  # one of q, k, v, out, dq, dk, dv
    assert large < small + 16 * tensors
    assert large < 8192 * 8192 * 4 / 2  # one n × n float32 would be 256 MiB


@pytest.mark.full
@pytest.mark.parametrize("observe", [False, True])
def test_32768_tokens_fit_in_600_megabytes(observe: bool) -> None:
    extra = extra_bytes(32_768, observe)
    print(f"extra memory at n = 32,768, observe={observe}: {extra / 1e6:.0f} MB")
    assert extra < 600e6
