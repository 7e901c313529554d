"""Join the calls of one module into one observation: the steps of a generation, or several texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from regard._devices import widest
from regard._observables import ROW_VALUES, Observation
from regard._saved_call import SavedCall

ROWS_AT_ONCE = 256  # rows of exact weights that are computed at once


def joined_observation(calls: Sequence[Observation], cross: bool, same_source: bool) -> Observation:
    """One observation of several calls of a module.

    - ``cross``: whether the module is cross-attention.
    - ``same_source``: whether all calls of a cross-attention module read the same keys, as the steps of a decoder do.

    If each call continues the text of the call before (generation with a cache), the calls are lined up by position:
    row i of every value is query i of the whole text, and key j is key j of the whole text. Other calls of equal sizes
    are merged along the batch. Calls of unequal sizes keep what ``Observation.merge`` can merge.
    """
    first = calls[0]
    if not _continue_text(calls, cross, same_source):
        return first.merge(*calls[1:])
    return _append_calls(calls, cross or _keeps_keys(calls))


def joined_size(calls: Sequence[Observation], cross: bool, same_source: bool) -> tuple[int | None, int | None]:
    """The numbers of queries and keys of ``joined_observation``, without the work of joining.

    None if calls of unequal sizes are merged, or if a window has dropped old keys.
    """
    n = calls[0].n
    m = calls[0].m
    if len(calls) == 1:
        return n, m
    if _continue_text(calls, cross, same_source):
        last_m = calls[-1].m if cross or _keeps_keys(calls) else None
        return sum(call.n or 0 for call in calls), last_m
    if any((call.n, call.m) != (n, m) for call in calls):
        return None, None
    return n, m


def reason_no_map(calls: Sequence[Observation], observation: Observation) -> str:
    """Why a layer has no map, in words; empty if it has one.

    - ``calls``: of the layer; ``observation``: all of them as one.
    """
    if observation.map is not None:
        return ""
    bins = observation.observe.map
    if not bins:
        return "no map was observed; observe with Observe(map=64)"
    if observation.m is None:
        return "the calls cannot be lined up: a sliding cache has dropped old keys"
    # Each query of a text that is not longer than the map has a row of its own, and single steps have exact weights.
    longest = max(call.m or 0 for call in calls if call.n != 1 or call.key_mass is None)
    return (
        f"a call with {longest} tokens was pooled to {bins} bins, which cannot be lined up with the steps after it; "
        f"observe with Observe(map={bins}, keep=True) or a map of at least {longest}, or use look(…, generate=…)"
    )


def _continue_text(calls: Sequence[Observation], cross: bool, same_source: bool) -> bool:
    """Whether each call continues the text of the call before."""
    first = calls[0]
    if cross:
        # The steps of a decoder: one query each, always the same keys.
        are_steps = all(call.n == 1 and call.m == first.m and _same_batch_and_heads(first, call) for call in calls)
        return same_source and are_steps
    # The first call of a text has n = m queries, or is a step with one query.
    return first.n in (1, first.m) and all(_continues(a, b) for a, b in pairwise(calls))


def _keeps_keys(calls: Sequence[Observation]) -> bool:
    return all(b.m == (a.m or 0) + (b.n or 0) for a, b in pairwise(calls))


def _continues(a: Observation, b: Observation) -> bool:
    """Whether b continues the text of a: it adds its own keys to a's, or one new key replaces one in a full window."""
    if a.n is None or a.m is None or b.n is None or b.m is None or not _same_batch_and_heads(a, b):
        return False
    replaces_key = b.n == 1 and 1 < b.m <= a.m
    return b.m == a.m + b.n or replaces_key


def _same_batch_and_heads(a: Observation, b: Observation) -> bool:
    return a.entropy is not None and b.entropy is not None and a.entropy.shape[:2] == b.entropy.shape[:2]


