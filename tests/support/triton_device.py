"""Where the tests of the Triton kernels run: on a GPU if there is one, else in Triton's interpreter on the CPU.

Triton decides when it is imported whether kernels are interpreted, so one process cannot do both.
"""

from __future__ import annotations

import importlib
import importlib.util
import os

import pytest
import torch

INSTALLED = importlib.util.find_spec("triton") is not None
HAS_GPU = torch.cuda.is_available()

# The values of the fixture `device`: `pytest -m gpu` selects the real device.
DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(HAS_GPU, reason="the kernels run on the GPU")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="there is no GPU")]),
]


def use_interpreter() -> None:
    """Import the Triton kernels for the interpreter, if there is no GPU.

    The environment variable is set for the import only: processes that other tests start do not inherit it.
    """
    if HAS_GPU or not INSTALLED:
        return
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        # The interpreter imports this part of Triton when the first kernel runs, and it must be interpreted too.
        importlib.import_module("triton.experimental.gluon.language")
        importlib.import_module("regard.kernels.triton._run_backward")
        importlib.import_module("regard.kernels.triton._run_observed")
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before
