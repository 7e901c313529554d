"""Models and tensors that are not on a CPU, emulated in a process of its own (see ``support/fake_device.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard import _devices

HERE = Path(__file__).resolve().parent


def test_everything_works_on_a_device_that_is_not_a_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "on_fake_device.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    run = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=600, env=environment)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout and "skipped" not in run.stdout


def test_which_devices_have_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _devices.has_float64(torch.device("cpu"))
    assert _devices.has_float64(torch.device("cuda", 1))
    assert not _devices.has_float64(torch.device("mps"))

    class Arc:
        has_fp64 = False

    class Battlemage:
        has_fp64 = True

    for index, properties in enumerate((Arc(), Battlemage(), object())):
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _, properties=properties: properties)
        _devices._xpu_has_float64.cache_clear()
        assert _devices.has_float64(torch.device("xpu", index)) is (index == 1)
    _devices._xpu_has_float64.cache_clear()


def test_float64_becomes_float32_before_it_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([1.5], dtype=torch.float64)
    assert _devices.move_to(x, torch.device("cpu")).dtype == torch.float64
    monkeypatch.setattr(_devices, "has_float64", lambda device: device.type != "meta")
    assert _devices.move_to(x, torch.device("meta")).dtype == torch.float32


def test_random_states_are_as_before() -> None:
    state = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="within"), _devices.preserved_random_state(torch.device("cpu"), seed=3):
        drawn = torch.rand(2)
        raise RuntimeError("within")
    assert torch.equal(torch.get_rng_state(), state)
    with _devices.preserved_random_state(torch.device("cpu"), seed=3):
        assert torch.equal(torch.rand(2), drawn)
