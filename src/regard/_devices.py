"""What differs between devices: float64, random generators, and waiting for queued work.

CPUs and CUDA GPUs (ROCm too, which torch also calls ``cuda``) have float64. Apple's GPUs (``mps``) have none: torch
raises where such a tensor would be created. Intel's GPUs (``xpu``) have it or not, and their properties say which.
Everything that sums in float64 asks ``has_float64`` or ``widest_dtype``.
"""

from __future__ import annotations

import atexit
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from regard._cpu import cpu_name
from regard._errors import RegardError

GPU_TYPES = ("cuda", "mps", "xpu")  # in torch's names; cuda stands for ROCm too
CPU = torch.device("cpu")
# Triton has another name in torch's builds for some GPUs.
TRITON_PACKAGES = (
    "triton",
    "pytorch-triton",
    "triton-rocm",
    "pytorch-triton-rocm",
    "pytorch-triton-xpu",
    "triton-windows",
)


def has_float64(device: torch.device) -> bool:
    """Whether tensors on this device can be float64.

    >>> has_float64(torch.device("cpu")), has_float64(torch.device("mps"))
    (True, False)
    """
    if device.type == "mps":
        return False
    if device.type == "xpu":
        return _xpu_has_float64(device.index)
    return True


@cache
def _xpu_has_float64(index: int | None) -> bool:
    # If the driver does not report it, float32 is right on every device.
    return bool(getattr(torch.xpu.get_device_properties(index), "has_fp64", False))


def widest_dtype(device: torch.device) -> torch.dtype:
    """The dtype for long sums: float64, or float32 on a device without float64.

    >>> widest_dtype(torch.device("mps"))
    torch.float32
    """
    return torch.float64 if has_float64(device) else torch.float32


def float64_device(x: Tensor) -> torch.device:
    """The device of x, or the CPU if that device has no float64.

    >>> float64_device(torch.zeros(1))
    device(type='cpu')
    """
    return x.device if has_float64(x.device) else torch.device("cpu")


def widest(x: Tensor) -> Tensor:
    """``x`` in ``widest_dtype`` of its device.

    >>> widest(torch.zeros(1, dtype=torch.bfloat16)).dtype
    torch.float64
    """
    return x.to(widest_dtype(x.device))


