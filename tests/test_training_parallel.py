"""Two processes of torchrun learn what one learns; when one is killed the other says so, and the run goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support import tasks_worker, tiny_task
from support.tiny_task import QUICK, Tiny

from regard.training._checkpoints import Checkpoints
from regard.training._evolution import evolution
from regard.training._metrics_file import read_metrics
from regard.training._processes import Processes
from regard.training._train import train

SAME = QUICK | {"steps": 30, "model.dropout": 0.0, "record": 1.0, "evaluate": 5}
CASES = {
    "ddp": SAME,
    "ddp in pieces": SAME | {"accumulate": 3},
    "fsdp": SAME | {"parallel": "fsdp"},
    "fsdp in pieces": SAME | {"parallel": "fsdp", "accumulate": 2},
    "fsdp bfloat16": SAME | {"parallel": "fsdp", "precision": "bfloat16"},
}


def torchrun(runs: list[Any]) -> subprocess.Popen[str]:
    return processes(2, tiny_task.__file__, json.dumps(runs))


def processes(many: int, *given: object, options: Sequence[object] = ()) -> subprocess.Popen[str]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(many)]
    return subprocess.Popen(
        [*command, *map(str, options), *map(str, given)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All cases, by two processes; and one process alone."""
    folder = tmp_path_factory.mktemp("runs")
    process = torchrun([[str(folder / name), changes] for name, changes in CASES.items()])
    said, _ = process.communicate(timeout=300)
    assert process.returncode == 0, said
    train(Tiny, folder / "alone", SAME)
    train(Tiny, folder / "alone bfloat16", SAME | {"precision": "bfloat16"})
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_end_with_the_loss_of_one(runs: Path, case: str) -> None:
    alone = "alone bfloat16" if "bfloat16" in case else "alone"
    ours, theirs = (read_metrics(runs / name / "metrics.jsonl") for name in (case, alone))
    assert [x["step"] for x in ours] == [x["step"] for x in theirs]
    bound = 5e-3 if "bfloat16" in case else 1e-4
    for x, y in zip(ours, theirs, strict=True):
        assert x["loss"] == pytest.approx(y["loss"], abs=bound), x
    assert ours[-1]["held_out"] and ours[-1]["accuracy"] == pytest.approx(theirs[-1]["accuracy"], abs=bound)


@pytest.mark.parametrize("case", ["ddp", "fsdp"])
def test_what_heads_did_is_that_of_one_process(runs: Path, case: str) -> None:
    ours, theirs = evolution(runs / case), evolution(runs / "alone")
    assert ours.steps == theirs.steps and ours.steps[0] == 0 and ours.steps[-1] == 30
    for name in ("entropy", "distance", "spread"):
        torch.testing.assert_close(ours.value(name), theirs.value(name), rtol=1e-3, atol=1e-4)


def test_a_sharded_runs_checkpoint_is_whole_and_goes_on_alone(runs: Path) -> None:
    found = Checkpoints(runs / "fsdp" / "checkpoints").read_newest()
    assert found is not None
    shapes = {name: p.shape for name, p in Tiny(Tiny.default_recipe).model().named_parameters()}
    assert {name: x.shape for name, x in found.weights.items()} == shapes
    assert {name.rpartition(".")[0] for name in found.optimizer_state} == set(shapes)
    assert train(Tiny, runs / "fsdp", CASES["fsdp"]).ended == "steps"


def test_a_killed_worker_ends_the_other_with_a_clear_error_and_the_run_goes_on(tmp_path: Path) -> None:
    # So many steps that a fast machine does not reach the end before the worker is killed.
    changes = SAME | {"steps": 100_000, "save": 5, "record": 0.0, "evaluate": 100}
    process = torchrun([[str(tmp_path / "run"), changes]])
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        until = time.monotonic() + 120
        while not (Checkpoints(tmp_path / "run" / "checkpoints").steps() and metrics.exists()):
            assert process.poll() is None and time.monotonic() < until, process.communicate()[0]
            time.sleep(0.05)
        killed = time.monotonic()
        os.kill(_worker(process.pid, rank=1), signal.SIGKILL)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert time.monotonic() - killed < 60 and process.returncode != 0
    assert "tiny: another process of the group was lost" in said, said
    assert "the last checkpoint is" in said and "the same command resumes" in said
    step = Checkpoints(tmp_path / "run" / "checkpoints").steps()[-1]
    assert 0 < step < 100_000
    # On with one process; a run of as many steps would take minutes, so it is stopped soon.
    heard: list[int] = []

    class Soon(tiny_task.Tiny):
        def batch(self, at: int) -> Any:
            heard.append(at)
            assert len(heard) < 100, "the signal did not stop the run"
            if len(heard) == 3:
                os.kill(os.getpid(), signal.SIGINT)
            return super().batch(at)

    result = train(Soon, tmp_path / "run", changes)
    assert result.ended == "stopped" and heard[0] == step and result.steps > step


