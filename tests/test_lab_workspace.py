"""The workspace of the lab: opening, saving, restoring and removing models, recordings and runs."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
import torch

from regard import models, watch
from regard.lab import trash as trash_module
from regard.lab import workspace as workspace_module
from regard.lab.cache import Cache
from regard.lab.endpoint import NotFound
from regard.lab.first_recording import ensure_recording
from regard.lab.workspace import Workspace
from regard.nn import Decoder


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory):
    """A lab's folder with one recording."""
    state = tmp_path_factory.mktemp("made")
    workspace = Workspace(state)
    workspace.open(models.bundled())
    ensure_recording(workspace)
    workspace.close()
    return state


def test_recordings_are_open_again_after_a_restart(saved_state, tmp_path):
    state = tmp_path / "state"
    shutil.copytree(saved_state, state)
    workspace = Workspace(state)
    workspace.open(models.bundled())
    [item] = workspace.items("recording")
    assert item.title == "sample text" and item.details["model"] == "bundled-model"
    assert (
        ensure_recording(workspace) is workspace.recording(item.id) and len(workspace.recording(item.id).heads()) == 12
    )
    workspace.close_recording(item.id)
    assert not item.folder.exists()
    with pytest.raises(NotFound):
        workspace.recording(item.id)
    workspace.close()
    assert Workspace(state).items("recording") == []


def test_closing_can_be_undone(saved_state, tmp_path, monkeypatch):
    state = tmp_path / "state"
    shutil.copytree(saved_state, state)
    workspace = Workspace(state)
    workspace.open(models.bundled())
    [item] = workspace.items("recording")
    details = dict(item.details)
    assert workspace.close_recording(item.id) == item.id and not item.folder.exists()
    with pytest.raises(NotFound):
        workspace.reopen("r00000000")
    with pytest.raises(NotFound):
        workspace.reopen("../lab")
    again = workspace.reopen(item.id)
    assert again.title == item.title and again.details == details and len(workspace.recording(item.id).heads()) == 12
    with pytest.raises(NotFound):
        workspace.reopen(item.id)  # it is open
    # Also after a restart, until a day has passed.
    workspace.close_recording(item.id)
    workspace.close()
    second = Workspace(state)
    second.open(models.bundled())
    assert second.items("recording") == [] and second.reopen(item.id).id == item.id
    second.close_recording(item.id)
    second.close()
    later = time.time() + 2 * trash_module.MAX_SECONDS
    monkeypatch.setattr(trash_module.time, "time", lambda: later)
    third = Workspace(state)
    with pytest.raises(NotFound):
        third.reopen(item.id)
    assert not any((state / "trash").iterdir())
    third.close()


def test_the_trash_is_bounded_and_touches_nothing_else(saved_state, tmp_path):
    workspace = Workspace(tmp_path)
    model = workspace.open(models.bundled())
    (tmp_path / "trash" / "notes.json").write_text("somebody else's")
    names = []
    for _ in range(trash_module.MAX_ITEMS + 2):
        name, folder = workspace.new_recording()
        shutil.copytree(next((saved_state / "recordings").iterdir()), folder)
        names.append(workspace.add_recording(name, "text", model).id)
        workspace.close_recording(name)
    assert {file.stem for file in (tmp_path / "trash").glob("r*.json")} <= set(names[2:])
    assert (tmp_path / "trash" / "notes.json").exists()
    (tmp_path / "trash" / f"{names[-1]}.json").write_text('{"kind": "run", "id": 5}')
    with pytest.raises(NotFound, match="damaged"):
        workspace.reopen(names[-1])
    never_begun = workspace.new_run("never begun", "digits")
    workspace.run_started(never_begun, "")
    assert workspace.close_run(never_begun.id) is None  # there is nothing to bring back
    workspace.close()


def test_the_oldest_recordings_are_closed(saved_state, tmp_path, monkeypatch):
    monkeypatch.setitem(workspace_module.MAX_CREATED, "recording", 2)
    workspace = Workspace(tmp_path)
    model = workspace.open(models.bundled())
    names = []
    for _ in range(3):
        name, folder = workspace.new_recording()
        shutil.copytree(next((saved_state / "recordings").iterdir()), folder)
        names.append(workspace.add_recording(name, "text", model).id)
    assert [item.id for item in workspace.items("recording")] == names[1:]
    assert not (tmp_path / "recordings" / names[0]).exists()
    # Whoever still looks at it is told that it can be opened again.
    with pytest.raises(NotFound) as error:
        workspace.recording(names[0])
    assert error.value.reopen == names[0]
    assert workspace.reopen(names[0]).id == names[0] and workspace.recording(names[0]).observations()
    with pytest.raises(NotFound) as error:
        workspace.get("rdeadbeef", "recording")
    assert error.value.reopen is None


