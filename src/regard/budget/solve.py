"""The other way round: which dimensions fit a budget, ranked."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from regard.budget.fields import build
from regard.budget.plan import Plan, plan
from regard.budget.symbols import whole
from regard.budget.units import bytes_said, count_said, parse, seconds_said
from regard.shapes import number

__all__ = ["LIMITS", "Fit", "fit"]

# What can be limited, and how it is written: a count, a size in bytes, a time.
LIMITS = {"params": "count", "memory": "size", "flops": "count", "time": "time"}
WIDTHS = (*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512))
DEEPEST = 160
# Width over depth of models that people train: BERT and GPT-2 768/12 = 64, Llama 7B 4096/32 = 128, SmolLM 576/30 = 19.
USUAL = (16, 160)

Planned = Callable[[dict[str, Any]], Plan]


@dataclass(frozen=True)
class Fit:
    """One model that fits: its fields, its plan, and the share of each limit that it uses."""

    fields: Mapping[str, Any]
    plan: Plan
    used: Mapping[str, float]

    @property
    def unusual(self) -> float:
        """How far its width over its depth is from those of models that people train, in octaves; 0: not at all."""
        ratio = self.fields["d"] / self.fields["layers"]
        return max(0.0, math.log2(USUAL[0] / ratio), math.log2(ratio / USUAL[1]))


def fit(
    kind: str,
    limits: Mapping[str, float | str],
    tokens: int | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    plain: bool = False,
    most: int = 10,
    **options: Any,
) -> list[Fit]:
    """Models within all ``limits``, the deepest for each width; usual shapes first, then by parameters.

    ``limits``: some of params, memory, flops and time, as numbers or as people write them (``"110M"``). ``fields`` stay
    as they are given. Free are d (multiples of 64, above 1,024 of 128, above 4,096 of 512), heads (64 wide; 128 from
    d = 4,096 on) and layers (up to 160, as many as fit). ``plain`` attention stores n × n; ``options`` are ``plan``'s.

    >>> best = fit("decoder", {"params": "110M"}, tokens=512, fields={"vocab": 32000})[0]
    >>> best.fields["d"], best.fields["layers"], best.plan.parameters
    (832, 10, 109775744)
    """
    for name in limits:
        if name not in LIMITS:
            raise ValueError(f"{name!r} is no limit; limits are {', '.join(LIMITS)}, e.g. params=110M")
    read = {name: parse(name, x, LIMITS[name]) if isinstance(x, str) else number(name, x) for name, x in limits.items()}
    for name, limit in read.items():
        if not 0 < limit < math.inf:
            raise ValueError(f"{name} is {limit}; it must be a positive number")

    def planned(given: dict[str, Any]) -> Plan:
        model = build(kind, given)
        return plan(model.plain() if plain else model, tokens, **options)

    return _search(kind, dict(fields or {}), read, planned)[:most]


def _search(kind: str, fields: dict[str, Any], limits: Mapping[str, float], planned: Planned) -> list[Fit]:
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
    found.sort(key=lambda one: (one.unusual, -one.plan.parameters))
    return found


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
        kv = fields.get("kv_heads", 1)
        # As many as are that wide, or fewer where that many do not divide the width.
        fitting = (h for h in range(max(1, d // width), 0, -1) if h % kv == 0 and ("d_key" in fields or d % h == 0))
        heads = next(fitting, None)
        if heads is not None:
            yield {**fields, "d": d, "heads": heads}


def _deepest(tried: dict[str, Any], limits: Mapping[str, float], planned: Planned) -> int:
    """As many layers as fit: everything that is limited grows with them, and one fits."""
    depths = range(1, DEEPEST + 1)
    return bisect_left(depths, True, key=lambda layers: not _within(planned(tried | {"layers": layers}), limits))


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
        return "no number of heads divides the width as it is given; give d, heads and kv_heads that divide one another"
    used = _used(smallest, limits)
    name = max(used, key=lambda one: used[one])
    needs = _costs(smallest)[name]()
    said = {"params": count_said, "memory": bytes_said, "flops": count_said, "time": seconds_said}[name]
    smaller = ", or a smaller vocab" if smallest.model.kind != "vit" else ""
    return (
        f"{name} is below the smallest {smallest.model.kind} (d={whole(smallest.model.d)}, "
        f"layers={whole(smallest.model.layers)}), which needs {said(needs)}; give more{smaller}"
    )
