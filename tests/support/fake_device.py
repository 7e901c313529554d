"""A device that exists nowhere: its tensors report the device ``fakegpu``, and their numbers are in hidden CPU tensors.

What a real device refuses, this one refuses too: operations on tensors of two devices, NumPy arrays of its memory, and
float64 if ``FakeDevice.float64`` is False. Each copy of values to the CPU is counted, because there the CPU waits.

torch lets a process rename its spare backend once, and then reports it as the process's accelerator. So this module is
for processes of their own: ``test_devices.py`` starts one.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

import regard  # noqa: F401 (registers the operators)
from regard.kernels import ops

NAME = "fakegpu"
DOUBLES = (torch.float64, torch.complex128)
aten = torch.ops.aten
# Operators whose result the CPU has to wait for: it is a number, or a tensor whose size depends on values.
WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
}
# Operators that take tensors of two devices.
ACROSS = {aten.copy_.default, aten.index.Tensor, aten.index_put_.default, aten._to_copy.default}
ACROSS |= {getattr(aten.to, name) for name in aten.to.overloads()}
BODIES = {
    "attention": ops._attention_body,
    "observed_attention": ops._observed_body,
    "attention_backward": ops._backward_body,
}


class _Module(backend_registration._DummyBackendModule):
    """What torch expects of ``torch.fakegpu``, with the random generator of the CPU."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device: Any = None) -> None:
        FakeDevice.synchronized += 1


# torch holds plain pointers to these objects, so they must live as long as the process.
_REGISTERED = (
    _Module(),
    backend_registration._DummyPrivateUse1Hook(),
    backend_registration._DummyDeviceGuard(),
)


class FakeTensor(torch.Tensor):
    """A tensor on the fake device."""

    hidden: torch.Tensor

    @staticmethod
    def __new__(cls, hidden: torch.Tensor) -> FakeTensor:
        self: FakeTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            hidden.shape,
            strides=hidden.stride(),
            storage_offset=hidden.storage_offset(),
            dtype=hidden.dtype,
            device=torch.device(NAME, 0),
        )
        self.hidden = hidden
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeTensor({self.dtype}, {list(self.shape)})"

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copied: torch.Tensor = FakeTensor(self.hidden.detach().clone())
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def data_ptr(self) -> int:
        return self.hidden.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor of the fake device has no NumPy array; copy it to the CPU first")

    def tolist(self) -> Any:
        return self.detach().cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


class FakeDevice(TorchDispatchMode):
    """Within this context torch can create tensors on ``fakegpu``."""

    float64 = True
    transfers = 0  # how often the CPU had to wait for values
    synchronized = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    fakes = [x for x in leaves if isinstance(x, FakeTensor)]
    # In inference mode the device of ``to`` is not a keyword.
    device = next((x for x in leaves if isinstance(x, torch.device)), None)
    to_fake = device is not None and device.type == NAME
    if not fakes and not to_fake:
        return func(*args, **kwargs)
    if func.namespace == "regard":
        return _run_operator(func, args, kwargs)
    to_cpu = device is not None and not to_fake
    if func not in ACROSS:
        others = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, FakeTensor) and x.ndim]
        if fakes and others:
            raise _refusal(f"{func}: tensors on {NAME} and on the CPU")
    into_cpu = func == aten.copy_.default and not isinstance(args[0], FakeTensor)
    if to_cpu or into_cpu or func in WAITING or (func == aten.index.Tensor and _has_bool_index(args[1])):
        FakeDevice.transfers += 1
    dtypes = [x for x in leaves if isinstance(x, torch.dtype)]
    if into_cpu:
        dtypes.append(args[0].dtype)
    if (to_cpu or into_cpu) and not FakeDevice.float64 and any(x in DOUBLES for x in dtypes):
        raise _refusal(f"{func}: converts to float64 on {NAME} before it copies")

    wrappers = {id(x.hidden): x for x in fakes}
    args, kwargs = pytree.tree_map_only(FakeTensor, lambda x: x.hidden, (args, kwargs))
    args, kwargs = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    result = func(*args, **kwargs)
    if to_cpu or into_cpu:
        # On one CPU a copy may be the same tensor.
        return result

    def wrap(x: torch.Tensor) -> torch.Tensor:
        if id(x) in wrappers:
            return wrappers[id(x)]
        if x.dtype in DOUBLES and not FakeDevice.float64:
            raise _refusal(f"{func}: {NAME} has no float64")
        return FakeTensor(x)

    return pytree.tree_map_only(torch.Tensor, wrap, result)


def _refusal(reason: str) -> RuntimeError:
    """The error; it is also printed, because an error in a backward pass on this device ends the process."""
    print(reason, file=sys.stderr)
    return RuntimeError(reason)


def _has_bool_index(indices: Any) -> bool:
    return any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in indices)


def _run_operator(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator of regard: its Python body, below autograd."""
    assert not kwargs
    with FakeDevice():
        return BODIES[func._opname](*args)


def register() -> None:
    """Make ``fakegpu`` a device of this process."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, *_REGISTERED)
    # torch.tensor(…, device="fakegpu") then makes a CPU tensor and moves it, which reaches the mode.
    torch._C._set_only_lift_cpu_tensors(True)
