"""Which axes of attention weights are the batch and the heads, as far as sizes, names and memory say it."""

from __future__ import annotations

import math

from torch import Tensor

from regard._running_modules import RunningModules
from regard.interp._axis_tracking import JoinedAxes, varies_faster
from regard.interp._matrix_products import ValueProduct


def batch_and_heads(
    values: ValueProduct, running: RunningModules, joined: JoinedAxes, *, factors: list[Tensor], parts: list[Tensor]
) -> tuple[int, int] | None:
    """The numbers of batch entries and of heads of the weights; None if nothing says which axes they are.

    - ``factors``: tensors whose first axis may be joined of both.
    - ``parts``: queries, keys or values with the batch axes of the weights, which may be 1.
    """
    lead = values.lead
    total = math.prod(lead)
    if not lead:
        return 1, 1
    if len(lead) == 2:
        return lead if _batch_comes_first(lead, running, parts) else None
    if len(lead) > 2:
        return _with_more_axes(values, running)
    for x in factors:
        sizes = joined.first_axis(x)
        if sizes is not None and math.prod(sizes) == total:
            return sizes if running.are_batch_and_heads(*sizes) else None
    count = running.head_count(total)
    # Nothing says which of both comes first, unless there is only one of them.
    if count is None or 1 not in (count, total // count):
        return None
    return total // count, count


def _batch_comes_first(lead: tuple[int, ...], running: RunningModules, parts: list[Tensor]) -> bool:
    """Whether two axes are the batch and the heads in this order. Heads may come first, or have no axis."""
    batch_size, heads = lead
    named = running.named_head_counts()
    if named and heads not in named:
        return False
    if batch_size == heads:
        # Sizes do not tell. Heads are parts of one row of features, so in memory they are closer than batch entries.
        return not any(len(x.shape) == 4 and varies_faster(x, 0, 1) for x in parts)
    return bool(named) or running.may_have_batch_size(batch_size, heads)


def _with_more_axes(values: ValueProduct, running: RunningModules) -> tuple[int, int] | None:
    lead = values.lead
    # Query heads may be grouped by their key head: [B, G, H / G, n, m].
    if len(lead) == 3 and lead[0] == running.batch_size and running.has_head_count(lead[1] * lead[2]):
        return lead[0], lead[1] * lead[2]
    # Blocks of one sequence that see other blocks, too, are no batch entries: their keys have other positions.
    if values.n != values.m or not running.has_head_count(lead[-1]):
        return None
    if lead[-1] in lead[:-1]:
        return None
    return math.prod(lead[:-1]), lead[-1]
