"""A rank that dies, is slow or makes another call: every rank ends with one line, and none hangs.

The ranks are those of `support/failing_ranks.py`. Times are compared only with limits that a busy machine keeps.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support import failing_ranks
from support.failing_ranks import HANG_SECONDS, ODD

from regard._errors import RankError, RegardError
from regard.parallel._group import Ring, _describe_difference, _read_call, describe_lost_rank, name_lost_ranks
from regard.training._checkpoints import Checkpoints
from regard.training._processes import Processes

RING = ("dies_in_the_ring", "dies_in_the_backward_pass", "is_slow", "makes_other_calls")
TRAINING = tuple(name for name in failing_ranks.SCENARIOS if name not in RING)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the results of all scenarios."""
    folder = tmp_path_factory.mktemp("failures")
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, failing_ranks.__file__, folder, *RING, *TRAINING]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=len(command) * HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return folder


def ends(folder: Path, scenario: str) -> list[Any]:
    return json.loads((folder / f"{scenario}.json").read_text())


def check_one_line(end: dict[str, Any], kind: type[Exception]) -> str:
    """The call raised this class, in one line; destroying the group afterwards neither raises nor waits."""
    message = end["call"]["message"]
    assert kind.__name__ in end["call"]["classes"], message
    assert message and "\n" not in message
    assert end["destroy"]["classes"] == []
    return message


@pytest.mark.parametrize("scenario", ["dies_in_the_ring", "dies_in_the_backward_pass"])
def test_a_rank_that_dies_in_the_ring_ends_the_others(folder: Path, scenario: str) -> None:
    for rank, end in enumerate(ends(folder, scenario)):
        if rank == ODD:
            assert end == "died"
        else:
            assert "lost" in check_one_line(end, RankError)


def test_a_rank_slower_than_the_timeout_ends_all_and_itself(folder: Path) -> None:
    messages = [check_one_line(end, RankError) for end in ends(folder, "is_slow")]
    # Whoever waits longest names the timeout; its neighbours may see its end first.
    assert any("3 s (the timeout)" in message for message in messages)


def test_every_rank_names_the_option_in_which_the_calls_differ(folder: Path) -> None:
    for rank, end in enumerate(ends(folder, "makes_other_calls")):
        assert end.pop("nothing")["classes"] == []  # after an agreed refusal the group still works
        assert end.pop("destroy")["classes"] == []
        assert len(end) > 15
        for what, result in end.items():
            assert "RegardError" in result["classes"], what
            assert "\n" not in result["message"]
            # The rank with the wrong argument raises its own error, without its number.
            expected = what.rpartition(": ")[2] if rank == ODD else what
            assert expected in result["message"]


@pytest.mark.parametrize(("scenario", "name"), [("recipe", "model.layers"), ("folder", "folder")])
def test_processes_with_other_settings_do_not_begin(folder: Path, scenario: str, name: str) -> None:
    how = {"recipe": "learns_with_another_recipe", "folder": "learns_in_another_folder"}[scenario]
    for end in ends(folder, how):
        assert f"{name} is" in check_one_line(end, RegardError)


def test_if_the_first_process_fails_the_others_do_not_wait(folder: Path) -> None:
    first, other = ends(folder, "first_cannot_prepare")
    assert "no data today" in check_one_line(first, OSError)
    assert "the first process failed" in check_one_line(other, RankError)


def test_a_process_that_dies_in_training_ends_the_others_with_the_checkpoint(folder: Path) -> None:
    other, dead = ends(folder, "dies_while_learning")
    assert dead == "died"
    message = check_one_line(other, RankError)
    assert "lost" in message and "the same command resumes" in message
    assert Checkpoints(folder / "died" / "checkpoints").steps()[-1] == 4


def test_a_slow_process_ends_training_within_the_timeout(folder: Path) -> None:
    patient, slow = ends(folder, "is_slow_to_learn")
    assert "3 s (the timeout)" in check_one_line(patient, RankError)
    check_one_line(slow, RankError)
    assert Checkpoints(folder / "slow" / "checkpoints").steps()[-1] == 4


# --- without processes -----------------------------------------------------------------------------------------------


def test_a_timeout_out_of_range_is_refused() -> None:
    for seconds in (0, -3, 0.5, float("nan"), 1e9, "long"):
        with pytest.raises(RegardError, match="timeout"):
            Processes.current(seconds)


def test_only_errors_about_other_processes_are_renamed() -> None:
    assert describe_lost_rank(RuntimeError("the loss is nan")) is None
    text = "[pair.cc:553]\nConnection closed by peer"
    assert "lost" in str(describe_lost_rank(RuntimeError(text)))
    assert issubclass(RankError, RegardError) and issubclass(RankError, RuntimeError)


def test_the_messages_of_a_group_of_one_rank(tmp_path: Path) -> None:
    device = torch.device("cpu")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        ring = Ring.from_group(None)
        assert ring.agree({"operation": "attention", "heads": 3}, [5, 7], device) == [[5, 7]]
        with pytest.raises(RegardError, match="rank 0 refused its call: heads"):
            ring._exchange({"refusal": "heads is 0; it must be at least 1"}, [], device)
        x = torch.ones(3)
        ring.sum_over_all(x)
        assert torch.equal(x, torch.ones(3))
    finally:
        dist.destroy_process_group()


def test_an_error_of_torch_becomes_one_line_and_others_stay() -> None:
    with pytest.raises(RankError, match=r"within 5 s \(the timeout\)"), name_lost_ranks():
        raise RuntimeError("[buffer.cc:78] Timed out waiting 5000ms\nfor recv operation to complete")
    with pytest.raises(RuntimeError, match="the loss") as caught, name_lost_ranks():
        raise RuntimeError("the loss is nan")
    assert not isinstance(caught.value, RankError)


def test_a_call_that_was_too_long_to_be_sent_whole_is_described() -> None:
    cut = _read_call(b'{"operation": "attention", "mask": "Caus')
    text = _describe_difference([cut, {"operation": "gather"}])
    assert "Caus" in text and "rank 0" in text
    assert "\n" not in text
