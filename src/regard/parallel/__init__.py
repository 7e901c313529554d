"""Context parallelism: exact attention over a sequence that is sharded over a ``torch.distributed`` group."""

from regard.parallel._attention import attention, gather, shard

__all__ = ["attention", "gather", "shard"]
