"""The test of GPUs: attention on each device, forward, backward and observed, compared with the CPU's reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._devices import CPU, list_devices
from regard._errors import RegardError
from regard._observables import Observe
from regard._operator import attention
from regard.doctor.self_test import run_self_test
from regard.kernels import self_check, triton
from regard.masks import Causal, Padding
from regard.positions import ALiBi

ALLOWED = 1e-3  # of the largest number; float32 products need less than a hundredth of it, unless TF32 replaces them
REFUSED = "not checked: "


def run_device_test() -> dict[str, Any]:
    """``{device: {"error": …, "problem": …}}``: the largest relative error; ``problem`` is empty if it is small.

    >>> run_device_test() if not list_devices() else {}
    {}
    """
    return {str(device): compare_with_cpu(device) for device in list_devices()}


def run_kernel_check() -> dict[str, dict[str, str]]:
    """``{device: {dtype: problem}}``: what the self-check of the Triton kernels says; empty without such a GPU.

    A problem is empty if the kernels passed, else one line. It starts with ``REFUSED`` if they cannot be used at all,
    so that nothing was checked.

    >>> run_kernel_check() if not list_devices() else {}
    {}
    """
    problems: dict[str, dict[str, str]] = {}
    for device in _gpus():
        problems[str(device)] = {}
        for dtype in self_check.TOLERANCES:
            problem = triton.device_refusal(str(device), dtype)
            if problem:
                problem = REFUSED + problem
            else:
                problem = self_check.check_again(triton, device, dtype).problem
            problems[str(device)][str(dtype).removeprefix("torch.")] = problem
    return problems


def run_long_test() -> dict[str, dict[str, Any]]:
    """The self-test on each GPU by device, as ``run_self_test`` returns it, with the Triton kernels.

    Without a GPU the kernels run in Triton's interpreter, if the process was started with ``TRITON_INTERPRET=1``.

    Raises:
        RegardError: the Triton kernels can run neither on a GPU nor in the interpreter.
    """
    devices = _gpus()
    if not devices:
        if triton.device_refusal("cpu", torch.float32):
            raise RegardError(
                "--gpu needs a CUDA or ROCm device, and torch finds none; on the CPU the kernels need the package "
                "triton and TRITON_INTERPRET=1"
            )
        devices = [CPU]
    return {str(device): run_self_test("triton", device) for device in devices}


def _gpus() -> list[torch.device]:
    """The devices that the Triton kernels are for."""
    return [device for device in list_devices() if device.type == "cuda"]


def compare_with_cpu(device: torch.device) -> dict[str, Any]:
    """The largest error of one call on a device, relative to the largest number of each result.

    >>> compare_with_cpu(torch.device("cpu"))["problem"]
    ''
    """
    try:
        ours = _results(device, "auto")
    except Exception as failure:
        reason = " ".join(str(failure).split())[:300]
        return {"error": None, "problem": f"{type(failure).__name__}: {reason}"}
    largest = 0.0
    problem = ""
    for name, expected in _results(torch.device("cpu"), "reference").items():
        scale = float(expected.abs().max())
        error = float((ours[name] - expected).abs().max()) / scale
        # NaN is not larger than anything, so the comparison is written the other way round.
        if not error <= ALLOWED and not problem:
            problem = f"the relative error of {name} is {error:.1e}"
        largest = max(largest, error)
    return {"error": largest, "problem": problem}


def _results(device: torch.device, backend: str) -> dict[str, Tensor]:
    """The results of a causal call with padding, biases and grouped heads, in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    leaves = []
    for heads in (4, 2, 2):
        x = torch.randn(2, heads, 150, 24, generator=generator).to(device)
        leaves.append(x.requires_grad_())
    options: dict[str, Any] = {"mask": Causal() & Padding([150, 90]), "bias": ALiBi(), "backend": backend}
    out = attention(*leaves, **options)
    gradients = torch.autograd.grad(out.square().sum(), leaves)
    with torch.no_grad():
        _, observation = attention(*leaves, **options, observe=Observe(map=8, profile=4, key_mass=True))
    results = {"the output": out, "the entropy": observation.entropy, "the map": observation.map}
    results |= {"the profile": observation.profile, "the mass of keys": observation.key_mass}
    for name, gradient in zip("qkv", gradients, strict=True):
        results[f"the gradient of {name}"] = gradient
    return {name: x.detach().cpu().double() for name, x in results.items() if x is not None}
