"""The costs of a model by length: as numbers, and as a figure."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from regard import plots
from regard.budget._plan import Plan
from regard.budget._report import on_machine, step_name
from regard.budget._symbols import to_int
from regard.budget._units import format_count

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def cost_curves(plan: Plan) -> tuple[list[int], dict[str, list[float]]]:
    """Lengths, and at each length the cost of attention, of everything else and of the logits.

    Costs are seconds if there is a machine, otherwise FLOPs of unmasked pairs. Lengths beyond the learned positions are
    included, because the formulas hold there too.
    """
    # Two points per octave from 16 tokens on, and the plan's own length.
    octaves = int(2 * math.log2(_largest_length(plan)))
    lengths = {max(1, round(2 ** (k / 2))) for k in range(8, octaves + 1)}
    least = plan.model.image_tokens or 1  # a shorter text has no place for the image
    points = sorted(length for length in lengths | {to_int(plan.lengths.n)} if length >= least)

    curves: dict[str, list[float]] = {"attention": [], "all the rest": [], "total": [], "logits": []}
    for length in points:
        longer = replace(plan, lengths=replace(plan.lengths, n=length))
        if longer.machine is None:
            cost = float(longer.unmasked_flops)
        else:
            cost = sum(time.seconds for time in longer.part_times if time.placed is not None)
        attention = longer.shares.get("attention", 0.0)
        curves["attention"].append(cost * attention)
        curves["all the rest"].append(cost * (1 - attention))
        curves["total"].append(cost)
        curves["logits"].append(cost * longer.shares.get("logits", 0.0))
    return points, {name: costs for name, costs in curves.items() if any(costs)}


def _largest_length(plan: Plan) -> float:
    """The length up to which costs are drawn."""
    return min(2.0**24, max(8.0 * to_int(plan.lengths.n), 8.0 * (plan.crossover or 0)))


def plot_costs(plan: Plan, *, style: plots.FigureStyle | None = None) -> Figure:
    """Draw `cost_curves`, with n and the crossover marked; ``style`` is that of ``plots.series``."""
    n = to_int(plan.lengths.n)
    points, curves = cost_curves(plan)
    marks = {f"n = {n:,}": float(n)}
    if plan.crossover is not None and plan.crossover <= _largest_length(plan):
        marks[f"n* = {plan.crossover:,}"] = float(plan.crossover)
    y_label = "FLOPs of a forward pass, masked pairs skipped"
    if plan.machine is not None:
        y_label = f"seconds of a {step_name(plan)}"
    return plots.series(
        {name: (points, costs) for name, costs in curves.items()},
        title=f"{plan.model.title}, {format_count(plan.parameters)} parameters{on_machine(plan)}",
        x_label="tokens n",
        y_label=y_label,
        log="xy",
        marks=marks,
        style=style,
    )
