"""The other way round: which dimensions fit a budget, ranked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from regard.budget.plan import Plan
from regard.budget.symbols import whole
from regard.budget.units import bytes_said, count_said, seconds_said

__all__ = ["LIMITS", "Fit", "fit"]

# What can be limited, and how it is written: a count, a size in bytes, a time.
LIMITS = {"params": "count", "memory": "size", "flops": "count", "time": "time"}
WIDTHS = (*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512))
DEEPEST = 160
# Width over depth of models that people train: 768/12 = 64 (BERT, GPT-2), 4096/32 = 128 (Llama 7B), 576/30 = 19.
USUAL = (24, 160)

Planned = Callable[[dict[str, Any]], Plan]


@dataclass(frozen=True)
class Fit:
    """One model that fits: its fields, its plan, and the share of the tightest limit that it uses."""

    fields: Mapping[str, Any]
    plan: Plan
    used: Mapping[str, float]

    @property
    def usual(self) -> bool:
        """Whether its width is to its depth as in models that people train."""
        ratio = self.fields["d"] / self.fields["layers"]
        return USUAL[0] <= ratio <= USUAL[1]


def fit(
    kind: str, fields: Mapping[str, Any], limits: Mapping[str, float], planned: Planned, most: int = 10
) -> list[Fit]:
    """Models within all ``limits``, the largest for each width; usual shapes first, then by parameters.

    ``fields`` are given and stay. Free are d (multiples of 64, above 1,024 of 128, above 4,096 of 512), heads (64 wide;
    128 from d = 4,096 on) and layers (up to 160, as many as fit). ``planned`` makes a plan of fields.
    """
    if not limits:
        raise ValueError(f"nothing to fit: give some of {', '.join(LIMITS)}, e.g. params=110M,memory=2GiB")
    if kind in ("attention", "block"):
        raise ValueError(f"{kind} has no layers to choose; fit an encoder, a decoder or an encoder-decoder")
    found, smallest = [], None
    for tried in _shapes(fields):
        first = planned(tried | {"layers": fields.get("layers", 1)})
        smallest = first if smallest is None else min(smallest, first, key=lambda one: one.parameters)
        if not _within(first, limits):
            continue
        deepest = fields.get("layers") or _deepest(tried, limits, planned)
        best = planned(tried | {"layers": deepest})
        found.append(Fit(tried | {"layers": deepest}, best, _used(best, limits)))
    if not found:
        raise ValueError(_too_small(smallest, limits))
    found.sort(key=lambda one: (not one.usual, -one.plan.parameters))
    return found[:most]


def _shapes(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Widths and heads to try; what is given stays."""
    widths = (fields["d"],) if "d" in fields else WIDTHS
    for d in widths:
        if "heads" in fields:
            if d % fields["heads"] and "d_key" not in fields:
                continue
            yield {**fields, "d": d}
            continue
        width = fields.get("d_key", 128 if d >= 4096 else 64)
        heads = max(1, d // width)
        kv = fields.get("kv_heads")
        if (d % heads and "d_key" not in fields) or (kv is not None and heads % kv):
            continue
        yield {**fields, "d": d, "heads": heads}


def _deepest(tried: dict[str, Any], limits: Mapping[str, float], planned: Planned) -> int:
    """As many layers as fit: everything that is limited grows with them."""
    low, high = 1, DEEPEST + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _within(planned(tried | {"layers": middle}), limits) else (low, middle)
    return low


def _costs(plan: Plan) -> dict[str, Callable[[], float]]:
    return {
        "params": lambda: plan.parameters,
        "memory": lambda: float(plan.memory.total),
        "flops": lambda: plan.forward + (plan.backward if plan.training else 0),
        "time": lambda: _seconds(plan),
    }


def _seconds(plan: Plan) -> float:
    if plan.seconds is None:
        raise ValueError("time can be limited on a machine alone; give --machine this, or one by name")
    return plan.seconds


def _used(plan: Plan, limits: Mapping[str, float]) -> dict[str, float]:
    costs = _costs(plan)
    return {name: costs[name]() / limit for name, limit in limits.items()}


def _within(plan: Plan, limits: Mapping[str, float]) -> bool:
    return all(share <= 1 for share in _used(plan, limits).values())


def _too_small(smallest: Plan | None, limits: Mapping[str, float]) -> str:
    if smallest is None:
        return "no width fits the heads that were given; leave d or heads free"
    used = _used(smallest, limits)
    name = max(used, key=lambda one: used[one])
    needs = _costs(smallest)[name]()
    said = {"params": count_said, "memory": bytes_said, "flops": count_said, "time": seconds_said}[name]
    return (
        f"{name} is below the smallest {smallest.model.kind} (d={whole(smallest.model.d)}, "
        f"layers={whole(smallest.model.layers)}), which needs {said(needs)}; give more, or a smaller vocab"
    )