def _append_calls(calls: Sequence[Observation], keeps_keys: bool) -> Observation:
    """Line up calls that each continue the text of the call before.

    Without ``keeps_keys`` a window has dropped old keys. The index of a key in a call is then not its position in the
    text, and everything that contains one is left out.
    """
    last = calls[-1]
    m = last.m
    assert m is not None
    if any(call.observe != last.observe for call in calls):
        return calls[0].merge(*calls[1:])  # raises, and says which options differ
    joined: dict[str, Any] = {"n": sum(call.n or 0 for call in calls), "m": m, "value_norm": last.value_norm}
    for name in (*ROW_VALUES, "counted", "top", "top_at", "groups"):
        values = [getattr(call, name) for call in calls]
        joined[name] = None
        # A value is joined only if every call has it.
        if not any(value is None for value in values):
            joined[name] = torch.cat(values, dim=2)
    joined |= {"map": None, "map_rows": None, "key_mass": None, "saved_calls": ()}
    if keeps_keys:
        joined["key_mass"] = _join_key_mass(calls, m)
        joined |= _join_maps(calls, joined["n"], m)
        joined["saved_calls"] = _join_saved_calls(calls, m)
    else:
        joined |= dict.fromkeys(("m", "value_norm", "peak_at", "top_at", "groups"))
        joined["sink"] = _join_sinks(calls)
    joined["rows"] = torch.stack([call.rows for call in calls]).sum(0)
    joined |= _join_profiles(calls)
    return replace(last, **joined)


def _join_sinks(calls: Sequence[Observation]) -> Tensor | None:
    """``sink`` of calls with a window that drops old keys: once it has dropped the first keys, they have no weight.

    None if a call has some of the first keys, but not all of them.
    """
    sinks = []
    tokens = 0
    for call in calls:
        tokens += call.n or 0
        dropped = tokens - (call.m or 0)
        if call.sink is None or 0 < dropped < call.observe.sink:
            return None
        sinks.append(torch.zeros_like(call.sink) if dropped else call.sink)
    return torch.cat(sinks, dim=2)


def _join_profiles(calls: Sequence[Observation]) -> dict[str, Tensor | None]:
    """``profile`` and ``profile_rows`` over the rows of all calls."""
    sums = []
    counts = []
    for call in calls:
        if call.profile is None or call.profile_rows is None:
            return {"profile": None, "profile_rows": None}
        sums.append(widest(call.profile) * call.profile_rows)
        counts.append(call.profile_rows)
    rows = torch.stack(counts).sum(0)
    return {"profile": (torch.stack(sums).sum(0) / rows.clamp(min=1)).to(calls[0].profile), "profile_rows": rows}


def _join_key_mass(calls: Sequence[Observation], m: int) -> Tensor | None:
    """The mean weight of each key over the rows of all calls."""
    row_counts = torch.stack([call.rows for call in calls]).sum(0)
    sums = []
    for call in calls:
        if call.key_mass is None or call.m is None:
            return None
        sums.append(torch.nn.functional.pad(call.key_mass * call.rows[:, None], (0, m - call.m)))
    return torch.stack(sums).sum(0) / row_counts.clamp(min=1)[:, None]


def _join_maps(calls: Sequence[Observation], n: int, m: int) -> dict[str, Tensor | None]:
    """``map`` and ``map_rows`` of the whole text from the exact rows of each call; None if a call has only pooled rows.

    Pooled rows cannot be used: the bins of a prompt are not bins of the whole text.
    """
    g = calls[0].observe.map
    # A call without its map may state any number of bins.
    if g == 0 or any(call.map is None for call in calls):
        return {"map": None, "map_rows": None}
    heads = calls[0].rows.shape[0]
    sums = torch.zeros(heads, g, g, dtype=torch.float64)
    counts = torch.zeros(heads, g, dtype=torch.float64)
    start = 0
    for call in calls:
        assert call.n is not None and call.m is not None
        rows = _binned_rows(call, m, g)
        if rows is None:
            return {"map": None, "map_rows": None}
        weights, row_counts = rows
        row_bin = (torch.arange(call.n) + start) * g // n
        sums.index_add_(1, row_bin, weights * row_counts[..., None])
        counts.index_add_(1, row_bin, row_counts)
        start += call.n
    means = sums / counts.clamp(min=1)[..., None]
    device = calls[0].rows.device
    return {"map": means.float().to(device), "map_rows": counts.to(calls[0].rows)}


