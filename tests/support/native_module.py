"""Test another build of the native module, for example one with sanitizers, under its usual name."""

from __future__ import annotations

import importlib.util
import os
import sys


def use_tested_module() -> None:
    """Load the module that ``REGARD_TEST_MODULE`` names, if it is set; must be called before regard is imported."""
    if "REGARD_TEST_MODULE" not in os.environ:
        return
    spec = importlib.util.spec_from_file_location("regard._native", os.environ["REGARD_TEST_MODULE"])
    assert spec is not None and spec.loader is not None
    sys.modules["regard._native"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["regard._native"])
