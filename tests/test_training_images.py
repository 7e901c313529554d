"""Pictures as a task: digits and folders, read, split, moved, learned from and saved."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from regard._observables import Observe
from regard.cli.commands import app
from regard.interp import watch
from regard.models import describe, load
from regard.training.image_models.attention_only import AttentionOnly
from regard.training.tasks import image_data as pictures
from regard.training.tasks.digits import DigitsTask


def made(**changes: object) -> DigitsTask:
    task = DigitsTask(DigitsTask.default_recipe.with_changes({"batch": 12, **changes}))
    task.prepare()
    task.open()
    return task


def fresh(task: DigitsTask) -> nn.Module:
    torch.manual_seed(0)
    return task.model().eval()


def test_digits_are_the_file_s_and_a_fifth_is_held_out() -> None:
    task = made()
    assert task.data.pixels.shape == (1797, 1, 8, 8)
    assert int(task.data.held_out.sum()) == 359
    assert task.data.classes.bincount().min() > 170
    assert sum(len(batch["labels"]) for batch in task.held_out_batches()) == 359
    # Every picture of the others comes once an epoch.
    task = made(**{"batch": 719, "data.shift": 0.0, "data.turn": 0.0, "data.zoom": 0.0})
    images = torch.cat([task.batch(step)["images"] for step in (0, 1)])
    wanted = pictures.load_digits().pixels[~pictures.load_digits().held_out].float() / 255 * 2 - 1
    assert (
        sorted(map(tuple, images.flatten(1).tolist())) == sorted(map(tuple, wanted.flatten(1).tolist()))[: len(images)]
    )


def test_attention_alone_is_saved_and_read_back(tmp_path: Path) -> None:
    task = made(**{"model.kind": "attention"})
    model = fresh(task)
    task.save(model, tmp_path)
    back = load(tmp_path)
    assert isinstance(back, AttentionOnly)
    images = task.held_out_batches()[0]["images"][:4]
    with torch.no_grad():
        assert torch.equal(back(images), model(images))
    assert back.labels == [str(i) for i in range(10)]
    assert (tmp_path / "preprocessor_config.json").is_file()
    text = (tmp_path / "config.json").read_text().replace('"heads": 4', '"heads": 3')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="heads"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(text.replace('"heads": 3', '"heads": 4').replace('"d": 64', '"d": 32'))
    with pytest.raises(ValueError, match=r"has shape \[64, 1, 2, 2\], but the config makes it \[32, 1, 2, 2\]"):
        load(tmp_path)


def test_attention_alone_is_looked_at_and_described(tmp_path: Path) -> None:
    task = made(**{"model.kind": "attention"})
    model = fresh(task)
    task.save(model, tmp_path / "model")
    Image.fromarray(task.data.pixels[3, 0].numpy()).save(tmp_path / "three.png")
    back = load(tmp_path / "model")
    given = back.preprocessor(tmp_path / "three.png")
    assert torch.allclose(given, task._select(torch.tensor([3]))[0], atol=1e-6)  # read as it was trained on
    with torch.no_grad():
        logits, seen = back(given, observe=Observe(map=4))
        assert torch.equal(logits, model(given))
        assert torch.equal(model.head(model.pooled(model.hidden_states(given))), logits)
        with watch(back, Observe(map=4)) as other:
            back(given)
    assert list(seen) == list(other) == [f"vit.encoder.blocks.{i}.attention" for i in range(3)]
    for path, part in seen.items():
        assert back.get_submodule(path).heads == 4
        assert torch.equal(part.map, other[path].map)
    assert describe(back).parameters == sum(p.numel() for p in model.parameters())
    assert "FeedForward" not in repr(back)
    with pytest.raises(ValueError, match=r"images have shape \[2, 1, 6, 8\]; this model takes \[batch, 1, 8, 8\]"):
        back(torch.zeros(2, 1, 6, 8))
    run = CliRunner().invoke
    done = run(app, ["look", str(tmp_path / "model"), "--image", str(tmp_path / "three.png"), "--most", "3"])
    assert done.exit_code == 0, done.output
    assert "12 heads of vit.encoder.blocks.*.attention" in done.output
    done = run(app, ["describe", str(tmp_path / "model")])
    assert done.exit_code == 0, done.output
    assert "64: 4 heads × 16" in done.output


def painted(folder: Path, each: int = 20) -> Path:
    draw = np.random.default_rng(0)
    for label, colour in (("blue", 2), ("red", 0)):
        (folder / label).mkdir(parents=True)
        for k in range(each):
            pixels = draw.integers(0, 60, (10, 12, 3), dtype=np.uint8)
            pixels[..., colour] += 150
            Image.fromarray(pixels).save(folder / label / f"{k}.{'png' if k % 2 else 'jpg'}")
        (folder / label / "notes.txt").write_text("no picture")
        (folder / label / "inner.jpeg").mkdir()
    return folder


@pytest.mark.parametrize("kind", ["vit", "attention"])
def test_a_folder_of_pictures_is_learned_from(tmp_path: Path, kind: str) -> None:
    there = painted(tmp_path / "pictures")
    changes = {"data.folder": str(there), "data.size": 6, "data.channels": 3, "batch": 8, "model.kind": kind}
    recipe = DigitsTask.default_recipe.with_changes(changes)
    task = DigitsTask(recipe, tmp_path / "prepared")
    task.prepare()
    task.open()
    assert task.data.labels == ["blue", "red"]
    assert task.data.pixels.shape == (40, 3, 6, 6)
    assert 0 < int(task.data.held_out.sum()) < 20
    assert task.grid == (3, 3)
    batch = task.batch(0)
    assert bool((batch["images"].mean((2, 3)).argmax(-1) == torch.tensor([2, 0])[batch["labels"]]).all())
    # What comes later does not change a run.
    Image.new("RGB", (5, 5)).save(there / "red" / "new.png")
    again = DigitsTask(recipe, tmp_path / "prepared")
    again.prepare()
    again.open()
    assert all(torch.equal(again.batch(0)[name], x) for name, x in batch.items())
    model = fresh(task)
    task.save(model, tmp_path / "model")
    back = load(tmp_path / "model")
    assert back.labels == ["blue", "red"]
    # A file is read as it was trained on.
    files = sorted((there / "blue").glob("*.png")) + sorted((there / "blue").glob("*.jpg"))
    whole = DigitsTask(recipe)
    whole.open()
    found, _ = whole._select(torch.arange(20))
    rows = {tuple(x.flatten().tolist()) for x in (found * 1e4).round()}
    assert {tuple(x.flatten().tolist()) for x in (back.preprocessor(files) * 1e4).round()} == rows


def test_a_folder_may_lie_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    painted(tmp_path / "pictures")
    monkeypatch.setenv("HOME", str(tmp_path))
    task = made(**{"data.folder": "~/pictures", "data.size": 6})
    assert task.data.labels == ["blue", "red"]


def test_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="0 sub-folders"):
        pictures.load_folder(tmp_path, 8, 1)
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
    with pytest.raises(ValueError, match="a has no PNG or JPEG to train on"):
        pictures.load_folder(tmp_path, 8, 1)


def test_without_scikit_learn_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=re.escape("pip install 'regard[train]'")):
        pictures.load_digits()
