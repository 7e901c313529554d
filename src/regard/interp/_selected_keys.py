"""Keys that a model of ``transformers`` selects for each query before attention, as a mask.

Models with an indexer (DeepSeek 3.2, MiniMax M3 and others) hide all other keys in the mask themselves if the attention
is transformers' own. To any other attention function they pass what they selected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.masks import Dense


def selected_keys(module: nn.Module, query: Tensor, key: Tensor, options: dict[str, Any]) -> Dense | None:
    """The mask of the selected keys; None if the model selects none.

    - ``query [B, H, n, d]``, ``key [B, G, m, d]``: the arguments of the attention call.
    - ``options``: its options: ``indices [B, n, k]`` are keys, ``block_indices [B, G, n, k]`` are blocks of keys, where
      a negative number stands for none.
    """
    m = key.shape[-2]
    indices: Tensor | None = options.get("indices")
    if indices is not None:
        return Dense(_marked(indices.unsqueeze(1), m))
    blocks: Tensor | None = options.get("block_indices")
    if blocks is None:
        return None
    indexer: Any = module.indexer
    size = indexer.block_size
    visible_blocks = _marked(blocks, -(-m // size))
    visible = visible_blocks.repeat_interleave(size, -1)[..., :m]
    return Dense(visible.repeat_interleave(query.shape[1] // blocks.shape[1], 1))


def _marked(indices: Tensor, size: int) -> Tensor:
    """Bool ``[..., size]``: True at the indices along the last axis; others mark nothing."""
    marked = torch.zeros(*indices.shape[:-1], size + 1, dtype=torch.bool, device=indices.device)
    # A static cache has empty places beyond the keys.
    places = indices.long().masked_fill((indices < 0) | (indices >= size), size)
    return marked.scatter(-1, places, True)[..., :size]
