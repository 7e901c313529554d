"""Attention over a sharded sequence equals the single-process operator on the whole one, on 2 and 3 processes.

The ranks are `ring_worker.py`: all cases of one number of ranks run in one start.
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
from support import ring_worker

import regard
from regard import Causal, Observe, Padding, Window
from regard.parallel import _attention as distributed
from regard.parallel._group import Ring
from regard.parallel._shard_layout import Band, rectangles, spans_from_lengths, split_sequence

WORKER = Path(ring_worker.__file__)
FAR = 10**6
BOUND = {"float32": 1e-5, "float64": 1e-12}


def start(mode: str, ranks: int, folder: Path) -> list[subprocess.Popen[str]]:
    env = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, WORKER, mode, str(rank), str(ranks), folder / "store", folder / f"{rank}.json"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit codes and what was printed; nobody is left behind."""
    try:
        said = [process.communicate(timeout=900)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of 2 and of 3 found."""
    folder = tmp_path_factory.mktemp("ring")
    for code, text in finish(start("cases", request.param, folder)):
        assert code == 0, text
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(request.param)]


def test_output_gradients_and_observables_are_those_of_the_whole(ranks: list[dict[str, Any]]) -> None:
    wrong = []
    for rank, found in enumerate(ranks):
        assert len(found["cases"]) == len(ring_worker.cases())
        for case in ring_worker.cases():
            for name, error in found["cases"][case.name].items():
                if not error <= BOUND[str(case.dtype)[6:]]:
                    wrong.append(f"rank {rank}: {name} of {case.name} is off by {error:.2g}")
    assert not wrong, "\n".join(wrong)


def test_refusals_are_one_line_and_name_what_is_refused(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        for what, message in found["refusals"].items():
            assert what in message
            assert "\n" not in message


def test_any_lengths_half_precision_subgroups_and_gather(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        extras = found["extras"]
        assert extras["any lengths"] <= 1e-5
        assert extras["half"] <= 2**-8  # rounded once, at the end
        assert extras["gather's gradient"] <= 1e-12
        assert float(extras["pair"]) <= 1e-5 if rank < 2 else "not a member" in extras["pair"]


def test_a_rank_that_disappears_is_an_error_not_a_hang(tmp_path: Path) -> None:
    (code, text), (left, _) = finish(start("leave", 2, tmp_path))
    assert left == 0
    assert code != 0
    assert "Error" in text


# --- without processes -----------------------------------------------------------------------------------------------


def test_one_process_is_plain_attention() -> None:
    q, k, v = (torch.randn(2, 3, 7, width) for width in (5, 5, 2))
    out, seen = distributed.attention(q, k, v, mask=Causal(), softcap=3.0, observe=Observe(map=3))
    plain, known = regard.attention(q, k, v, mask=Causal(), softcap=3.0, observe=Observe(map=3))
    assert torch.equal(out, plain)
    assert torch.equal(seen.map, known.map)
    assert torch.equal(distributed.attention(q, k, v), regard.attention(q, k, v))
    assert torch.equal(distributed.gather(distributed.shard(q)), q)


def test_one_process_refuses_what_many_would() -> None:
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(ValueError, match=r"Padding\(\[3\]\)"):
        distributed.attention(x, x, x, mask=Padding([3]) & Window(2))
    with pytest.raises(ValueError, match="top"):
        distributed.attention(x, x, x, observe=Observe(top=1))
    with pytest.raises(TypeError, match="observe must be"):
        distributed.attention(x, x, x, observe=3)
    with pytest.raises(ValueError, match="dim is 4"):
        distributed.shard(x, 4)
    with pytest.raises(ValueError, match="not initialised"):
        Ring.from_group(object())


@pytest.mark.parametrize("layout", ["blocks", "zigzag"])
@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("length", [0, 1, 7, 17, 64])
def test_spans_have_every_row_once(layout: str, size: int, length: int) -> None:
    parts = split_sequence(length, size, layout)
    assert sorted(i for own in parts for span in own for i in span) == list(range(length))
    lengths = [sum(map(len, own)) for own in parts]
    assert max(lengths) - min(lengths) <= (1 if layout == "blocks" else 2)
    assert [[i for s in own for i in s] for own in spans_from_lengths(lengths, layout, "rows")] == [
        [i for s in own for i in s] for own in parts
    ]


def work(size: int, length: int, layout: str, band: Band) -> tuple[list[int], int]:
    """Visible pairs by rank, each checked to lie in a rectangle, and how many rectangles there are."""
    parts, found, count = split_sequence(length, size, layout), [], 0
    for mine in parts:
        pairs = 0
        for theirs in parts:
            for part in rectangles(mine, theirs, band):
                lo, hi = part.bounds(band, torch.device("cpu"))
                rows, keys = part.sides
                first = torch.zeros(rows, dtype=torch.int64) if lo is None else lo[0]
                last = torch.full((rows,), keys) if hi is None else hi[0]
                seen = int((last - first).clamp(min=0).sum())
                assert seen > 0  # no rectangle is computed for nothing
                pairs, count = pairs + seen, count + 1
        found.append(pairs)
    return found, count


@pytest.mark.parametrize("size", [2, 3, 5])
def test_zigzag_gives_all_ranks_the_same_causal_work_and_hidden_blocks_are_skipped(size: int) -> None:
    length, causal = 12 * size, Band(-FAR, 0)
    even, _ = work(size, length, "zigzag", causal)
    uneven, computed = work(size, length, "blocks", causal)
    assert len(set(even)) == 1
    assert max(uneven) > 1.5 * min(uneven)
    assert sum(even) == sum(uneven) == length * (length + 1) // 2
    assert computed == size * (size + 1) // 2  # of size²
    _, near = work(size, length, "blocks", Band(-3, 0))
    assert near == 2 * size - 1  # a rank's own block and the end of the one before
    assert work(size, length, "blocks", Band(FAR, FAR)) == ([0] * size, 0)