@pytest.mark.full
def test_the_command_prints_one_line_in_each_process_if_one_is_too_slow(tmp_path: Path) -> None:
    options = ("--redirects", "3", "--log-dir", tmp_path / "log")
    settings = ("--set", "steps=100000", "--set", "save=5", "--set", "record=0", "--set", "data.checks=8")
    command = ("-m", "regard", "train", "repeats", "--out", tmp_path / "run", "--timeout", "5", *settings)
    process = processes(2, *command, options=options)
    until = time.monotonic() + 300

    def wait_until(condition: Any) -> None:
        while not condition():
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)

    def errors(rank: int) -> str:
        return "".join(file.read_text() for file in (tmp_path / "log").glob(f"*/attempt_0/{rank}/stderr.log"))

    try:
        wait_until(lambda: Checkpoints(tmp_path / "run" / "checkpoints").steps())
        slow = _worker(process.pid, rank=1)
        os.kill(slow, signal.SIGSTOP)
        wait_until(lambda: "regard: " in errors(0))
        os.kill(slow, signal.SIGCONT)
        process.communicate(timeout=200)
    finally:
        process.kill()
    assert "did not answer within 5 s" in errors(0).splitlines()[-1]
    for rank in (0, 1):
        assert "Traceback" not in errors(rank)
        assert errors(rank).splitlines()[-1].startswith("regard: another process of the group")
        assert "the last checkpoint is" in errors(rank).splitlines()[-1]


@pytest.mark.full
def test_every_task_goes_on_in_three_processes_as_in_one(tmp_path: Path) -> None:
    """Uneven parts of a batch of 7, shared tables (T5), tied embeddings, pictures; stopped at step 3, and resumed."""
    words = "the cat sat on the mat and looked at the hat of the man who had a bat\n\n"
    (tmp_path / "text.txt").write_text("".join(f"{k} {words}" for k in range(400)))
    process = processes(3, tasks_worker.__file__, tmp_path)
    said, _ = process.communicate(timeout=900)
    assert process.returncode == 0, said
    for name in tasks_worker.TASKS:
        alone = tmp_path / "alone" / name
        train(name.split()[0], alone, tasks_worker.changes(name, tmp_path, "ddp"))
        for how in ("ddp", "fsdp"):
            ours, theirs = (read_metrics(folder / "metrics.jsonl") for folder in (tmp_path / how / name, alone))
            assert [x["step"] for x in ours] == [x["step"] for x in theirs]
            for x, y in zip(ours, theirs, strict=True):
                assert x["loss"] == pytest.approx(y["loss"], abs=1e-4), (how, name)
            seen, known = evolution(tmp_path / how / name), evolution(alone)
            assert seen.steps == known.steps
            for value in ("entropy", "distance"):
                torch.testing.assert_close(seen.value(value), known.value(value), rtol=1e-3, atol=1e-3, equal_nan=True)


def test_others_wait_for_data_as_long_as_it_takes(tmp_path: Path) -> None:
    """Preparing may take longer than processes wait for each other in a step."""
    process = processes(2, tiny_task.__file__, "slow", tmp_path)
    said, _ = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert (tmp_path / "run" / "result.json").is_file()


def _worker(agent: int, rank: int) -> int:
    """The process that torchrun started for a rank."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            env = (stat.parent / "environ").read_bytes().split(b"\0") if parent == agent else []
        except OSError:
            continue  # it has ended meanwhile
        if f"RANK={rank}".encode() in env:
            return int(stat.parent.name)
    raise AssertionError(f"torchrun has no worker of rank {rank}")


def test_examples_are_dealt_out_whole() -> None:
    batch = {"x": torch.arange(7), "y": torch.arange(14).reshape(7, 2)}
    parts = [Processes(rank, 3).select(batch) for rank in range(3)]
    assert sorted(torch.cat([part["x"] for part, _ in parts]).tolist()) == list(range(7))
    assert all(weight == 1.0 for _, weight in parts)
    few, weight = Processes(2, 3).select({"x": torch.arange(2)})
    assert weight == 0.0 and few["x"].tolist() == [0]


def test_fewer_examples_than_processes_are_refused(tmp_path: Path) -> None:
    from regard.training._loop import Listener, Loop
    from regard.training._run_folder import RunFolder

    recipe = Tiny.default_recipe.with_changes({"batch": 4, "accumulate": 2})
    with RunFolder(tmp_path, recipe) as folder, pytest.raises(ValueError, match="3 processes"):
        Loop(Tiny(recipe), folder, Processes(0, 3), Listener())


def test_words_that_torchrun_would_not_set_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank, world in (("first", "2"), ("2", "2"), ("5", "1"), ("-1", "2")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", world)
        with pytest.raises(ValueError, match=f"RANK is '{rank}' and WORLD_SIZE '{world}'"):
            Processes.current()
