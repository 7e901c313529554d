"""Tables of what fits, sweeps, machines, formulas and other ways; and cost against n as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Group

from regard import plots
from regard.budget.compare import Way
from regard.budget.machine import Machine
from regard.budget.plan import Plan
from regard.budget.solve import Fit
from regard.budget.symbols import Number, latex, text, whole
from regard.budget.units import bytes_said, count_said, seconds_said
from regard.terminal import plain, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = [
    "compared",
    "conditions",
    "cost_lines",
    "costs",
    "fitted",
    "formula_json",
    "formula_latex",
    "formula_table",
    "machine_table",
    "shown",
    "swept",
    "table_of",
]

SHOWN = ("float32", "bfloat16", "float16", "int8")


def table_of(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: int = 1,
    last: Sequence[str] | None = None,
) -> Group:
    """A title and a table: first columns of words, then of numbers; a last row stands apart."""
    table = plain_table()
    for at, name in enumerate(columns):
        table.add_column(name, justify="left" if at < words else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(plain(cell) for cell in row))
    if last is not None:
        table.add_row()
        table.add_row(*last)
    return Group(plain(title), table)


def shown(x: int) -> str:
    """A number with commas; a dash for none."""
    return f"{x:,}" if x else "–"


def fitted(fits: Sequence[Fit], given: Mapping[str, object]) -> Group:
    """Dimensions that fit, ranked; ``used`` is the share of the tightest limit. Unusual shapes are marked."""
    plan = fits[0].plan
    what = "training" if plan.training else "inference"
    said = ", ".join([conditions(plan), *(f"{name}={_value(value)}" for name, value in given.items())])
    title = f"{plan.model.title}s that fit, {what} of {said}{_on(plan)}"
    rows, timed = [], plan.machine is not None
    for one in fits:
        cells = [f"{one.fields[name]:,}" for name in ("d", "heads", "layers")]
        cells += [count_said(one.plan.parameters), bytes_said(one.plan.memory.total), count_said(one.plan.forward)]
        cells += [seconds_said(one.plan.seconds or 0.0)] * timed
        name, share = max(one.used.items(), key=lambda item: item[1])
        rows.append([*cells, f"{name} {share:.0%}", "unusual" if one.unusual else ""])
    columns = ["d", "heads", "layers", "params", "memory", "FLOPs", *["time"] * timed, "used", ""]
    return table_of(title, columns, rows, words=0)


def swept(name: str, plans: Sequence[tuple[int, Plan]]) -> Group:
    """One row a value: what a change of it does. ``attention``: its share of the cost, masks exploited."""
    first = plans[0][1]
    rows, timed = [], first.machine is not None
    for value, plan in plans:
        size, share = plan.memory, plan.shares.get("attention", 0.0)
        cells = [f"{value:,}", count_said(plan.parameters), count_said(plan.forward), f"{share:.0%}"]
        cells += [bytes_said(size.matrices), bytes_said(size.peak), bytes_said(size.total)]
        rows.append([*cells, *[seconds_said(plan.seconds or 0.0)] * timed])
    columns = [name, "params", "FLOPs", "attention", "n × n", "peak", "in all", *["time"] * timed]
    what = "training steps" if first.training else "forward passes"
    title = f"{first.model.title}, {what} of {conditions(first, without=name)}{_on(first)}, by {name}"
    return table_of(title, columns, rows, words=0)


def conditions(plan: Plan, without: str = "") -> str:
    """What the numbers of a table hold for; the one thing that its rows change is left out."""
    lengths = plan.lengths
    batch = "batch" if without == "batch" else f"{lengths.batch:,}"
    n = "n" if without == "n" else f"{lengths.n:,}"
    said = [f"{batch} × {n} tokens"]
    said += [f"source {lengths.m:,}"] if lengths.m is not None and without != "source" else []
    said += [plan.dtype, *([f"weights {plan.weights}"] if plan.weights is not None else [])]
    return ", ".join(said)


def _on(plan: Plan) -> str:
    return "" if plan.machine is None else f" on {plan.machine.name}"


def _value(x: object) -> str:
    return ("yes" if x else "no") if isinstance(x, bool) else f"{x:,}" if isinstance(x, int) else str(x)


def compared(ways: Iterable[Way], n: int, d: int, d_p: int, kernel: int) -> Group:
    """Ways to mix a sequence, side by side."""
    rows = []
    for way in ways:
        at = way.at(n, d, d_p, kernel)
        counts = [count_said(at[name]) for name in ("flops", "parameters", "memory")]
        rows.append([way.name, way.order, *counts, f"{at['steps']:,}", f"{at['reach']:,}"])
    title = f"One head of D = {d:,} on n = {n:,} tokens; positions of D_p = {d_p}, kernels of K = {kernel}"
    return table_of(title, ["way", "O(…)", "FLOPs", "params", "kept", "steps", "sees"], rows)


def machine_table(machines: Iterable[Machine]) -> Group:
    """Machines that are known by name, with what was published of them."""
    rows = []
    for one in machines:
        peaks = [f"{one.peak[name] / 1e12:,.1f}" if name in one.peak else "–" for name in SHOWN]
        rows.append([one.name, *peaks, f"{one.bandwidth / 1e9:,.0f}", f"{one.memory / 2**30:,.0f} GiB"])
    title = "Machines by name: published dense peaks in TFLOP/s, bandwidth and memory"
    return table_of(title, ["name", *SHOWN, "GB/s", "memory"], rows)


def formula_table(given: Mapping[str, Number], title: str) -> Group:
    """Formulas on a line each."""
    table = plain_table()
    table.add_column("what", no_wrap=True)
    table.add_column("formula", overflow="fold")
    for name, x in given.items():
        table.add_row(name, text(x))
    return Group(plain(title), table)


def formula_json(given: Mapping[str, Number]) -> dict[str, dict[str, str]]:
    """Formulas as text and LaTeX."""
    return {name.strip(): {"text": text(x), "latex": latex(x)} for name, x in given.items()}


def formula_latex(given: Mapping[str, Number]) -> list[str]:
    """Formulas as one block of LaTeX, in lines."""
    lines = (rf"\text{{{name.strip()}}} &= {latex(x)} \\" for name, x in given.items())
    return [r"\begin{align*}", *lines, r"\end{align*}"]


def cost_lines(plan: Plan) -> tuple[list[int], dict[str, list[float]]]:
    """Lengths, and at each the cost of attention, of all the rest and of logits, masks exploited.

    Seconds on a machine, else FLOPs. Lengths beyond what learned positions reach are there too: the cost does not know
    them.
    """
    n = whole(plan.lengths.n)
    points = sorted({max(1, round(2 ** (k / 2))) for k in range(8, int(2 * math.log2(_farthest(plan))) + 1)} | {n})
    lines: dict[str, list[float]] = {name: [] for name in ("attention", "all the rest", "total", "logits")}
    for length in points:
        one = replace(plan, lengths=replace(plan.lengths, n=length))
        cost = float(one.needed) if one.seconds is None else sum(x.seconds for x in one.spent if x.placed is not None)
        shares = {name: one.shares.get(group, 0.0) for name, group in (("attention", "attention"), ("logits", "head"))}
        for name, share in {**shares, "all the rest": 1 - shares["attention"], "total": 1.0}.items():
            lines[name].append(cost * share)
    return points, {name: ys for name, ys in lines.items() if any(ys)}


def _farthest(plan: Plan) -> float:
    """The length up to which costs are drawn."""
    return min(2.0**24, max(8.0 * whole(plan.lengths.n), 8.0 * (plan.crossover or 0)))


def costs(plan: Plan) -> Figure:
    """`cost_lines` as a figure, with n and the crossover marked."""
    n, cross = whole(plan.lengths.n), plan.crossover
    points, lines = cost_lines(plan)
    marks = {f"n = {n:,}": float(n)}
    marks |= {f"n* = {cross:,}": float(cross)} if cross is not None and cross <= _farthest(plan) else {}
    passes = "training step" if plan.training else "forward pass"
    return plots.series(
        {name: (points, ys) for name, ys in lines.items()},
        title=f"{plan.model.title}, {count_said(plan.parameters)} parameters{_on(plan)}",
        x_label="tokens n",
        y_label="FLOPs of a forward pass, masks exploited" if plan.machine is None else f"seconds of a {passes}",
        log="xy",
        marks=marks,
    )
