"""The pooled maps of all heads of a layer as codes, for the offline page and the lab."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard._observables import Observation
from regard.interp._page_arrays import encode_numbers, with_base64


def encode_map(observation: Observation, shrink: int) -> dict[str, Any]:
    """``{"map": …, "share": …}``: the maps of all heads, encoded as base64; ``shrink`` divides their side."""
    encoded = {}
    for name, codes in map_codes(observation, shrink).items():
        encoded[name] = None if codes is None else with_base64(codes)
    return encoded


def map_codes(observation: Observation, shrink: int) -> dict[str, dict[str, Any] | None]:
    """``{"map": …, "share": …}``: the codes of the maps of all heads."""
    if observation.map is None or observation.map_rows is None:
        return {"map": None, "share": None}
    maps = observation.map.detach().to("cpu", torch.float32)
    if shrink > 1:
        maps = _coarser_map(maps, observation.map_rows.cpu(), shrink)
    m = observation.m
    maps = without_empty_bins(maps, observation.n, m)
    first_keys = min(observation.observe.sink, m or 0)
    keys = keys_per_bin(maps.shape[2], m)
    if not first_keys or m is None or observation.sink is None or observation.counted is None:
        return {"map": encode_numbers(maps / keys, 8, power=2), "share": None}

    # All bins of ``share`` but the last hold only first keys, and give it all their weight. The last gives the rest.
    remaining, _ = mean_by_bin(observation.sink, observation.counted, maps.shape[1])
    share = torch.zeros(*maps.shape[:2], (first_keys - 1) * maps.shape[2] // m + 1)
    for column in range(share.shape[2]):
        share[..., column] = torch.minimum(maps[..., column], remaining)
        remaining = remaining - share[..., column]
    maps = maps.clone()
    maps[..., : share.shape[2]] -= share
    other_keys = keys - (first_keys - (keys.cumsum(0) - keys)).clamp(min=0).minimum(keys)
    return {"map": encode_numbers(maps / other_keys.clamp(min=1), 8, power=2), "share": encode_numbers(share, 16)}


def keys_per_bin(bins: int, m: int | None) -> Tensor:
    """How many of m keys each bin of a map holds ``[bins]``; 1 if m is not known.

    >>> keys_per_bin(3, 10)
    tensor([4, 3, 3])
    """
    if m is None:
        return torch.ones(bins, dtype=torch.int64)
    # Bin t begins at key ⌈t·m/bins⌉. Nothing of size m is needed, which may be any number in a file.
    starts = -(-torch.arange(bins + 1) * m // bins)
    return starts.diff()


def without_empty_bins(maps: Tensor, n: int | None, m: int | None) -> Tensor:
    """The maps ``[H, g, g]`` without the rows and columns that a text shorter than the map leaves empty."""
    g = maps.shape[-1]
    for axis, count in ((1, n), (2, m)):
        if count is not None and 0 < count < g:
            maps = maps.index_select(axis, torch.arange(count, device=maps.device) * g // count)
    return maps


def _coarser_map(maps: Tensor, rows: Tensor, factor: int) -> Tensor:
    """The map with g/factor bins per side. It is exact: ⌊⌊i·g/n⌋ / factor⌋ = ⌊i·(g/factor)/n⌋ if factor divides g."""
    H, g = maps.shape[:2]
    sums = (maps * rows[..., None]).reshape(H, g // factor, factor, g // factor, factor).sum((2, 4))
    return sums / rows.reshape(H, g // factor, factor).sum(-1).clamp(min=1)[..., None]


def mean_by_bin(values: Tensor, counted: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Return the means ``[H, bins]`` of row values ``[B, H, n]`` over counted rows, and which bins are not empty."""
    n = values.shape[-1]
    bin_of_row = torch.arange(n) * bins // n
    counted = counted.cpu()
    row_sums = torch.where(counted, values.detach().cpu().double(), 0.0).sum(0)
    shape = (values.shape[1], bins)
    sums = torch.zeros(shape, dtype=torch.float64).index_add_(1, bin_of_row, row_sums)
    counts = torch.zeros(shape, dtype=torch.float64).index_add_(1, bin_of_row, counted.sum(0).double())
    return (sums / counts.clamp(min=1)).float(), counts > 0
