"""Model folders that tests damage, and a check of the error that loading them raises."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from regard.models import load
from support.checkpoints import make, write
from support.model_configs import BERT, GPT2, LLAMA, T5, VIT

CASES = {
    "bert": ("BertForMaskedLM", BERT),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "headless": ("GPT2Model", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 headless": ("T5Model", T5),
    "vit": ("ViTForImageClassification", VIT | {"image_size": 8, "num_labels": 3}),
}


def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model folder per kind; tests change copies of it."""
    return {kind: write(make(*case), tmp_path_factory.mktemp("kind")) for kind, case in CASES.items()}


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "model"))


def configure(folder: Path, **entries: Any) -> Path:
    """Change entries of config.json; ``...`` removes an entry."""
    config = json.loads((folder / "config.json").read_text()) | entries
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


def weigh(folder: Path, changes: dict[str, Any]) -> Path:
    """Change tensors of model.safetensors; None removes a tensor."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({k: v.clone() for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


def refused(folder: Any, *parts: str, **options: Any) -> str:
    """Assert that ``load`` fails with a message of one line that contains these parts."""
    with pytest.raises((ValueError, TypeError, OSError)) as caught:
        load(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
    return message
