"""Find the dimensions of models that fit a budget, ranked."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from regard._checks import check_number
from regard._errors import RegardError
from regard.budget._make_plan import plan
from regard.budget._models_from_fields import build_model
from regard.budget._plan import Plan
from regard.budget._symbols import to_int
from regard.budget._units import format_bytes, format_count, format_seconds, parse_quantity

# The costs that can be limited, and the kind of quantity of each.
LIMITS = {"params": "count", "memory": "size", "flops": "count", "time": "time"}
FORMATS: dict[str, Callable[[float], str]] = {"count": format_count, "size": format_bytes, "time": format_seconds}
WIDTHS = (*range(64, 1024, 64), *range(1024, 4096, 128), *range(4096, 16385, 512))
MAX_LAYERS = 160  # deeper than any model in use
# Width over depth of models that people train: BERT and GPT-2 768/12 = 64, Llama 7B 4096/32 = 128, SmolLM 576/30 = 19.
USUAL_RATIOS = (16, 160)

MakePlan = Callable[[dict[str, Any]], Plan]


@dataclass(frozen=True)
class Fit:
    """One model that fits: its fields, its plan, and the share of each limit that it uses."""

    fields: Mapping[str, Any]
    plan: Plan
    used: Mapping[str, float]

    @property
    def unusual(self) -> float:
        """How far width/depth is outside the usual range, in powers of 2; 0 inside the range."""
        ratio = self.fields["d"] / self.fields["layers"]
        return max(0.0, math.log2(USUAL_RATIOS[0] / ratio), math.log2(ratio / USUAL_RATIOS[1]))


def fit(
    kind: str,
    limits: Mapping[str, float | str],
    tokens: int | None = None,
    *,
    fields: Mapping[str, Any] | None = None,
    plain_attention: bool = False,
    max_results: int = 10,
    **options: Any,
) -> list[Fit]:
    """Find models within all `limits`: the deepest for each width. Usual shapes come first, then larger models.

    - `kind`: encoder, decoder, encoder-decoder or vit.
    - `limits`: some of params, memory, flops and time, as numbers or as text (``"110M"``).
    - `tokens`: as in `plan`.
    - `fields`: fields with fixed values. The search varies the others: d (multiples of 64; of 128 above 1,024; of 512
      above 4,096), heads (of width 64; of width 128 from d = 4,096 on) and layers (as many as fit, up to 160).
    - `plain_attention`: use attention that stores n × n weights.
    - `options`: further arguments of `plan`.

    >>> best = fit("decoder", {"params": "110M"}, tokens=512, fields={"vocab": 32000})[0]
    >>> best.fields["d"], best.fields["layers"], best.plan.parameters
    (832, 10, 109775744)
    """
    limit_numbers = _check_limits(limits)
    if kind in ("attention", "block"):
        raise RegardError(f"kind must be encoder, decoder, encoder-decoder or vit, got {kind}, which has no layers")

    def make_plan(all_fields: dict[str, Any]) -> Plan:
        model = build_model(kind, all_fields)
        if plain_attention:
            model = model.with_plain_attention()
        return plan(model, tokens, **options)

    return _search(dict(fields or {}), limit_numbers, make_plan)[:max_results]


def _check_limits(limits: Mapping[str, float | str]) -> dict[str, float]:
    numbers = {}
    for name, limit in limits.items():
        if name not in LIMITS:
            raise RegardError(f"limits must be some of {', '.join(LIMITS)}, for example params=110M, got {name!r}")
        if isinstance(limit, str):
            number = parse_quantity(name, limit, LIMITS[name])
        else:
            number = check_number(name, limit)
        if not 0 < number < math.inf:
            raise RegardError(f"{name} must be a positive number, got {number}")
        numbers[name] = number
    if not numbers:
        raise RegardError(f"limits must not be empty; give some of {', '.join(LIMITS)}, e.g. params=110M,memory=2GiB")
    return numbers


def _search(fields: dict[str, Any], limits: Mapping[str, float], make_plan: MakePlan) -> list[Fit]:
    fits = []
    smallest = None
    for shape in _shapes(fields):
        first = make_plan(shape | {"layers": fields.get("layers", 1)})
        # If nothing fits, the error says what the smallest model needs.
        if smallest is None or first.parameters < smallest.parameters:
            smallest = first
        if not _is_within(first, limits):
            continue
        # One layer fits. Find how many fit at most.
        layers = fields.get("layers") or _most_layers(shape, limits, make_plan)
        best = make_plan(shape | {"layers": layers})
        fits.append(Fit(shape | {"layers": layers}, best, _used_shares(best, limits)))
    if not fits:
        raise RegardError(_nothing_fits(smallest, limits))
    # Usual shapes first, and the largest model of each.
    fits.sort(key=lambda one: (one.unusual, -one.plan.parameters))
    return fits


def _shapes(fields: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the fields to try, with different widths and heads; given fields do not change."""
    widths = (fields["d"],) if "d" in fields else WIDTHS
    for d in widths:
        heads = fields.get("heads") or _heads_for_width(d, fields)
        # The width of a head must be an integer, unless it is given.
        if heads is not None and ("d_key" in fields or d % heads == 0):
            yield {**fields, "d": d, "heads": heads}


def _heads_for_width(d: int, fields: Mapping[str, Any]) -> int | None:
    """The largest number of heads whose width is at least the usual width, and that divides d; None if none does."""
    head_width = fields.get("d_key", 128 if d >= 4096 else 64)
    for heads in range(max(1, d // head_width), 0, -1):
        divides = "d_key" in fields or d % heads == 0
        if divides and heads % fields.get("kv_heads", 1) == 0:
            return heads
    return None


def _most_layers(shape: dict[str, Any], limits: Mapping[str, float], make_plan: MakePlan) -> int:
    """Return the largest number of layers within the limits. One layer must fit."""
    depths = range(1, MAX_LAYERS + 1)
    # Every limited quantity grows with the number of layers, so bisection finds the largest number.
    return bisect_left(depths, True, key=lambda layers: not _is_within(make_plan(shape | {"layers": layers}), limits))


def _cost(plan: Plan, name: str) -> float:
    """Return the cost of a plan that the limit `name` applies to."""
    if name == "params":
        return plan.parameters
    if name == "memory":
        return float(plan.memory.total)
    if name == "flops":
        # A training step has a backward pass too.
        return plan.forward_flops + plan.training * plan.backward_flops
    if plan.seconds is None:
        raise RegardError("time can only be limited with a machine; give --machine this, or --machine with a name")
    return plan.seconds


def _used_shares(plan: Plan, limits: Mapping[str, float]) -> dict[str, float]:
    return {name: _cost(plan, name) / limit for name, limit in limits.items()}


def _is_within(plan: Plan, limits: Mapping[str, float]) -> bool:
    return all(_cost(plan, name) <= limit for name, limit in limits.items())


def _nothing_fits(smallest: Plan | None, limits: Mapping[str, float]) -> str:
    """The error message if no model fits, with what the smallest model needs."""
    if smallest is None:
        return "d, heads and kv_heads do not fit together: heads must divide d, and kv_heads must divide heads"
    used = _used_shares(smallest, limits)
    name = max(used, key=lambda limit: used[limit])
    needed = FORMATS[LIMITS[name]](_cost(smallest, name))
    return (
        f"{name} is below the smallest {smallest.model.kind} (d={to_int(smallest.model.d)}, "
        f"layers={to_int(smallest.model.layers)}), which needs {needed}; raise the limit, or give smaller fields"
    )
