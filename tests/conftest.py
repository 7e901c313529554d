"""Shared by all tests: tiles of 2 × 6, so that a dozen keys already cross tile borders."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

import pytest
import torch
from hypothesis import HealthCheck, settings

if "REGARD_TEST_MODULE" in os.environ:  # another build of the native module (scripts/sanitize), under its usual name
    _spec = importlib.util.spec_from_file_location("regard._native", os.environ["REGARD_TEST_MODULE"])
    assert _spec is not None and _spec.loader is not None
    sys.modules["regard._native"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["regard._native"])

from regard.kernels import tiles

pytest_plugins = ("trained", "browser", "lab_pages")  # fixtures: trained models, pages in Chromium, a lab

# Derandomized: a run that is green stays green; long sweeps look further.
settings.register_profile(
    "regard", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)
settings.load_profile("regard")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job: what tests start is to hear Ctrl-C
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: one thread each
    torch.set_num_threads(1)

PRODUCT_TILE, PRODUCT_HEAD = tiles.TILE_ELEMENTS, tiles.HEAD_ELEMENTS


@pytest.fixture(scope="session", autouse=True)
def _small_tiles():
    tiles.TILE_ELEMENTS = tiles.HEAD_ELEMENTS = 12
    yield
    tiles.TILE_ELEMENTS, tiles.HEAD_ELEMENTS = PRODUCT_TILE, PRODUCT_HEAD


@pytest.fixture
def middle_tiles(monkeypatch):
    """Tiles of 4,096 elements: several of them at lengths of a few hundred."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 2**12)


@pytest.fixture
def full_tiles(monkeypatch):
    """The product's own tile size, for memory and speed."""
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", PRODUCT_TILE)
    monkeypatch.setattr(tiles, "HEAD_ELEMENTS", PRODUCT_HEAD)
