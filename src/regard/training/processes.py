"""One process, or several that torchrun started: who is who, and what they do together.

Each takes its examples of a batch; gradients meet in DDP (a whole model everywhere) or FSDP2 (a share of it). Sums of
losses, scores and observables are added over all, and the first process alone writes.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard.nn import Block
from regard.training.task import Batch

__all__ = ["Processes"]

# Seconds that the others wait for one of them: it may be writing a checkpoint, or be gone without a word.
PATIENCE = 40


class Processes:
    """The processes of a run; ``with Processes.found() as all_of_us``. Alone, every operation is nothing."""

    waits = 0  # of all runs of this process

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world

    @classmethod
    def found(cls) -> Processes:
        """Those of a process group that is there, those that torchrun started, or this one alone."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        told = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if not all(text.isdecimal() for text in told) or int(told[0]) >= int(told[1]):
            raise ValueError(
                f"RANK is {told[0]!r} and WORLD_SIZE {told[1]!r}; torchrun sets both, 0 ≤ RANK < WORLD_SIZE"
            )
        return cls(int(told[0]), int(told[1]))

    def __enter__(self) -> Processes:
        if self.world > 1 and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
            # At the end of the process, not of the run: another run's group would meet this one's old addresses.
            atexit.register(dist.destroy_process_group)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all are here: moments, or somebody is gone."""
        if self.world > 1:
            dist.barrier()

    def wait_for_first(self, done: str) -> None:
        """Until the first process says that something long is ``done``: preparing data takes as long as it takes.

        The first one calls this when it is; if it ends before, torchrun ends the others.
        """
        if self.world == 1:
            return
        store = dist.distributed_c10d._get_default_store()
        Processes.waits += 1  # one key a wait: a process may train several times
        key = f"regard/{done}/{Processes.waits}"
        if self.first:
            store.set(key, "done")
        else:
            store.wait([key], timedelta(days=1))

    def part(self, batch: Batch) -> tuple[Batch, float]:
        """This process's examples, and their weight: 0 where there are fewer examples than processes.

        Such a process computes an example all the same, for FSDP's exchanges are between all.
        """
        many = len(next(iter(batch.values())))
        if self.rank >= many:
            return {name: x[:1] for name, x in batch.items()}, 0.0
        return {name: x[self.rank :: self.world] for name, x in batch.items()}, 1.0

    def added(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Sums over all processes; every process names the same ones."""
        if self.world == 1:
            return dict(sums)
        together = torch.tensor(list(sums.values()), dtype=torch.float64)
        dist.all_reduce(together)
        return dict(zip(sums, together.tolist(), strict=True))

    def spread(self, model: nn.Module, how: str) -> nn.Module:
        """The model to call in training: itself, in DDP, or sharded in place (FSDP2)."""
        if self.world == 1:
            return model
        if how == "ddp":
            return DistributedDataParallel(model)
        # Here, not at the top: one process alone should not wait a second for what it does not need.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world,))
        for block in _apart(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def exchanging(self, model: nn.Module, now: bool) -> AbstractContextManager[Any]:
        """Gradients meet in this backward pass, or only after a later piece of the batch."""
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if now else model.no_sync()
        if self.world > 1:
            model.set_requires_gradient_sync(now)  # type: ignore[operator]  # FSDP2 gave the module this method
        return nullcontext()


def _apart(model: nn.Module) -> list[Block]:
    """The blocks that share no parameter with another one: each can be put together when its turn comes.

    A table that all blocks share (T5's) must stay while any of them runs; then the model is one piece.
    """
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    owners: dict[Tensor, int] = {}
    for block in blocks:
        for parameter in block.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    return blocks if all(many == 1 for many in owners.values()) else []
