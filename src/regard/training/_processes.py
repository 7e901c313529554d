"""The processes of a run: one process, or those that torchrun started; and their common operations.

Each process computes its own examples of a batch. DDP (the whole model in every process) or FSDP2 (a share of it)
exchanges the gradients. Losses, scores and observables are summed over all processes, and only the first one writes.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from regard._checks import check_number
from regard._devices import finish_threads_at_exit
from regard._errors import RankError, RegardError
from regard.nn import Block
from regard.parallel._group import Ring, name_lost_ranks
from regard.training._task import Batch, slice_batch

# Default timeout in seconds. A process that another one waits for may be writing a checkpoint, or it may have died.
TIMEOUT_SECONDS = 40.0
MOST_SECONDS = 1_000_000
# Time between two checks whether the first process is done. Between the checks a process can handle signals.
POLL_SECONDS = 0.1
DONE = "done"
FAILED = "failed"


class Processes:
    """Context manager of the processes of a run. In a run of one process the operations exchange nothing.

    - ``rank``, ``world_size``: the number of this process, and how many there are.
    - ``timeout``: how many seconds a process waits for another one in an exchange; ``wait_for_first`` has no limit. A
      process group that already exists keeps its own timeout.
    """

    wait_count = 0  # calls of ``wait_for_first`` in all runs of this process

    def __init__(self, rank: int = 0, world_size: int = 1, timeout: float = TIMEOUT_SECONDS) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = check_number("timeout", timeout, least=1.0)
        if self.timeout > MOST_SECONDS:
            raise RegardError(f"timeout must be between 1 and {MOST_SECONDS:,} seconds, got {timeout:g}")

    @classmethod
    def current(cls, timeout: float = TIMEOUT_SECONDS) -> Processes:
        """Return the processes of an initialised process group, those that torchrun started, or this one alone."""
        if dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size(), timeout)
        rank = os.environ.get("RANK", "0")
        world_size = os.environ.get("WORLD_SIZE", "1")
        if not rank.isdecimal() or not world_size.isdecimal() or int(rank) >= int(world_size):
            raise RegardError(f"RANK is {rank!r} and WORLD_SIZE {world_size!r}; 0 ≤ RANK < WORLD_SIZE must be true")
        return cls(int(rank), int(world_size), timeout)

    def __enter__(self) -> Processes:
        if self.world_size > 1 and not dist.is_initialized():
            # gloo works on every machine; the models here are trained on the CPU.
            dist.init_process_group("gloo", timeout=timedelta(seconds=self.timeout))
            # Destroy the group at the end of the process, not of the run: later runs in this process use it too. A new
            # group would need the same address and port.
            # Functions run in reverse order: first the group is destroyed, then its threads may finish.
            finish_threads_at_exit()
            atexit.register(dist.destroy_process_group)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # The others may be waiting for the first process without a time limit, so it tells them that it failed.
        if kind is not None and self.world_size > 1 and self.is_first and dist.is_initialized():
            with suppress(RuntimeError):  # the error of this process is the one to report
                _store().set(self._wait_key(Processes.wait_count + 1), FAILED)

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def agree(self, settings: Mapping[str, object]) -> None:
        """Wait for all processes, and raise the same error in all of them if one has other settings."""
        if self.world_size > 1:
            Ring.from_group(None).agree(settings, [], torch.device("cpu"))

    def wait(self) -> None:
        """Wait until all processes have called this; raise after ``timeout`` seconds if one of them has not."""
        if self.world_size > 1:
            with name_lost_ranks():
                dist.barrier()

    def wait_for_first(self, task: str) -> None:
        """Wait until the first process has finished a task that may take long, such as preparing data.

        - ``task``: what the first process must have done, for the error message, such as "prepared the data".

        The first process calls this when it is done. If it fails, the others raise an error; if it is killed, torchrun
        ends the others.
        """
        # A barrier would fail after ``timeout`` seconds, so the store is used instead.
        if self.world_size == 1:
            return
        store = _store()
        Processes.wait_count += 1  # a new key for every wait: a process may train several times
        key = self._wait_key(Processes.wait_count)
        if self.is_first:
            store.set(key, DONE)
            return
        with name_lost_ranks():
            while not store.check([key]):
                time.sleep(POLL_SECONDS)
            answer = store.get(key)
        if answer == FAILED.encode():
            raise RankError(f"the first process failed before it had {task}; its own message says why")

    @staticmethod
    def _wait_key(count: int) -> str:
        return f"regard/wait/{count}"

    def select(self, batch: Batch) -> tuple[Batch, float]:
        """Return this process's examples and their weight: 0 if it has no example of its own, else 1.

        A process with weight 0 still computes one example, because all processes must take part in the exchanges of
        DDP and FSDP.
        """
        count = len(next(iter(batch.values())))
        if self.rank >= count:
            return slice_batch(batch, slice(0, 1)), 0.0
        return slice_batch(batch, slice(self.rank, None, self.world_size)), 1.0

    def sum_over_all(self, values: Mapping[str, float]) -> dict[str, float]:
        """Add up values over all processes; every process must pass the same names."""
        if self.world_size == 1:
            return dict(values)
        sums = torch.tensor(list(values.values()), dtype=torch.float64)
        with name_lost_ranks():
            dist.all_reduce(sums)
        return dict(zip(values, sums.tolist(), strict=True))

    def wrap(self, model: nn.Module, method: str) -> nn.Module:
        """Return the model to call in training: itself, wrapped in DDP ("ddp"), or sharded in place (FSDP2)."""
        if self.world_size == 1:
            return model
        if method == "ddp":
            return DistributedDataParallel(model)
        # Imported here because the import takes a second, and a single process does not need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (self.world_size,))
        for block in _separable_blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def gradient_sync(self, model: nn.Module, now: bool) -> AbstractContextManager[Any]:
        """Return a context for a backward pass that exchanges gradients; with ``now=False`` a later pass does."""
        if isinstance(model, DistributedDataParallel):
            return nullcontext() if now else model.no_sync()
        if self.world_size > 1:
            model.set_requires_gradient_sync(now)  # type: ignore[operator]  # FSDP2 adds this method to the module
        return nullcontext()


def _store() -> dist.Store:
    """Return the key-value store through which the processes found each other."""
    return dist.distributed_c10d._get_default_store()


def _separable_blocks(model: nn.Module) -> list[Block]:
    """Return the blocks, which FSDP then gathers one at a time; none if two blocks share a parameter, as in T5."""
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    owned: set[Tensor] = set()
    for block in blocks:
        parameters = set(block.parameters())
        # A shared parameter must stay gathered while any of its blocks runs, so the model is one unit.
        if owned & parameters:
            return []
        owned |= parameters
    return blocks
