"""What a lab has open: models, recordings, runs; what it keeps, and what it finds again."""

from __future__ import annotations

import json
import shutil

import pytest

from regard import models
from regard.lab import lab as rooms
from regard.lab.endpoints import Gone
from regard.lab.first import first_look
from regard.lab.kinds import keep_kinds, known_kinds, stamp
from regard.lab.lab import Cache, Lab


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A lab's folder with one recording."""
    state = tmp_path_factory.mktemp("made")
    lab = Lab(state)
    lab.open(models.bundled())
    first_look(lab)
    lab.close()
    return state


def test_a_lab_started_again_has_its_recordings_open(made, tmp_path):
    state = tmp_path / "state"
    shutil.copytree(made, state)
    lab = Lab(state)
    lab.open(models.bundled())
    [one] = lab.all("recording")
    assert one.title == "sample text" and one.about["model"] == "bundled-model"
    assert first_look(lab) is lab.seen(one.id) and len(lab.seen(one.id).heads()) == 12
    lab.close_recording(one.id)
    assert not one.folder.exists()
    with pytest.raises(Gone):
        lab.seen(one.id)
    lab.close()
    assert Lab(state).all("recording") == []


def test_what_a_list_says_is_not_believed(made, tmp_path):
    """lab.json may be damaged, or name folders that are none of the lab's."""
    outside = tmp_path / "outside"
    shutil.copytree(next((made / "recordings").iterdir()), outside)
    for told in (
        "",
        "[]",
        "{",
        '{"recordings": 5}',
        '{"recordings": [{"id": "../../outside", "title": "", "about": {}}]}',
    ):
        state = tmp_path / "state"
        shutil.rmtree(state, ignore_errors=True)
        shutil.copytree(made, state)
        (state / "lab.json").write_text(told)
        assert Lab(state).all("recording") == []
    assert (outside / "recording.json").is_file()


def test_folders_of_jobs_that_never_ended_are_removed(made, tmp_path):
    state = tmp_path / "state"
    shutil.copytree(made, state)
    (state / "recordings" / "rdeadbeef").mkdir()
    (state / "recordings" / "notes").mkdir()  # somebody else's
    Lab(state)
    assert not (state / "recordings" / "rdeadbeef").exists() and (state / "recordings" / "notes").exists()


def test_the_oldest_recordings_go(made, tmp_path, monkeypatch):
    monkeypatch.setitem(rooms.MADE, "recording", 2)
    lab = Lab(tmp_path)
    model = lab.open(models.bundled())
    names = []
    for _ in range(3):
        name, folder = lab.new_recording()
        shutil.copytree(next((made / "recordings").iterdir()), folder)
        names.append(lab.made(name, "text", model).id)
    assert [one.id for one in lab.all("recording")] == names[1:]
    assert not (tmp_path / "recordings" / names[0]).exists()


def test_a_users_own_recording_is_opened_and_never_removed(made, tmp_path):
    own = tmp_path / "own"
    shutil.copytree(next((made / "recordings").iterdir()), own)
    lab = Lab(tmp_path / "state")
    one = lab.open(own)
    assert one.kind == "recording" and one.id == "own" and lab.open(own) is one
    lab.close_recording("own")
    assert (own / "recording.json").is_file()


def test_what_is_nothing_is_refused(tmp_path):
    lab = Lab(tmp_path / "state")
    with pytest.raises(ValueError, match="no model, recording or run"):
        lab.open(tmp_path)
    with pytest.raises(Gone, match="no recording 'x' is open"):
        lab.get("x", "recording")


def test_kinds_are_those_of_these_very_files(tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models.bundled(), folder)
    lab = Lab(tmp_path / "state")
    model = lab.open(folder)
    assert known_kinds(lab, model) is None
    keep_kinds(lab, stamp(folder), [{"path": "a", "head": 0}])
    assert known_kinds(lab, model) == [{"path": "a", "head": 0}]
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"changed": True}))
    assert known_kinds(lab, model) is None


def test_a_cache_holds_what_was_used_last():
    made = []
    cache = Cache(10)

    def value(name):
        return cache.get(("r", name), lambda x: 4, lambda: made.append(name) or name)

    for name in ("a", "b", "a", "c", "a", "b"):
        assert value(name) == name
    assert made == ["a", "b", "c", "b"]
    cache.drop("r")
    assert value("a") == "a" and made[-1] == "a"


def test_what_cannot_be_made_can_be_tried_again():
    cache = Cache(10)
    with pytest.raises(ValueError):
        cache.get(("r",), lambda x: 1, lambda: int("no"))
    assert not cache._making
    assert cache.get(("r",), lambda x: 1, lambda: 5) == 5


def test_one_lab_uses_a_folder(made, tmp_path):
    first = Lab(tmp_path)
    with pytest.raises(ValueError, match="another lab uses"):
        Lab(tmp_path)
    first.close()
    Lab(tmp_path).close()


def test_a_damaged_recording_is_let_go_and_the_sample_read_again(made, tmp_path):
    state = tmp_path / "state"
    shutil.copytree(made, state)
    [folder] = (state / "recordings").iterdir()
    (folder / "recording.json").write_text("{}")
    lab = Lab(state)
    seen = first_look(lab, [lab.open(models.bundled())])
    [one] = lab.all("recording")
    assert seen is lab.seen(one.id) and one.folder != folder and not folder.exists()


def test_what_was_given_is_what_is_shown(made, tmp_path):
    """Another model, of the same name too, is run; a recording is opened."""
    state, other = tmp_path / "state", tmp_path / "bundled model"
    shutil.copytree(made, state)
    shutil.copytree(models.bundled(), other)
    lab = Lab(state)
    [old] = lab.all("recording")
    model = lab.open(other)
    assert model.id == old.about["model"] and lab.model_of(old) is None
    first_look(lab, [model])
    assert [lab.model_of(one) for one in lab.all("recording")] == [None, model]
    own = tmp_path / "own"
    shutil.copytree(old.folder, own)
    given = lab.open(own)
    assert first_look(lab, [given]) is lab.seen("own")
    assert "folder" not in str(lab.to_dict())
