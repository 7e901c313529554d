"""A model has one atlas: from the records of its training, or computed once and stored. Damaged files are replaced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import make, write
from support.model_configs import LLAMA
from torch import nn

from regard import interp, models, training
from regard.interp import _atlas_store as store
from regard.interp._head_atlas import atlas, folder_atlas, is_as_loaded

pytestmark = pytest.mark.usefixtures("full_tiles", "own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without records, that reads bytes."""
    torch.manual_seed(0)
    return write(make("LlamaForCausalLM", LLAMA | {"vocab_size": 256}), tmp_path / "model")


def saved_files() -> list[Path]:
    return sorted(store.cache_folder().glob("*.json"))


def test_the_records_of_a_run_are_the_atlas_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.load(models.bundled())
    monkeypatch.setattr(nn.Module, "__call__", lambda *_: pytest.fail("the model was run"))
    result = interp.atlas(model)
    evolution = training.evolution(models.bundled())
    assert result.source == evolution.source
    assert [row["labels"] for row in result.rows] == evolution.labels[-1] and result.counts == evolution.counts
    for row, types in zip(result.rows, evolution.head_types()[-1], strict=True):
        assert row["kinds"] == types
    data = json.loads(result.to_json())
    assert data["source"] == result.source and data["counts"] == result.counts
    assert result.summary().startswith("types of 12 heads: ")
    assert not saved_files()


def test_records_of_other_weights_are_not_used(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(models.bundled(), folder)
    assert store.stored_atlas(folder) is not None
    model = models.load(folder, dtype=torch.float32)
    with torch.no_grad():
        model.decoder.blocks[0].attention.q_proj.weight.mul_(2)
    model.save(folder)
    assert store.stored_atlas(folder) is None
    # A result that names no step, or records that cannot be read, are no records either.
    for change in ({"best": None}, {"best": {"step": 123}}, {"best": {"step": "6000"}}, {"weights": 3}):
        shutil.copytree(models.bundled(), folder, dirs_exist_ok=True)
        content = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(content | change))
        assert store.recorded_atlas(folder) is None
    shutil.copytree(models.bundled(), folder, dirs_exist_ok=True)
    (folder / "evolution" / "step-00006000.safetensors").write_bytes(b"damaged")
    assert store.recorded_atlas(folder) is None


def test_a_model_is_scored_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed = interp.atlas(models.load(folder))
    assert len(saved_files()) == 1 and "Python" in computed.source
    # The second call neither loads nor runs the model.
    again = folder_atlas(folder, lambda: pytest.fail("the model was loaded"))
    assert again.to_json() == computed.to_json()
    with monkeypatch.context() as patch:
        patch.setattr(interp._head_atlas, "_compute_atlas", lambda *_: pytest.fail("the heads were scored"))
        assert interp.atlas(models.load(folder)).to_json() == computed.to_json()
        assert interp.atlas(models.load(folder, dtype=torch.float32)).to_csv() == computed.to_csv()

    # Other files, other probes or other scoring have another key.
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"changed": True}))
    assert store.stored_atlas(folder) is None
    folder_atlas(folder, lambda: (models.load(folder), None))
    assert len(saved_files()) == 2
    monkeypatch.setattr(store, "SCORING", store.SCORING + 1)
    assert store.stored_atlas(folder) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: text.replace('"labels"', '"names"'),
        lambda text: text.replace('"confidence": ', '"confidence": "x", "y": ', 1),
        lambda text: text.replace('"induction": ', '"telepathy": '),
        lambda text: text.replace('"scoring": 1', '"scoring": 0'),
        lambda text: "[" * 100_000,
        lambda text: "\udcff",
    ],
)
def test_damaged_files_are_ignored_and_rewritten(folder: Path, damage: Any) -> None:
    before = folder_atlas(folder, lambda: (models.load(folder), None))
    (file,) = saved_files()
    whole = file.read_text()
    file.write_text(damage(whole), errors="surrogateescape")
    assert store.stored_atlas(folder) is None
    again = folder_atlas(folder, lambda: (models.load(folder), None))
    assert again.to_json() == before.to_json() and file.read_text() == whole


def test_a_changed_model_is_scored_anew(folder: Path) -> None:
    """Weights, settings, hooks and ablated heads: the stored atlas is that of the files alone."""
    stored = interp.atlas(models.load(folder))

    def check(model: nn.Module, other: bool = True) -> None:
        assert not is_as_loaded(model)
        assert (atlas(model).to_json() != stored.to_json()) == other
        assert len(saved_files()) == 1 and store.stored_atlas(folder).to_json() == stored.to_json()

    model = models.load(folder)
    with torch.no_grad():
        model.decoder.blocks[0].attention.q_proj.weight.mul_(3)
    check(model)
    model = models.load(folder)
    model.decoder.blocks[0].attention.scale = 3.0
    assert not is_as_loaded(model)
    model = models.load(folder)
    handle = model.decoder.blocks[0].register_forward_hook(lambda module, args, out: None)
    check(model, other=False)
    handle.remove()
    assert is_as_loaded(model) and is_as_loaded(model.train())
    with interp.ablate(model, [("decoder.blocks.0.attention", 0)]):
        check(model)
    assert is_as_loaded(model)
    shutil.rmtree(folder)
    assert not is_as_loaded(model)
    assert not is_as_loaded(nn.Linear(2, 2))


def test_options_of_the_user_compute_anew_and_store_nothing(folder: Path) -> None:
    model = models.load(folder)
    for options in ({"text": "a b " * 400}, {"tokens": 12, "block": 3}, {"control": False}, {"stored": False}):
        interp.atlas(model, **options)
    assert not saved_files()


def test_a_cache_that_cannot_be_written(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(store, "cache_folder", lambda: tmp_path / "file" / "inside")
    assert len(interp.atlas(models.load(folder)).rows) == 6


def test_old_files_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST_FILES", 2)
    result = interp.Atlas("model", [])
    for number in range(4):
        store.save_atlas(str(number), result)
    assert len(saved_files()) == 2
