"""Attention over one sequence that is sharded over several processes; the result is exact.

torchrun --nproc-per-node 2 examples/context_parallel.py [--tokens 8192]
"""

import argparse

import torch
from torch import distributed

import regard
from regard.parallel import attention, gather, shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    arguments = parser.parse_args()
    if not distributed.is_torchelastic_launched():
        parser.error("start it with torchrun --nproc-per-node 2")
    distributed.init_process_group("gloo")
    try:
        torch.manual_seed(0)  # the same sequence on every rank; a real program reads only its own shard
        whole = torch.randn(3, 1, 4, arguments.tokens, 64)
        q, k, v = (shard(x) for x in whole)
        out, observation = attention(q, k, v, mask=regard.Causal(), observe=regard.Observe())
        rank = distributed.get_rank()
        entropy = observation.mean("entropy").mean()
        ranks = distributed.get_world_size()
        print(f"rank {rank} of {ranks}: {q.shape[2]:,} rows, mean entropy {entropy:.3f}", flush=True)
        together = gather(out)
        if rank == 0:
            alone = regard.attention(*whole, mask=regard.Causal())
            print(f"largest difference to one process: {(together - alone).abs().max():.1e}")
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
