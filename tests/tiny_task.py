"""A task that a test can afford: count on by 3, modulo 11; two thousand weights, a millisecond or two a step.

python tiny_task.py RUNS                trains [[folder, changes], …] given as JSON, one after the other
python tiny_task.py slow FOLDER         trains there, and takes longer to prepare than processes wait for each other
python tiny_task.py fork                reads lines of JSON [folder, changes, [step, seconds after it] or null], and
                                        answers each with a line: a process that has torch already forks one run a line
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import models
from regard.training import processes
from regard.training.checkpoints import Checkpoints
from regard.training.loop import Listener
from regard.training.recipe import Recipe
from regard.training.task import Batch, Task, drawn
from regard.training.train import train
from regard.watching.probes import Probe

WORDS, LENGTH = 11, 7
QUICK = {"steps": 12, "evaluate": 4, "save": 3}


class Heard(Listener):
    """Writes down what it is told, and may do something at a step."""

    def __init__(self, at: int = -1, what: Any = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.at, self.what = at, what

    def learned(self, step: int, numbers: dict[str, float]) -> None:
        self.events.append(("learned", step))
        if step == self.at:
            self.what()

    def scored(self, step: int, scores: dict[str, float], best: bool) -> None:
        self.events.append(("scored", step))

    def saved(self, step: int) -> None:
        self.events.append(("saved", step))

    def recorded(self, step: int) -> None:
        self.events.append(("recorded", step))

    def steps(self, what: str) -> list[int]:
        return [step for event, step in self.events if event == what]


class Tiny(Task):
    name = "tiny"
    about = "count on by 3"
    score, higher = "accuracy", True
    recipe = Recipe(
        "tiny",
        steps=40,
        batch=12,
        rate=1e-2,
        warmup=5,
        evaluate=10,
        save=10,
        model={"layers": 2, "dropout": 0.1},
        data={"noise": 0.1},
    )

    def model(self) -> nn.Module:
        model = models.create(
            {
                "model_type": "gpt2",
                "architectures": ["GPT2LMHeadModel"],
                "vocab_size": WORDS,
                "n_embd": 8,
                "n_head": 2,
                "n_positions": 64,
                "n_layer": self.given.model["layers"],
                **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), self.given.model["dropout"]),
            }
        )
        return model

    def batch(self, step: int) -> Batch:
        return self._examples(drawn(self.given.seed, 3, step), self.given.batch)

    def count(self, batch: Batch) -> int:
        return batch["ids"].shape[0] * (LENGTH - 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["ids"][:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="sum")

    def checks(self) -> Sequence[Batch]:
        return [self._examples(drawn(5, k), 5) for k in range(2)] + [self._examples(drawn(5, 9), 1)]

    def check(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        right = model(batch["ids"][:, :-1]).argmax(-1) == batch["ids"][:, 1:]
        return {"loss": float(self.loss(model, batch)), "right": float(right.sum()), "of": float(right.numel())}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["of"], "accuracy": sums["right"] / sums["of"]}

    def probes(self) -> Sequence[Probe]:
        ids = self._examples(drawn(5, 11), 4)["ids"]
        return [Probe("natural", ids, torch.arange(LENGTH) == 0)]

    def _examples(self, draw: torch.Generator, many: int) -> Batch:
        start = torch.randint(WORDS, (many, 1), generator=draw)
        wrong = torch.rand(many, LENGTH, generator=draw) < self.given.data["noise"]
        return {"ids": (start + 3 * torch.arange(LENGTH) + wrong) % WORDS}


def digest(folder: str | Path) -> str:
    """Of the last checkpoint's weights and of what the optimizer remembers, bit for bit."""
    found = Checkpoints(Path(folder) / "checkpoints").newest()
    assert found is not None
    whole = hashlib.sha256(str(found.state["step"]).encode())
    for tensors in (found.weights, found.moments):
        for name in sorted(tensors):
            whole.update(name.encode() + tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


class Telling(Listener):
    """Says each step to whoever reads the other end of a pipe, as soon as it is done."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def learned(self, step: int, numbers: dict[str, float]) -> None:
        os.write(self.pipe, b"x")


def _forked(folder: str, changes: dict[str, Any], moment: tuple[int, float] | None) -> int:
    """One run in a child, killed with −9 some seconds after a step; its exit code, negative for a signal."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            train(Tiny, folder, changes, listener=Telling(writes))
            code = 0
        finally:
            os._exit(code)
    os.close(writes)
    if moment is not None:
        for _ in range(moment[0]):
            os.read(reads, 1)
        time.sleep(moment[1])
        os.kill(child, signal.SIGKILL)
    while os.read(reads, 4096):  # a pipe that is full would stop the child
        pass
    os.close(reads)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    if sys.argv[1] == "fork":
        import tensorboard.compat.proto.event_pb2
        import tensorboard.summary.writer.record_writer  # noqa: F401 (once, not in every child)

        for line in sys.stdin:
            print(_forked(*json.loads(line)), flush=True)
    elif sys.argv[1] == "slow":
        processes.PATIENCE = 3  # seconds

        class Slow(Tiny):
            def prepare(self) -> None:
                time.sleep(8)

        train(Slow, Path(sys.argv[2]) / "run", QUICK)
    else:
        torch.set_num_threads(1)
        try:
            for folder, changes in json.loads(sys.argv[1]):
                train(Tiny, folder, changes)
        except (OSError, RuntimeError, ValueError) as error:
            sys.exit(f"tiny: {error}")
