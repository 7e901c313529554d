"""One rank of a distributed training that records heads; writes the results to a file.

python recorder_worker.py RANK RANKS STORE FOLDER
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from regard._devices import finish_threads_at_exit
from regard.interp import _records as records
from regard.interp._probes import Probe
from regard.nn import Decoder
from regard.training._recorder import Recorder

VOCAB, N = 40, 24


def model() -> Decoder:
    torch.manual_seed(3)
    decoder = Decoder(12, heads=3, layers=2, vocab=VOCAB)
    for parameter in decoder.parameters():  # with the initial parameters, attention is nearly uniform
        parameter.data *= 1.5
    return decoder


def probes() -> list[Probe]:
    """Three natural texts, two repeated ones and one random one: a second rank has fewer of them, or none."""
    draw = torch.Generator().manual_seed(1)
    special = torch.arange(N) == 0
    different = torch.stack([torch.randperm(VOCAB, generator=draw)[:N] for _ in range(2)])
    return [
        Probe("natural", torch.randint(VOCAB, (3, N), generator=draw), special),
        Probe("repeated", different[:, :8].repeat(1, 3), special, 8),
        Probe("random", different[:1], special, 8),
    ]


def short(folder: Path, **options: Any) -> Recorder:
    return Recorder(model(), folder, probes=probes()[:1], map=4, profile=2, **options)


def steps(folder: Path) -> list[int]:
    return list(records.list_records(folder))


def record(folder: Path, step: int = 0) -> records.Record:
    return records.read_record(records.list_records(folder)[step])


def main(rank: int, ranks: int, store: str, folder: Path) -> None:
    timeout = timedelta(seconds=150)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, timeout=timeout)
    results: dict[str, object] = {}
    replicated = nn.parallel.DistributedDataParallel(model())
    recorder = Recorder(replicated, folder / "ddp", probes=probes(), share=0.0)
    results["steps"] = [recorder.step(k) for k in range(4)]  # only step 0 is recorded: a share of 0 leaves no time
    recorder.finish(4)
    results["grads"] = any(x.grad is not None for x in replicated.parameters())
    again = Recorder(replicated, folder / "ddp", probes=probes(), share=None)
    results["again"] = [again.step(4), again.step(5)]
    again.resume_from(4)
    results["back"] = [again.step(4), again.step(6)]
    sharded = model()
    for block in sharded.blocks:
        fully_shard(block)
    fully_shard(sharded)
    Recorder(sharded, folder / "fsdp", probes=probes(), share=None).step(0)
    if rank == 0:
        Path(folder / "ddp" / "step-00000008.safetensors").write_bytes(b"half")
    dist.barrier()
    try:
        Recorder(replicated, folder / "ddp", probes=probes())
    except ValueError as error:
        results["broken"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    finish_threads_at_exit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
