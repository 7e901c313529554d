"""Ranks that die, are slow or make other calls: forks the ranks of each scenario, and writes how each one ended.

python failing_ranks.py FOLDER SCENARIO …      writes FOLDER/SCENARIO.json: one entry per rank

torch is imported only once; every scenario has its own process group over gloo on the loopback interface.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it at the first operation and the first optimizer: once, not in every rank
import torch.distributed as dist

from regard import Causal, Observe, Window
from regard.parallel import _attention as distributed
from regard.parallel._group import Ring
from regard.training._task import Batch
from regard.training._train import train
from support.tiny_task import QUICK, Tiny

ODD = 1  # the rank that fails or makes another call
PATIENT = 60.0  # a timeout that a busy machine does not reach
SHORT = 3.0
HANG_SECONDS = 120.0  # a scenario that takes longer hangs


def attempt(call: Callable[[], Any]) -> dict[str, Any]:
    """Call a function; return the error that it raised, and how long that took."""
    start = time.monotonic()
    result: dict[str, Any] = {"classes": [], "message": ""}
    try:
        call()
    except Exception as error:
        result["classes"] = [kind.__name__ for kind in type(error).__mro__]
        result["message"] = str(error)
    return result | {"seconds": time.monotonic() - start}


def attend(**options: Any) -> torch.Tensor:
    """One call on the same rows of every rank; ``heads``, ``width``, ``rows`` and ``dtype`` may be changed."""
    sizes = (1, options.pop("heads", 2), options.pop("rows", 6), options.pop("width", 4))
    x = torch.ones(*sizes, dtype=options.pop("dtype", torch.float32), requires_grad=options.pop("gradients", False))
    out = distributed.attention(x, x, x, **options)
    return out[0] if "observe" in options else out


def at_message(number: int, action: Callable[[], None]) -> None:
    """Call ``action`` before this rank sends its keys for the ``number``-th time."""
    original = Ring.pass_on
    count = 0

    def pass_on(self: Ring, *arguments: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == number:
            action()
        return original(self, *arguments)

    Ring.pass_on = pass_on  # type: ignore[method-assign]


def die() -> None:
    """End like a killed process: nothing is closed or written."""
    os._exit(9)


def dies_in_the_ring(rank: int) -> dict[str, Any]:
    if rank == ODD:
        at_message(2, die)
    return {"call": attempt(attend)}


def dies_in_the_backward_pass(rank: int) -> dict[str, Any]:
    if rank == ODD:
        at_message(4, die)  # the first two messages belong to the forward pass of three ranks
    return {"call": attempt(lambda: attend(gradients=True).sum().backward())}


def is_slow(rank: int) -> dict[str, Any]:
    if rank == ODD:
        at_message(1, lambda: time.sleep(2 * SHORT))
    return {"call": attempt(attend)}


def makes_other_calls(rank: int) -> dict[str, Any]:
    """Each entry is one call in which the odd rank differs; after each error the group still works."""
    odd = rank == ODD
    other_calls: dict[str, dict[str, Any]] = {
        "mask": {"mask": Causal()},
        "heads": {"heads": 4},
        "width of q and k": {"width": 5},
        "dtype": {"dtype": torch.float64},
        "scale": {"scale": 2.0},
        "softcap": {"softcap": 3.0},
        "sinks": {"sinks": torch.zeros(2)},
        "layout": {"layout": "blocks"},
        "kernel": {"backend": "reference"},
        "gradients": {"gradients": True},
        "observe": {"observe": Observe(map=3)},
        "queries": {"rows": 7},
        "rank 1 refused its call: layout": {"layout": "stripes"},
        "rank 1 refused its call: mask": {"mask": Window(2) | Causal()},
    }
    results = {}
    for name, options in other_calls.items():
        results[name] = attempt(lambda options=options: attend(**(options if odd else {})))
    queries = [3] if odd else [4]
    results["queries of observe"] = attempt(lambda: attend(observe=Observe(queries=queries)))

    x = torch.ones(2, 6)
    results["operation"] = attempt(attend if odd else lambda: distributed.gather(x, 1))
    results["sizes besides dim"] = attempt(lambda: distributed.gather(torch.ones(2 + odd, 6), 1))
    results["rank 1 refused its call: dim"] = attempt(lambda: distributed.gather(x, 5 if odd else 1))

    # One rank goes back, the others forward again.
    out = attend(gradients=True)
    back_or_forth = (lambda: out.sum().backward()) if odd else (lambda: attend(gradients=True))
    results["backward pass of attention"] = attempt(back_or_forth)
    local = x.clone().requires_grad_()
    whole = distributed.gather(local, 1)
    back_or_forth = (lambda: whole.sum().backward()) if odd else (lambda: distributed.gather(x, 1))
    results["backward pass of gather"] = attempt(back_or_forth)
    results["nothing"] = attempt(attend)
    return results


class Failing(Tiny):
    """The tiny task, with something that happens in one process."""

    at_step: Callable[[int], None] | None = None
    at_preparation: Callable[[], None] | None = None

    def prepare(self) -> None:
        if Failing.at_preparation is not None:
            Failing.at_preparation()

    def batch(self, step: int) -> Batch:
        if Failing.at_step is not None:
            Failing.at_step(step)
        return super().batch(step)


def learn(rank: int, folder: Path, **changes: Any) -> dict[str, Any]:
    settings = QUICK | {"steps": 40, "save": 2, "record": 0.0} | changes
    return {"call": attempt(lambda: train(Failing, folder, settings))}


def learns_with_another_recipe(rank: int) -> dict[str, Any]:
    return learn(rank, Path("recipe"), **({"model.layers": 3} if rank == ODD else {}))


def learns_in_another_folder(rank: int) -> dict[str, Any]:
    return learn(rank, Path("odd" if rank == ODD else "even"))


def first_cannot_prepare(rank: int) -> dict[str, Any]:
    def fail() -> None:
        raise OSError("no data today")

    Failing.at_preparation = fail
    return learn(rank, Path("unprepared"))


def dies_while_learning(rank: int) -> dict[str, Any]:
    if rank == ODD:
        Failing.at_step = lambda step: die() if step == 5 else None
    return learn(rank, Path("died"))


def is_slow_to_learn(rank: int) -> dict[str, Any]:
    if rank == ODD:
        Failing.at_step = lambda step: time.sleep(2 * SHORT) if step == 5 else None
    return learn(rank, Path("slow"))


SCENARIOS: dict[str, tuple[Callable[[int], dict[str, Any]], int, float]] = {
    "dies_in_the_ring": (dies_in_the_ring, 3, PATIENT),
    "dies_in_the_backward_pass": (dies_in_the_backward_pass, 3, PATIENT),
    "is_slow": (is_slow, 3, SHORT),
    "makes_other_calls": (makes_other_calls, 2, PATIENT),
    "learns_with_another_recipe": (learns_with_another_recipe, 2, PATIENT),
    "learns_in_another_folder": (learns_in_another_folder, 2, PATIENT),
    "first_cannot_prepare": (first_cannot_prepare, 2, PATIENT),
    "dies_while_learning": (dies_while_learning, 2, PATIENT),
    "is_slow_to_learn": (is_slow_to_learn, 2, SHORT),
}


def run_rank(scenario: str, rank: int, store: Path, result: Path) -> None:
    """Be one rank: run the scenario, destroy the group, and write how both ended."""
    function, ranks, seconds = SCENARIOS[scenario]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store.absolute()}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=seconds),
    )
    ends = function(rank)
    ends["destroy"] = attempt(dist.destroy_process_group)
    result.write_text(json.dumps(ends))


def run_scenario(scenario: str, folder: Path) -> list[dict[str, Any] | str]:
    """Fork the ranks of a scenario; return how each one ended: its file, "died", or "hangs"."""
    _, ranks, _ = SCENARIOS[scenario]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(scenario, rank, folder / f"{scenario} store", folder / f"{scenario} {rank}.json")
                code = 0
            finally:
                os._exit(code)
        children.append(child)

    ends: list[dict[str, Any] | str] = []
    until = time.monotonic() + HANG_SECONDS
    for rank, child in enumerate(children):
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > until:
                os.kill(child, 9)
                os.waitpid(child, 0)
                break
            time.sleep(0.02)
        file = folder / f"{scenario} {rank}.json"
        ends.append("died")
        if file.exists():
            ends[rank] = json.loads(file.read_text())
        elif time.monotonic() > until:
            ends[rank] = "hangs"
    return ends


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    attend()  # loads the native module before the ranks are forked
    os.chdir(folder)
    for scenario in sys.argv[2:]:
        (folder / f"{scenario}.json").write_text(json.dumps(run_scenario(scenario, folder)))


if __name__ == "__main__":
    main()