def move_to(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on the device; float64 becomes float32 where the device has no float64.

    >>> move_to(torch.zeros(1, dtype=torch.float64), torch.device("cpu")).dtype
    torch.float64
    """
    if x.dtype == torch.float64 and not has_float64(device):
        # First the dtype, then the device: the device cannot hold the float64 tensor.
        x = x.float()
    return x.to(device)


def on_cpu_in_float64(x: Tensor) -> Tensor:
    """A detached copy of ``x`` on the CPU in float64.

    >>> on_cpu_in_float64(torch.zeros(1)).dtype
    torch.float64
    """
    # First the device, then the dtype: one ``to`` may convert before it copies, on a device without float64.
    return x.detach().cpu().double()


def draw_seed(device: torch.device) -> Tensor:
    """A random int64 scalar on the device, from torch's generator of the device."""
    if device.type == "mps":
        # There torch draws integers with 32 bits only.
        high, low = torch.randint(2**31 - 1, (2,), dtype=torch.int64, device=device)
        return high * 2**31 + low
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def device_module(device: torch.device) -> Any:
    """``torch.cuda``, ``torch.mps``, … for a device; None for the CPU and for devices without such a module.

    >>> device_module(torch.device("cpu")) is None
    True
    """
    if device.type in ("cpu", "meta"):
        return None
    return getattr(torch, device.type, None)


def find_device(name: str, option: str = "device") -> torch.device:
    """The device of this name, if this machine has it.

    - ``option``: what the error names.

    >>> find_device("cpu")
    device(type='cpu')
    >>> find_device("gpu", "--device")
    Traceback (most recent call last):
    regard._errors.RegardError: --device must be cpu, cuda, mps or xpu, e.g. cuda or cuda:1, got 'gpu'
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = torch.device("meta")
    if device.type == "cpu":
        return CPU
    module = device_module(device)
    if not hasattr(module, "device_count"):
        raise RegardError(f"{option} must be cpu, cuda, mps or xpu, e.g. cuda or cuda:1, got {name!r}")
    count = _device_count(device)
    if (device.index or 0) >= count:
        found = ", ".join(map(str, list_devices())) or "cpu only"
        raise RegardError(f"{option} must be a device of this machine ({found}), got {name!r}")
    return torch.device(device.type, device.index or 0)


def list_devices() -> list[torch.device]:
    """The devices of this machine that are not the CPU, as far as this build of torch can use them."""
    devices = []
    for kind in GPU_TYPES:
        for index in range(_device_count(torch.device(kind))):
            devices.append(torch.device(kind, index))
    return devices


def _device_count(device: torch.device) -> int:
    """How many devices of this type torch can use; 0 where torch was built without them."""
    if device.type == "mps":
        return int(torch.backends.mps.is_available())
    module = device_module(device)
    return int(module.device_count()) if module is not None and module.is_available() else 0


def describe_device(device: torch.device) -> dict[str, str | int]:
    """What the speed of a device depends on: its name, and the versions of what drives it. Empty for the CPU.

    >>> describe_device(torch.device("cpu"))
    {}
    """
    if device.type == "cpu":
        return {}
    described: dict[str, str | int] = {"device": str(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described["device name"] = properties.name
        described["device memory"] = f"{properties.total_memory / 2**30:.1f} GiB"
        if torch.version.hip is not None:
            described["architecture"] = str(getattr(properties, "gcnArchName", "unknown"))
            described["ROCm"] = str(torch.version.hip)
        else:
            described["architecture"] = f"sm_{properties.major}{properties.minor}"
            described["CUDA"] = str(torch.version.cuda)
            described["CUDA of the driver"] = _cuda_of_driver()
            described["cuDNN"] = torch.backends.cudnn.version() or "none"
    elif device.type == "xpu":
        xpu_properties: Any = torch.xpu.get_device_properties(device)
        described["device name"] = xpu_properties.name
        described["device memory"] = f"{xpu_properties.total_memory / 2**30:.1f} GiB"
        described["driver"] = str(getattr(xpu_properties, "driver_version", "unknown"))
    elif device.type == "mps":
        described["device name"] = f"GPU of {cpu_name()}"
        described["macOS"] = platform.mac_ver()[0] or "unknown"
    described["float64"] = "yes" if has_float64(device) else "no"
    # With "high" or "medium" float32 products of torch are computed in TF32 or bfloat16.
    described["float32 products"] = torch.get_float32_matmul_precision()
    described["triton"] = triton_version()
    return described


def _cuda_of_driver() -> str:
    """The newest CUDA version that the driver supports."""
    read = getattr(torch._C, "_cuda_getDriverVersion", None)
    if read is None:
        return "unknown"
    number = int(read())
    return f"{number // 1000}.{number % 1000 // 10}"


def triton_version() -> str:
    """The version of the installed Triton, without importing it; "not installed" if there is none."""
    for package in TRITON_PACKAGES:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return "not installed"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all queued work. On a CPU nothing is queued.

    >>> synchronize(torch.device("cpu"))
    """
    module = device_module(device)
    if not hasattr(module, "synchronize"):
        return
    if device.type == "mps":
        module.synchronize()  # there is one such device, and the function takes none
    else:
        module.synchronize(device)


@cache
def finish_threads_at_exit() -> None:
    """Let torch's communication threads finish before Python ends. Call it in each process of a group.

    Such a thread releases the tensors of a message shortly after the message was received. If Python has begun to end
    by then, torch 2.13 ends the process with "terminate called without an active exception": in 5 of 14 runs of a
    program of torch alone on a fast machine. After a short pause at exit it was none of 12.
    """
    atexit.register(time.sleep, 0.3)


@contextmanager
def preserved_random_state(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Within the context the generators of the CPU and of the device start at ``seed``; afterwards they are as before.

    ``torch.random.fork_rng`` does not restore the generator of ``mps``, and without a list of devices it restores those
    of all GPUs.

    - ``seed``: None leaves the generators as they are.

    >>> with preserved_random_state(torch.device("cpu"), seed=0):
    ...     first = torch.rand(1)
    >>> with preserved_random_state(torch.device("cpu"), seed=0):
    ...     torch.equal(torch.rand(1), first)
    True
    """
    module = device_module(device)
    if not hasattr(module, "get_rng_state"):
        module = None
    # mps has one device, so its functions take none.
    which = () if device.type == "mps" else (device,)
    cpu_state = torch.get_rng_state()
    device_state = None if module is None else module.get_rng_state(*which)
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if module is not None:
                _seed(module, device, seed)
        yield
    finally:
        torch.set_rng_state(cpu_state)
        if module is not None:
            module.set_rng_state(device_state, *which)


def _seed(module: Any, device: torch.device, seed: int) -> None:
    """Seed the generator of one device."""
    if device.type == "mps":
        module.manual_seed(seed)
        return
    # manual_seed of these modules seeds the current device.
    with module.device(device):
        module.manual_seed(seed)
