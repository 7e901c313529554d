"""Observables on a GPU: row values and map in the forward pass, groups in another one, the rest in a second pass."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard._groups import Groups
from regard._lowered_scores import Scores
from regard._observables import Observe
from regard._shapes import resolve_offset
from regard.kernels import reference_observables as measure
from regard.kernels.triton._call import Call, Observables, SecondPass, new_call
from regard.kernels.triton._launch import choose_tile, count_row_tiles, run_kernel, score_mode, with_hard_max
from regard.kernels.triton._run_forward import new_row_sums, run_forward
from regard.kernels.triton._second_pass import second_pass, sum_bins
from regard.kernels.triton._tile_sizes import padded_width

_UNIT = 2.0**-32  # the kernels sum weights over rows as integers in this unit
_INTEGER_ROWS = ("peak_at", "visible")
# The largest weights of each row are kept in registers.
MAX_TOP = 64


def run_observed(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, observe: Observe, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    """``forward`` and every observable, on a line. The reference measures on a grid, and long lists of top keys."""
    row_sums = new_row_sums(q)
    if observe.grid is not None or observe.top > MAX_TOP:
        _, out = run_forward(q, k, v, scores, row_sums)
        return out, *row_sums, measure.measure(q, k, None, scores, observe, real)
    B, H, n, _ = q.shape
    m = k.shape[2]
    device = q.device
    values = {name: torch.empty(B, H, n, dtype=torch.float32, device=device) for name in measure.FLOAT_ROWS}
    for name in _INTEGER_ROWS:
        values[name] = torch.empty(B, H, n, dtype=torch.int64, device=device)
    query_offset = resolve_offset(n, m, observe.offset)
    map_sums = torch.zeros(H, observe.map, observe.map, dtype=torch.int64, device=device)
    map_nan = torch.zeros_like(map_sums, dtype=torch.uint8)
    bin_mass = None
    bin_max = None
    if observe.map:
        # A bin without keys, of a map with more bins than keys, is read but never written.
        bin_mass = torch.zeros(B * H, observe.map, n, dtype=torch.float32, device=device)
        bin_max = torch.full_like(bin_mass, torch.finfo(torch.float32).min)
    real_rows = None
    real_batch_stride = 0
    if real is not None:
        real_rows = real.contiguous().view(torch.uint8)
        real_batch_stride = 0 if real.shape[0] == 1 else n
    observables = Observables(
        **values,
        query_offset=query_offset,
        sink_keys=observe.sink,
        local_radius=observe.local,
        map_size=observe.map,
        map=map_sums if observe.map else None,
        map_nan=map_nan if observe.map else None,
        bin_mass=bin_mass,
        bin_max=bin_max,
        real_queries=real_rows,
        real_queries_batch_stride=real_batch_stride,
    )
    call, out = run_forward(q, k, v, scores, row_sums, observables)
    if observe.groups is not None:
        values["groups"] = _group_masses(q, k, scores, observe.groups)

    # A row counts if it sees a key and is not padding. Means over rows divide by the rows that count.
    counted = values["visible"] > 0
    if real is not None:
        counted = counted & real.unsqueeze(1)
    values["counted"] = counted
    values["rows"] = counted.sum((0, 2))
    if observe.map:
        map_row = torch.arange(n, device=device) * observe.map // max(1, n)
        map_rows = torch.zeros(H, observe.map, dtype=torch.int64, device=device)
        map_rows = map_rows.index_add_(1, map_row, counted.sum(0))
        values["map_rows"] = map_rows
        values["map"] = _mean_weight(map_sums, map_nan, map_rows.unsqueeze(-1))
    if observe.key_mass or observe.top or observe.profile is not None:
        values |= _run_second_pass(call, scores, observe, values, row_sums, query_offset)
    return out, *row_sums, values


def _group_masses(q: Tensor, k: Tensor, scores: Scores, groups: Groups) -> Tensor:
    """``[B, H, n, C]``: the weight of each row on each group.

    It is the output of attention whose values say in which group a key is, 1 or 0 per group: there are at most as many
    groups as the kernels take columns of values. Groups in the registers of the forward pass would make it slower, also
    where none are measured.
    """
    numbers = torch.arange(len(groups), device=q.device)
    membership = (groups.labels[:, None, :, None] == numbers).float()  # [B or 1, 1, m, C]
    membership = membership.expand(k.shape[0], k.shape[1], -1, -1)
    # Observables are taken before dropout.
    _, masses = run_forward(q, k, membership, replace(scores, dropout=0.0, seed=None), None)
    return masses


def _run_second_pass(
    call: Call,
    scores: Scores,
    observe: Observe,
    values: dict[str, Tensor],
    row_sums: tuple[Tensor, Tensor],
    query_offset: int,
) -> dict[str, Tensor]:
    """Key mass, profile and the largest weights of each row, measured from row_max and row_sum."""
    B, H, n = values["counted"].shape
    device = values["counted"].device
    buffers: dict[str, Tensor] = {}
    radius = 0
    if observe.key_mass:
        buffers["key_mass"] = torch.zeros(H, call.M, dtype=torch.int64, device=device)
        buffers["key_mass_nan"] = torch.zeros_like(buffers["key_mass"], dtype=torch.uint8)
    if observe.profile is not None:
        radius = observe.profile_radii()[0]
        buffers["profile"] = torch.zeros(H, 2 * radius + 1, dtype=torch.int64, device=device)
        buffers["profile_nan"] = torch.zeros_like(buffers["profile"], dtype=torch.uint8)
        buffers["profile_rows"] = torch.zeros_like(buffers["profile"])
    if observe.top:
        buffers["top"] = torch.empty(B, H, n, observe.top, dtype=torch.float32, device=device)
        buffers["top_at"] = torch.empty(B, H, n, observe.top, dtype=torch.int64, device=device)
    pass_ = SecondPass(
        counted=values["counted"].view(torch.uint8),
        key_mass=buffers.get("key_mass"),
        key_mass_nan=buffers.pop("key_mass_nan", None),
        profile=buffers.get("profile"),
        profile_nan=buffers.pop("profile_nan", None),
        profile_rows=buffers.get("profile_rows"),
        profile_radius=radius,
        query_offset=query_offset,
        top_count=observe.top,
        top=buffers.get("top"),
        top_at=buffers.get("top_at"),
    )
    arguments = _weight_arguments(call, scores, row_sums) | {"pass_": pass_, "TOP_PADDED": padded_width(observe.top)}
    tile = choose_tile("weights", call)
    run_kernel(second_pass, count_row_tiles(call, tile), tile, arguments)

    # The kernel sums in units over rows; observables are means.
    if pass_.key_mass is not None:
        buffers["key_mass"] = _mean_weight(pass_.key_mass, pass_.key_mass_nan, values["rows"].unsqueeze(-1))
    if pass_.profile is not None:
        buffers["profile"] = _mean_weight(pass_.profile, pass_.profile_nan, buffers["profile_rows"])
    return buffers


def _weight_arguments(call: Call, scores: Scores, row_sums: tuple[Tensor, Tensor]) -> dict[str, Any]:
    """The arguments of a kernel that computes weights without values."""
    tile = choose_tile("weights", call)
    D = call.q.data.shape[3]
    return {
        "call": call,
        "row_max_of_rows": row_sums[0],
        "row_sum_of_rows": row_sums[1],
        "SCORES": score_mode(scores.scale),
        "D": D,
        "D_PADDED": padded_width(D),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }


def _mean_weight(sums: Tensor, has_nan: Tensor | None, rows: Tensor) -> Tensor:
    """The mean over ``rows`` of weights that the kernel summed in units of 2^−32; NaN where one of them was NaN."""
    assert has_nan is not None
    means = (sums.double() * _UNIT / rows.clamp(min=1)).float()
    return torch.where(has_nan != 0, torch.nan, means)


def run_bin_masses(q: Tensor, k: Tensor, row_max: Tensor, row_sum: Tensor, scores: Scores, edges: Tensor) -> Tensor:
    """``[B, H, n, bins]``: each row's weight on the keys ``edges[t] ≤ j < edges[t + 1]``."""
    # No value is read; the keys stand in for them.
    call = with_hard_max(new_call(q, k, k, scores))
    masses = torch.zeros(*q.shape[:3], len(edges) - 1, dtype=torch.float32, device=q.device)
    if masses.numel() == 0:
        return masses
    arguments = _weight_arguments(call, scores, (row_max.contiguous(), row_sum.contiguous()))
    arguments |= {
        "bin_edges": edges.to(q.device, torch.int64).contiguous(),
        "bin_count": len(edges) - 1,
        "bin_masses": masses,
    }
    tile = choose_tile("weights", call)
    run_kernel(sum_bins, count_row_tiles(call, tile), tile, arguments)
    return masses
