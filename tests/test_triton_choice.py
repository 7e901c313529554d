"""When the Triton kernels are chosen, what they refuse, and that nothing imports Triton before it is used."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import regard
from regard.kernels import native, self_check
from regard.kernels import triton as kernels
from regard.kernels.choose_backend import fast_kernel, resolve_backend


def on_gpu(width: int = 64, dtype: torch.dtype = torch.float16, device: str = "cuda") -> torch.Tensor:
    """A tensor on a GPU without memory, on any machine."""
    with FakeTensorMode():
        return torch.empty(1, 2, 5, width, dtype=dtype, device=device)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An NVIDIA GPU that the kernels support, on which they passed their self-check, and an installed Triton."""
    monkeypatch.setattr(self_check, "verdict_of", lambda *arguments: self_check.Verdict(""))
    monkeypatch.setattr(kernels, "_capability", lambda device: (8, 6))
    monkeypatch.setattr(kernels, "installed", lambda: True)
    monkeypatch.setattr(kernels, "_version", lambda: kernels.LEAST_VERSION)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_auto_is_triton_on_a_gpu(a_gpu: None, dtype: torch.dtype) -> None:
    q = on_gpu(dtype=dtype)
    assert resolve_backend("auto", q, q) == "triton"
    assert resolve_backend("triton", q, q) == "triton"
    assert fast_kernel(q) is kernels


def test_auto_is_the_reference_where_triton_refuses(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    q = on_gpu()
    assert resolve_backend("auto", on_gpu(dtype=torch.float64)) == "reference"
    assert resolve_backend("auto", on_gpu(257)) == "reference"
    assert resolve_backend("auto", q, on_gpu(257)) == "reference"
    assert resolve_backend("auto", on_gpu(256), on_gpu(256)) == "triton"
    assert resolve_backend("auto", on_gpu(device="xpu")) == "reference"
    monkeypatch.setattr(kernels, "_capability", lambda device: (7, 5))
    assert resolve_backend("auto", q) == "reference"
    monkeypatch.setattr(kernels, "installed", lambda: False)
    assert resolve_backend("auto", q) == "reference"


@pytest.mark.skipif(not native.built(), reason="the native module was not built")
def test_auto_is_native_on_the_cpu() -> None:
    assert resolve_backend("auto", torch.zeros(1, 1, 2, 4)) == "native"


@pytest.mark.parametrize(
    ("q", "v", "words"),
    [
        (lambda: on_gpu(dtype=torch.float64), lambda: None, "q is torch.float64"),
        (lambda: on_gpu(300), lambda: None, "q has 300"),
        (lambda: on_gpu(), lambda: on_gpu(257), "v has 257"),
        (lambda: on_gpu(device="xpu"), lambda: None, "q is on xpu"),
    ],
)
def test_a_refusal_names_the_reason(a_gpu: None, q, v, words: str) -> None:
    with pytest.raises(ValueError, match=f"backend='triton' .* {words}"):
        resolve_backend("triton", q(), v())


def test_a_missing_triton_an_old_gpu_and_a_cpu_are_named(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0, cuda:0 has 7\.5"):
        resolve_backend("triton", on_gpu(device="cuda:0"))
    monkeypatch.setattr(kernels, "_version", lambda: (3, 4))
    with pytest.raises(ValueError, match=r"or newer, version 3\.4"):
        resolve_backend("triton", on_gpu())
    monkeypatch.setattr(kernels, "_version", lambda: kernels.LEAST_VERSION)
    monkeypatch.setattr(kernels, "interpreted", lambda: False)
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match="q is on cpu"):
        regard.attention(x, x, x, backend="triton")
    monkeypatch.setattr(kernels, "installed", lambda: False)
    with pytest.raises(ValueError, match=r"triton is not installed .*regard\[gpu\]"):
        regard.attention(x, x, x, backend="triton")


def test_triton_is_imported_by_the_first_call_that_uses_it() -> None:
    script = """
import sys
import torch
import regard
x = torch.zeros(1, 1, 2, 4)
regard.attention(x, x, x, observe=regard.Observe(map=2))
print("triton" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_values_that_are_joined_at_scale_zero_stay_within_the_width() -> None:
    """At scale 0 the values of several batch entries are one wide value, of at most 256 columns for Triton."""
    if not kernels.installed() or not (kernels.interpreted() or torch.cuda.is_available()):
        pytest.skip("the Triton kernels cannot run here")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k = torch.randn(6, 1, 3, 4, device=device), torch.randn(6, 1, 5, 4, device=device)
    v = torch.randn(6, 1, 5, 100, device=device)
    ours = regard.attention(q, k, v, scale=0.0, backend="triton")
    assert torch.allclose(ours, v.mean(2, keepdim=True).expand(ours.shape), atol=1e-6)
    assert not math.isnan(ours.sum().item())