def test_a_model_that_was_trained_further_gets_a_new_recording(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models.bundled(), folder)
    workspace = Workspace(tmp_path / "state")
    model = workspace.open(folder)
    ensure_recording(workspace)
    (old,) = workspace.items("recording")
    assert workspace.model_of(old) is model
    os.utime(folder / "model.safetensors", (0, 0))  # as after more training: other files
    assert workspace.model_of(old) is None
    ensure_recording(workspace)
    assert [workspace.model_of(item) for item in workspace.items("recording")] == [None, model]


def test_a_users_own_recording_is_opened_and_never_removed(saved_state, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(next((saved_state / "recordings").iterdir()), own)
    workspace = Workspace(tmp_path / "state")
    item = workspace.open(own)
    assert item.kind == "recording" and item.id == "own" and workspace.open(own) is item
    workspace.close_recording("own")
    assert (own / "recording.json").is_file()


def test_other_folders_are_refused(tmp_path):
    workspace = Workspace(tmp_path / "state")
    with pytest.raises(ValueError, match=r"config\.json"):
        workspace.open(tmp_path)
    with pytest.raises(NotFound, match="no recording 'x' is open"):
        workspace.get("x", "recording")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", "num_mel_bins": 80}))
    with pytest.raises(ValueError, match=r"audio.*regard\.watch"):
        workspace.open(tmp_path)
    assert not workspace.items("model")


def test_a_generation_counts_all_its_tokens(tmp_path):
    model = Decoder(12, heads=3, layers=1, vocab=37).eval()
    cache = model.new_cache()
    with torch.no_grad(), watch(model) as recording:
        for n in (5, 1, 1, 1):
            model(torch.randint(37, (1, n)), cache=cache)
    recording.save(tmp_path / "recording")
    assert Workspace(tmp_path / "state").open(tmp_path / "recording").details["tokens"] == 8


def test_a_cache_drops_the_least_recently_used():
    saved_state = []
    cache = Cache(10)

    def value(name):
        return cache.get(("r", name), lambda x: 4, lambda: saved_state.append(name) or name)

    for name in ("a", "b", "a", "c", "a", "b"):
        assert value(name) == name
    assert saved_state == ["a", "b", "c", "b"]
    cache.drop("r")
    assert value("a") == "a" and saved_state[-1] == "a"


def test_a_failed_computation_can_be_repeated():
    cache = Cache(10)
    with pytest.raises(ValueError):
        cache.get(("r",), lambda x: 1, lambda: int("no"))
    assert not cache._computing
    assert cache.get(("r",), lambda x: 1, lambda: 5) == 5


def test_one_lab_uses_a_folder(saved_state, tmp_path):
    first = Workspace(tmp_path)
    with pytest.raises(ValueError, match="--state"):
        Workspace(tmp_path)
    first.close()
    Workspace(tmp_path).close()


def test_a_damaged_recording_is_left_and_another_one_is_made(saved_state, tmp_path):
    state = tmp_path / "state"
    shutil.copytree(saved_state, state)
    [folder] = (state / "recordings").iterdir()
    (folder / "recording.json").write_text("{}")
    workspace = Workspace(state)
    recording = ensure_recording(workspace, [workspace.open(models.bundled())])
    damaged, item = workspace.items("recording")
    assert recording is workspace.recording(item.id) and damaged.folder == folder and folder.exists()
    assert [folder.name in notice for notice in workspace.to_dict()["notices"]] == [True]


def test_the_first_given_item_is_shown(saved_state, tmp_path):
    """Another model, even of the same name, is recorded; a recording is opened."""
    state, other = tmp_path / "state", tmp_path / "bundled model"
    shutil.copytree(saved_state, state)
    shutil.copytree(models.bundled(), other)
    workspace = Workspace(state)
    [old] = workspace.items("recording")
    model = workspace.open(other)
    assert model.id == old.details["model"] and workspace.model_of(old) is None
    ensure_recording(workspace, [model])
    assert [workspace.model_of(item) for item in workspace.items("recording")] == [None, model]
    own = tmp_path / "own"
    shutil.copytree(old.folder, own)
    opened = workspace.open(own)
    assert ensure_recording(workspace, [opened]) is workspace.recording("own")
    assert "folder" not in str(workspace.to_dict())
