"""What a lab finds again when it starts: whatever is damaged, nothing that is complete is lost or hidden."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.small_runs import write_run

from regard import models
from regard.lab import jobs, saved_items
from regard.lab.endpoint import NotFound, TooManyRequests
from regard.lab.evolve import endpoints
from regard.lab.first_recording import ensure_recording
from regard.lab.workspace import MAX_CREATED, Workspace

RUNS = ("t00000001", "t00000002", "t00000003")


@pytest.fixture(scope="module")
def saved_state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A lab's folder with one recording and three runs, all listed; the second run has a model."""
    state = tmp_path_factory.mktemp("made")
    workspace = Workspace(state)
    workspace.open(models.bundled())
    ensure_recording(workspace)
    workspace.close()
    for run in RUNS:
        write_run(state / "runs" / run)
    shutil.copytree(models.bundled(), state / "runs" / RUNS[1] / "model", ignore=shutil.ignore_patterns("evolution"))
    listed = json.loads((state / "lab.json").read_text())
    for run in RUNS:
        listed["runs"].append({"id": run, "title": f"title of {run}", "about": {"task": "repeats"}})
    (state / "lab.json").write_text(json.dumps(listed))
    return state


@pytest.fixture
def state(saved_state: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_state, tmp_path / "state"))


def all_files(state: Path) -> set[Path]:
    """The files of recordings and runs."""
    files = set()
    for folder in ("recordings", "runs"):
        files |= {path.relative_to(state) for path in (state / folder).rglob("*") if path.is_file()}
    return files


def restart(state: Path) -> Workspace:
    """Start a lab in a folder, and check that no file is gone, neither now nor after the next start."""
    before = all_files(state)
    for _ in range(2):
        Workspace(state).close()
    assert before <= all_files(state)
    return Workspace(state)


def titles(workspace: Workspace, kind: str) -> list[str]:
    return [item.title for item in workspace.items(kind)]