def _binned_rows(call: Observation, all_keys: int, g: int) -> tuple[Tensor, Tensor] | None:
    """The weights of each row in g bins of all keys ``[H, n, g]``, and over how many batch entries they are a mean.

    None if the call has no exact rows: its map has fewer bins than keys, and neither q and k nor the mean weight of
    each key (which is the row itself if there is one row) were observed.
    """
    n = call.n
    m = call.m
    assert n is not None and m is not None
    if n == 1 and call.key_mass is not None:
        weights = call.key_mass.cpu().double()[:, None]
        row_counts = call.rows.cpu().double()[:, None]
    elif call.map is not None and call.map_rows is not None and max(n, m) <= g:
        # Each query and each key has a bin of its own.
        row_index = torch.arange(n) * g // n
        key_index = torch.arange(m) * g // m
        weights = call.map.cpu().double()[:, row_index][:, :, key_index]
        row_counts = call.map_rows.cpu().double()[:, row_index]
    elif call.saved_calls and call.counted is not None:
        return _rows_from_saved_call(call, torch.arange(m) * g // all_keys, g)
    else:
        return None
    return _add_by_bin(weights, torch.arange(m) * g // all_keys, g), row_counts


def _rows_from_saved_call(call: Observation, key_bin: Tensor, g: int) -> tuple[Tensor, Tensor]:
    """The same as ``_binned_rows``, from q and k."""
    assert call.counted is not None and call.n is not None
    counted = call.counted.cpu()
    batch_size, heads, n = counted.shape
    sums = torch.zeros(heads, n, g, dtype=torch.float64)
    for batch in range(batch_size):
        saved_call, entry = call.find_saved_call(batch)
        for head in range(heads):
            for i in range(0, n, ROWS_AT_ONCE):
                rows = slice(i, i + ROWS_AT_ONCE)
                weights = saved_call.weights(entry, head, rows, None).cpu().double()
                weights = torch.where(counted[batch, head, rows, None], weights, 0.0)
                sums[head, rows] += _add_by_bin(weights, key_bin, g)
    row_counts = counted.sum(0).double()
    return sums / row_counts.clamp(min=1)[..., None], row_counts


def _add_by_bin(weights: Tensor, key_bin: Tensor, g: int) -> Tensor:
    """Add the weights ``[…, m]`` of the keys of each bin: ``[…, g]``."""
    return weights.new_zeros(*weights.shape[:-1], g).index_add_(weights.ndim - 1, key_bin, weights)


def _join_saved_calls(calls: Sequence[Observation], m: int) -> tuple[SavedCall, ...]:
    """q, k and options of the whole text as one call; () if the calls do not have them, or cannot be written as one.

    The last call has the keys of the whole text. A row of an earlier call sees only the keys that its call had.
    """
    parts = []
    for call in calls:
        if len(call.saved_calls) != 1 or not isinstance(call.saved_calls[0], SavedCall):
            return ()
        parts.append(call.saved_calls[0])
    k = parts[-1].k
    options = parts[0].scores
    lows = []
    highs = []
    for part in parts:
        scores = part.scores
        has_tensors = scores.mask is not None or scores.bias is not None or scores.terms
        same_options = (scores.scale, scores.softcap) == (options.scale, options.softcap)
        if has_tensors or not same_options or not _same_tensor(scores.sinks, options.sinks):
            return ()
        # Keys that changed later (a cache that rotates them again) would give other weights.
        key_count = part.k.shape[2]
        if not torch.equal(part.k, k[:, :, :key_count]):
            return ()
        shape = (part.q.shape[0], part.q.shape[2])
        low = torch.zeros(shape, dtype=torch.int64, device=k.device)
        high = torch.full(shape, key_count, dtype=torch.int64, device=k.device)
        if scores.lo is not None:
            low = scores.lo.expand(shape)
        if scores.hi is not None:
            high = scores.hi.expand(shape).clamp(max=key_count)
        lows.append(low)
        highs.append(high)
    scores = replace(options, lo=torch.cat(lows, 1), hi=torch.cat(highs, 1))
    return (SavedCall(torch.cat([part.q for part in parts], 2), k, scores),)


def _same_tensor(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
