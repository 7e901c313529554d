"""Configuration of all tests. Kernels use tiny tiles here, so that a dozen keys already cross tile borders."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from hypothesis import HealthCheck, settings
from support.native_module import use_tested_module
from support.triton_device import use_interpreter

use_tested_module()
use_interpreter()

from regard.kernels import score_tiles  # noqa: E402 (after the native module that is tested)

# Fixtures: trained models, pages in Chromium, a lab.
pytest_plugins = ("support.trained", "support.browser", "support.lab_pages")

# Derandomized: the same code gives the same result in every run. Tests marked full try more examples.
settings.register_profile(
    "regard", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.load_profile("regard")

# A background job of a shell ignores Ctrl-C, and a job of nohup ignores SIGHUP; so would the processes that tests start
# and stop with these signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # Windows has no SIGHUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# There is one worker per core, so each worker uses one thread.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)

PRODUCT_TILE = score_tiles.TILE_ELEMENTS
PRODUCT_HEAD = score_tiles.HEAD_ELEMENTS


@pytest.fixture(scope="session", autouse=True)
def _small_tiles():
    """Tiles of 12 elements in all tests that do not ask for others."""
    score_tiles.TILE_ELEMENTS = score_tiles.HEAD_ELEMENTS = 12
    yield
    score_tiles.TILE_ELEMENTS = PRODUCT_TILE
    score_tiles.HEAD_ELEMENTS = PRODUCT_HEAD


@pytest.fixture(autouse=True)
def _process_settings():
    """Restore what commands change for their whole process, because many tests run them in this one.

    The command line leaves a handler that ends the process at Ctrl-C, and the lab a umask for private files.
    """
    mask = os.umask(0o022)
    os.umask(mask)
    yield
    os.umask(mask)
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def middle_tiles(monkeypatch):
    """Tiles of 4,096 elements: several of them at lengths of a few hundred."""
    monkeypatch.setattr(score_tiles, "TILE_ELEMENTS", 2**12)


@pytest.fixture
def full_tiles(monkeypatch):
    """The tile sizes of the product, for tests of memory and speed."""
    monkeypatch.setattr(score_tiles, "TILE_ELEMENTS", PRODUCT_TILE)
    monkeypatch.setattr(score_tiles, "HEAD_ELEMENTS", PRODUCT_HEAD)
