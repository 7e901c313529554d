"""A tiny task for fast tests: continue a sequence in steps of 3, modulo 11; 2,000 weights, 1 or 2 ms per step.

python tiny_task.py RUNS                trains [[folder, changes], …], given as JSON, one after the other
python tiny_task.py slow FOLDER         trains with a preparation that takes longer than processes wait for each other
python tiny_task.py fork                reads lines of JSON [folder, changes, [step, seconds after it] or null], forks
                                        one run per line (torch is imported only once), and prints its exit code
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
from regard.interp._probes import Probe
from regard.training._checkpoints import Checkpoints
from regard.training._loop import Listener
from regard.training._recipe import Recipe
from regard.training._task import Batch, Task, seeded_generator
from regard.training._train import train

WORDS, LENGTH = 11, 7
QUICK = {"steps": 12, "evaluate": 4, "save": 3}


class Heard(Listener):
    """Stores all events, and may call a function at one step."""

    def __init__(self, at: int = -1, what: Any = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.at, self.what = at, what

    def on_step(self, step: int, numbers: dict[str, float]) -> None:
        self.events.append(("learned", step))
        if step == self.at:
            self.what()

    def on_evaluation(self, step: int, scores: dict[str, float], best: bool) -> None:
        self.events.append(("scored", step))

    def on_checkpoint(self, step: int) -> None:
        self.events.append(("saved", step))

    def on_record(self, step: int) -> None:
        self.events.append(("recorded", step))

    def steps(self, what: str) -> list[int]:
        return [step for event, step in self.events if event == what]


class Tiny(Task):
    name = "tiny"
    description = "count on by 3"
    score, higher_is_better = "accuracy", True
    default_recipe = Recipe(
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
                "n_layer": self.recipe.model["layers"],
                **dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), self.recipe.model["dropout"]),
            }
        )
        return model

    def batch(self, step: int) -> Batch:
        return self._examples(seeded_generator(self.recipe.seed, 3, step), self.recipe.batch)

    def count_predictions(self, batch: Batch) -> int:
        return batch["ids"].shape[0] * (LENGTH - 1)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(batch["ids"][:, :-1]).float()
        return F.cross_entropy(logits.flatten(0, 1), batch["ids"][:, 1:].flatten(), reduction="sum")

    def held_out_batches(self) -> Sequence[Batch]:
        return [self._examples(seeded_generator(5, k), 5) for k in range(2)] + [
            self._examples(seeded_generator(5, 9), 1)
        ]

    def evaluate_batch(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        right = model(batch["ids"][:, :-1]).argmax(-1) == batch["ids"][:, 1:]
        return {"loss": float(self.loss(model, batch)), "right": float(right.sum()), "of": float(right.numel())}

    def scores(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": sums["loss"] / sums["of"], "accuracy": sums["right"] / sums["of"]}

    def probes(self) -> Sequence[Probe]:
        ids = self._examples(seeded_generator(5, 11), 4)["ids"]
        return [Probe("natural", ids, torch.arange(LENGTH) == 0)]

    def _examples(self, draw: torch.Generator, many: int) -> Batch:
        start = torch.randint(WORDS, (many, 1), generator=draw)
        wrong = torch.rand(many, LENGTH, generator=draw) < self.recipe.data["noise"]
        return {"ids": (start + 3 * torch.arange(LENGTH) + wrong) % WORDS}


def digest(folder: str | Path) -> str:
    """A digest of all bits of the weights and the optimizer state in the newest checkpoint."""
    checkpoint = Checkpoints(Path(folder) / "checkpoints").read_newest()
    assert checkpoint is not None
    whole = hashlib.sha256(str(checkpoint.state["step"]).encode())
    for tensors in (checkpoint.weights, checkpoint.optimizer_state):
        for name in sorted(tensors):
            whole.update(name.encode() + tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


class Telling(Listener):
    """Writes a byte to a pipe after each step."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def on_step(self, step: int, numbers: dict[str, float]) -> None:
        os.write(self.pipe, b"x")


def _forked(folder: str, changes: dict[str, Any], moment: tuple[int, float] | None) -> int:
    """Run in a child process, killed some seconds after a step. Returns its exit code, negative for a signal."""
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
    while os.read(reads, 4096):  # a full pipe would block the child
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

        class Slow(Tiny):
            def prepare(self) -> None:
                time.sleep(8)

        train(Slow, Path(sys.argv[2]) / "run", QUICK, timeout=3)
    else:
        torch.set_num_threads(1)
        try:
            for folder, changes in json.loads(sys.argv[1]):
                train(Tiny, folder, changes)
        except (OSError, RuntimeError, ValueError) as error:
            sys.exit(f"tiny: {error}")