def test_a_complete_list_gives_no_notice(state: Path) -> None:
    workspace = restart(state)
    assert titles(workspace, "run") == [f"title of {run}" for run in RUNS]
    assert titles(workspace, "recording") == ["sample text"]
    assert workspace.to_dict()["notices"] == [] and not list(state.glob("*.bad*"))
    assert workspace.get(RUNS[1], "run").details["model"]
    workspace.close()


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{", b"null", b"\xff\xfe\x00", b"[" * 100_000, b'{"recordings": 5, "runs": "x"}'],
    ids=["empty", "list", "cut", "null", "bytes", "deep", "types"],
)
def test_a_damaged_list_loses_nothing_and_is_kept(state: Path, content: bytes) -> None:
    (state / "lab.json").write_bytes(content)
    workspace = Workspace(state)
    notices = workspace.to_dict()["notices"]
    workspace.close()
    assert {item.id for item in workspace.items("run")} == set(RUNS)
    [recording] = workspace.items("recording")
    # The text is known from the recording itself.
    assert recording.title.startswith("The iterator returns") and len(workspace.recording(recording.id).heads()) == 12
    assert "lab.json.bad" in notices[0] and "\n" not in "".join(notices)
    assert any(RUNS[0] in notice and "found again" in notice for notice in notices)
    assert (state / "lab.json.bad").read_bytes() == content
    # The next start has nothing to say, and a second damage does not overwrite what was kept.
    again = restart(state)
    assert again.to_dict()["notices"] == [] and {item.id for item in again.items("run")} == set(RUNS)
    again.close()
    (state / "lab.json").write_bytes(b"second")
    third = restart(state)
    assert (state / "lab.json.bad").read_bytes() == content and (state / "lab.json.bad2").read_bytes() == b"second"
    third.close()


@pytest.mark.parametrize(
    "entry",
    [
        {"id": RUNS[0], "about": {}},
        {"id": RUNS[0], "title": 5, "about": {}},
        {"id": RUNS[0], "title": "x", "about": [1]},
        {"id": RUNS[0], "title": "x"},
        {"id": 7, "title": "x", "about": {}},
        {"id": "../../outside", "title": "x", "about": {}},
        "text",
        None,
    ],
)
def test_one_bad_entry_hides_no_other(state: Path, entry: Any) -> None:
    listed = json.loads((state / "lab.json").read_text())
    listed["runs"][0] = entry
    text = json.dumps(listed)
    (state / "lab.json").write_text(text)
    workspace = Workspace(state)
    assert titles(workspace, "recording") == ["sample text"]
    assert [item.id for item in workspace.items("run")] == [RUNS[1], RUNS[2], RUNS[0]]
    assert titles(workspace, "run")[:2] == [f"title of {run}" for run in RUNS[1:]]
    assert any("entry 1 of runs" in notice for notice in workspace.to_dict()["notices"])
    assert (state / "lab.json.bad").read_text() == text
    workspace.close()
    restart(state).close()


@pytest.mark.parametrize("name", ["run.json", "model/config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": 5}', "{}"])
def test_one_damaged_run_hides_no_other(state: Path, name: str, content: str) -> None:
    (state / "runs" / RUNS[1] / name).write_text(content)
    workspace = restart(state)
    assert titles(workspace, "run") == [f"title of {run}" for run in RUNS]
    assert any(RUNS[1] in notice for notice in workspace.notices)
    assert str(state) not in str(workspace.to_dict())
    # The page lists runs, too.
    assert len(endpoints.runs(workspace, None)["runs"]) == len(RUNS)
    workspace.close()


def test_wrong_details_are_left_out(state: Path) -> None:
    listed = json.loads((state / "lab.json").read_text())
    listed["recordings"][0]["about"] |= {"tokens": "many", "model_title": ["x"], "folder": "/etc"}
    (state / "lab.json").write_text(json.dumps(listed))
    workspace = Workspace(state)
    [item] = workspace.items("recording")
    assert not {"tokens", "model_title", "folder"} & set(item.details) and item.title == "sample text"
    workspace.close()


def test_an_unreadable_folder_is_left_and_a_missing_one_is_told(state: Path) -> None:
    (state / "runs" / "t0000000a").mkdir()
    (state / "runs" / "t0000000a" / "metrics.jsonl").write_text('{"step": 1}\n')
    shutil.rmtree(state / "runs" / RUNS[2])
    workspace = Workspace(state)
    notices = workspace.to_dict()["notices"]
    assert any(RUNS[2] in notice and "missing" in notice for notice in notices)
    assert any("t0000000a" in notice and "left as they are" in notice for notice in notices)
    assert (state / "runs" / "t0000000a" / "metrics.jsonl").is_file()
    workspace.close()


def test_only_abandoned_leftovers_are_removed(state: Path) -> None:
    old = time.time() - 2 * saved_items.ABANDONED_SECONDS
    runs = state / "runs"
    abandoned = [runs / "t0000000b", runs / ".writing-t0000000c-12345678", state / "recordings" / "rdeadbeef"]
    kept = [runs / "notes", runs / "t0000000d", state / "recordings" / ".writing-rdeadbee0-12345678"]
    for folder in (*abandoned, *kept):
        folder.mkdir()
    (abandoned[0] / ".run.json.abcdef01").write_text("{")
    (abandoned[1] / "values.safetensors").write_text("half")
    (state / ".lab.json.abcdef01").write_text("{")
    (state / ".notes.abcdef01").write_text("not the lab's")
    for path in (*abandoned, *(file for folder in abandoned for file in folder.iterdir()), *state.glob(".*.abcdef01")):
        os.utime(path, (old, old))
    # The last two of those that stay are young: a process may be writing them.
    os.utime(kept[0], (old, old))
    Workspace(state).close()
    assert [folder.exists() for folder in abandoned] == [False] * 3 and [folder.exists() for folder in kept] == [
        True
    ] * 3
    assert not (state / ".lab.json.abcdef01").exists() and (state / ".notes.abcdef01").exists()


def test_a_list_that_cannot_be_kept_is_not_overwritten(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (state / "lab.json").write_text("damaged")

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved_items, "atomic_write", full)
        with pytest.raises(ValueError, match=r"lab\.json.*No space left"):
            Workspace(state)
    assert (state / "lab.json").read_text() == "damaged"
    Workspace(state).close()  # the folder was released


def test_what_cannot_go_to_the_trash_stays_open(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = Workspace(state)
    before = all_files(state)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    for broken in ("regard.lab.trash.write_text", "pathlib.Path.rename"):
        with monkeypatch.context() as patch:
            patch.setattr(broken, full)
            with pytest.raises(OSError, match="No space left"):
                workspace.close_run(RUNS[0])
            assert workspace.get(RUNS[0], "run") and all_files(state) == before
            # Nor does a new run fail because an old one cannot be closed.
            patch.setitem(MAX_CREATED, "run", 1)
            workspace._close_oldest("run")
        assert any("No space left" in notice for notice in workspace.notices)
    assert workspace.close_run(RUNS[0]) == RUNS[0] and workspace.reopen(RUNS[0]).title == f"title of {RUNS[0]}"
    assert all_files(state) == before
    workspace.close()


def test_trainings_that_start_together_close_only_old_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start closes the oldest run beyond the limit; two of them must not choose the same one, nor a new one."""
    monkeypatch.setattr(jobs._Queue, "_start_thread", lambda self: None)  # nothing runs
    workspace = Workspace(tmp_path)
    for _ in range(MAX_CREATED["run"]):
        run = workspace.new_run("old", "repeats")
        write_run(run.folder)
        workspace.run_started(run, "")

    def start(_: int) -> str:
        barrier.wait()
        response = endpoints.train(workspace, endpoints.TrainRequest(task="repeats", steps=5))
        return str(workspace.get(response["run"], "run").id)

    barrier = threading.Barrier(jobs.MAX_WAITING)
    with ThreadPoolExecutor(jobs.MAX_WAITING) as pool:
        started = list(pool.map(start, range(jobs.MAX_WAITING)))
    assert set(started) <= {item.id for item in workspace.items("run")} and len(set(started)) == jobs.MAX_WAITING
    assert workspace.notices == []
    # One more is too many: it leaves no folder.
    with pytest.raises(TooManyRequests):
        endpoints.train(workspace, endpoints.TrainRequest(task="repeats", steps=5))
    assert {folder.name for folder in (tmp_path / "runs").iterdir()} == {item.id for item in workspace.items("run")}
    workspace.close()


def test_a_run_is_continued_once(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs._Queue, "_start_thread", lambda self: None)  # nothing runs
    workspace = Workspace(state)
    request = endpoints.ContinueRequest(run=RUNS[0])
    assert endpoints.continue_run(workspace, request)["run"] == RUNS[0]
    for refused in (endpoints.continue_run, endpoints.close):
        with pytest.raises(ValueError, match=RUNS[0]):
            refused(workspace, request)
    workspace.close()


def test_a_lab_that_was_killed_while_it_closed_an_item_loses_nothing(state: Path) -> None:
    workspace = Workspace(state)
    listed = (state / "lab.json").read_bytes()
    workspace.close_run(RUNS[0])
    workspace.close()
    # Killed after the move: the list still has it, the trash too.
    (state / "lab.json").write_bytes(listed)
    again = Workspace(state)
    assert again.notices == [] and [item.id for item in again.items("run")] == list(RUNS[1:])
    # Killed by an older version before the description was written: the folder comes back.
    (state / "trash" / f"{RUNS[0]}.json").unlink()
    again.close()
    third = Workspace(state)
    assert {item.id for item in third.items("run")} == set(RUNS)
    with pytest.raises(NotFound):
        third.reopen(RUNS[0])
    third.close()


def test_a_notice_is_on_the_page_until_it_is_dismissed(lab_page: Any, workspace: Workspace) -> None:
    workspace.add_notice("lab.json cannot be read; the file is kept")
    tab = lab_page("?page=claims")
    line = tab.locator("#notes p.notice")
    line.wait_for()
    assert "lab.json cannot be read" in line.inner_text()
    line.get_by_label("dismiss").click()
    line.wait_for(state="detached")
