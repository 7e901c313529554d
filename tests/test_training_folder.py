"""The folder of a run: what is refused, taken over, removed and passed over there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_task import QUICK, Heard, Tiny, digest

from regard.interp._records import list_records
from regard.training._checkpoints import Checkpoints
from regard.training._train import load_trained_model, train


def test_a_recipe_that_the_task_refuses_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a share from 0 to 1"):
        train("text", tmp_path / "run", {"data.quoted": 2.0})
    assert not (tmp_path / "run").exists()


def test_folders_that_are_not_this_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("dear")
    with pytest.raises(FileExistsError, match="is not a run"):
        train(Tiny, tmp_path / "other", QUICK)
    train(Tiny, tmp_path / "run", QUICK)
    with pytest.raises(ValueError, match=r"steps = 12.*steps = 14"):
        train(Tiny, tmp_path / "run", QUICK | {"steps": 14})
    with pytest.raises(ValueError, match=r"model.layers = 2.*model.layers = 1"):
        train(Tiny, tmp_path / "run", QUICK | {"model.layers": 1})
    train(Tiny, tmp_path / "run", QUICK | {"keep": 3})
    with pytest.raises(FileNotFoundError, match="is not a run"):
        load_trained_model(tmp_path / "other")
    with pytest.raises(ValueError, match="step is 1, "):
        load_trained_model(tmp_path / "run", 1, task=Tiny)
    with pytest.raises(ValueError, match="task is 'tiny'"):
        load_trained_model(tmp_path / "run")


def test_a_mistake_costs_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads"):
        train("agreement", tmp_path, {"model.heads": 3})
    assert train(Tiny, tmp_path, QUICK).ended == "steps"
    assert (tmp_path / "recipe.toml").read_text() == Tiny.default_recipe.with_changes(QUICK).to_toml()


def test_what_was_half_written_is_removed(tmp_path: Path) -> None:
    left = [tmp_path / name for name in (".lock", ".run.json.a1b20c3d", ".metrics.jsonl.c3d40e5f", ".notes.txt")]
    left += [tmp_path / "checkpoints" / ".writing-x" / "weights.safetensors"]
    for file in left:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("half")
    (tmp_path / "checkpoints" / ".writing-x" / "weights.safetensors").rename(tmp_path / ".recipe.toml.d4e50f6a")
    shutil.rmtree(tmp_path / "checkpoints")
    train(Tiny, tmp_path, QUICK)
    # The hidden file is the user's own.
    assert sorted(file.name for file in tmp_path.glob(".*")) == [".lock", ".notes.txt"]


def test_two_runs_in_one_folder_are_kept_apart(tmp_path: Path) -> None:
    said = []

    def again() -> None:
        with pytest.raises(BlockingIOError, match="another process is training in"):
            train(Tiny, tmp_path, QUICK)
        said.append(True)

    train(Tiny, tmp_path, QUICK, listener=Heard(4, again))
    assert said


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="run cannot be written: Not a directory; there is no checkpoint yet"):
        train(Tiny, tmp_path / "file" / "run", QUICK)


def test_a_checkpoint_that_cannot_be_read_is_passed_over(tmp_path: Path) -> None:
    train(Tiny, tmp_path / "whole", QUICK)
    keeping = QUICK | {"keep": 4, "save": 1}
    train(Tiny, tmp_path / "run", keeping)
    (tmp_path / "run" / "checkpoints" / "step-00000012" / "weights.safetensors").write_bytes(b"short")
    (tmp_path / "run" / "checkpoints" / "step-00000011" / "state.json").write_text('{"step": 11}')
    with pytest.warns(UserWarning, match="is not a complete checkpoint"):
        # Stopped after the first step of those that are done again: what could not be read must not count as newest.
        train(Tiny, tmp_path / "run", QUICK | {"save": 1}, listener=Heard(11, lambda: os.kill(os.getpid(), 2)))
    assert Checkpoints(tmp_path / "run" / "checkpoints").read_newest() is not None
    train(Tiny, tmp_path / "run", QUICK)
    assert digest(tmp_path / "run") == digest(tmp_path / "whole")


def test_no_checkpoint_that_can_be_read_is_an_error(tmp_path: Path) -> None:
    train(Tiny, tmp_path, QUICK)
    for file in (tmp_path / "checkpoints").glob("*/state.json"):
        file.write_text("[]")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="is not a complete checkpoint"):
        train(Tiny, tmp_path, QUICK)


def test_a_resumed_run_that_fails_has_removed_nothing(tmp_path: Path) -> None:
    """Its newest checkpoint is damaged, and the run diverges after the one before: both and all records stay."""
    train(Tiny, tmp_path, QUICK | {"keep": 4, "record": 1})
    newest = tmp_path / "checkpoints" / "step-00000012"
    (newest / "weights.safetensors").write_bytes(b"short")
    older = tmp_path / "checkpoints" / "step-00000009" / "weights.safetensors"
    save_file({name: x * 1e30 for name, x in load_file(older).items()}, older)
    names = files_of(tmp_path)
    assert any(name.startswith("evolution/step-00000012") for name in names)
    with pytest.warns(UserWarning, match="is not a complete checkpoint"), pytest.raises(RuntimeError, match="diverged"):
        train(Tiny, tmp_path, QUICK | {"keep": 4, "record": 1})
    assert not names - files_of(tmp_path)


def test_records_after_the_checkpoint_stay_until_the_next_one(tmp_path: Path) -> None:
    changes = QUICK | {"record": 1, "record_every": 1, "keep": 4}
    train(Tiny, tmp_path, changes)
    (tmp_path / "checkpoints" / "step-00000012" / "state.json").write_text("{}")
    other = changes | {"record_every": 5}
    seen = []
    listener = Heard(10, lambda: seen.extend(list_records(tmp_path / "evolution")))
    with pytest.warns(UserWarning, match="is not a complete checkpoint"):
        train(Tiny, tmp_path, other, listener=listener)
    assert seen == list(range(13))
    # The run resumed at step 9; of the later records, those of this run are left.
    recorded = [*range(10), *listener.steps("recorded"), 12]
    assert list(list_records(tmp_path / "evolution")) == sorted(set(recorded))


def test_a_checkpoint_is_replaced_only_by_a_complete_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path)
    state = {"step": 3, "waited": 0, "seconds": 0, "last": {}, "best": None}
    checkpoints.write(state, {"w": torch.zeros(2)}, {})
    checkpoints.write(state | {"seconds": 1}, {"w": torch.ones(2)}, {})
    assert checkpoints.read(3).state["seconds"] == 1
    rename = Path.rename

    def fails_at_the_end(self: Path, target: Path) -> Path:
        if self.name.endswith("-replaced") or target.name.endswith("-replaced"):
            return rename(self, target)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "rename", fails_at_the_end)
    with pytest.raises(OSError, match="step 3 cannot be written: No space"):
        checkpoints.write(state | {"seconds": 2}, {"w": torch.ones(2)}, {})
    assert checkpoints.read(3).state["seconds"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def files_of(folder: Path) -> set[str]:
    """The names of all files of a folder and its subfolders."""
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
