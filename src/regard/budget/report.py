"""Plans as text: a table of parts, the sums, the bottleneck; formulas; what fits; sweeps."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from regard import plots
from regard.budget.compare import Way
from regard.budget.machine import Machine
from regard.budget.parts import Call, total
from regard.budget.plan import LINEAR, Plan
from regard.budget.solve import Fit
from regard.budget.symbols import LETTERS, Number, latex, text, whole
from regard.budget.units import bytes_said, count_said, seconds_said
from regard.terminal import plain, plain_table

__all__ = [
    "compared",
    "costs",
    "fitted",
    "formula_json",
    "formula_table",
    "machine_table",
    "overview",
    "printed",
    "swept",
]

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LETTER = {str(letter): letter for letter in LETTERS}


def printed(plan: Plan) -> str:
    """A plan as text, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(overview(plan))
    found = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in found.rstrip("\n").splitlines())


def overview(plan: Plan) -> Group:
    """The table of parts, and the lines under it."""
    return Group(_parts(plan), Text(""), _lines(_summary(plan)))


def _parts(plan: Plan) -> Table:
    n, batch, m = plan.lengths.n, plan.lengths.batch, plan.lengths.m
    length = f"{batch:,} × {n:,} tokens" + (f", source {m:,}" if m is not None else "")
    what = "training step" if plan.training else "forward pass"
    stored = f"{plan.dtype}, weights {plan.weights}" if plan.weights else plan.dtype
    table = plain_table(f"{plan.model.title}, {what} of {length}, {stored}")
    timed = plan.machine is not None
    table.add_column("part", overflow="fold")
    for name in (
        "layers",
        "parameters",
        "FLOPs",
        "share",
        *(["kept"] if plan.training else []),
        *["time"] * timed,
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in plan.rows:
        cells = [
            row.name,
            f"{row.times:,}",
            _number(row.parameters),
            _count(row.flops),
            _share(row.flops, plan.forward),
        ]
        cells += [bytes_said(row.kept) if row.kept else "–"] if plan.training else []
        cells += [seconds_said(row.seconds)] if row.seconds is not None else []
        table.add_row(plain(cells[0]), *cells[1:])
    table.add_section()
    last = ["total", "", _number(plan.parameters), _count(plan.forward), ""]
    last += [bytes_said(plan.memory.activations)] if plan.training else []
    last += [seconds_said(plan.seconds)] if plan.seconds is not None else []
    table.add_row(*last)
    return table


def _summary(plan: Plan) -> dict[str, str]:
    """Name → what is said under it."""
    size, said = plan.memory, dict[str, str]()
    said |= _theory(plan)
    saved = f"; {_count(plan.needed)} on the pairs that masks leave" if plan.needed != plan.forward else ""
    said["forward"] = f"{_count(plan.forward)}FLOP{saved}"
    said["backward"] = f"{_count(plan.backward)}FLOP; {_count(plan.recomputation)} more to recompute blocks"
    said["weights"] = bytes_said(size.weights)
    if plan.training:
        said["training"] = f"gradients {bytes_said(size.gradients)}, {plan.optimizer} {bytes_said(size.optimizer)}"
    said["activations"] = (
        f"{bytes_said(size.activations)} kept for backward, {bytes_said(size.recomputed)} recomputing blocks"
    )
    if size.matrices:
        how = "never stored (tiled)" if all(a.tiled for _, a in plan.model.attentions) else "stored"
        said["n × n"] = f"{bytes_said(size.matrices)} of attention weights, {how}"
    also = f", {bytes_said(size.recomputed_peak)} recomputing" if size.recomputed_peak is not None else ""
    said["peak"] = f"{bytes_said(size.peak)} above what was there before the step{also}"
    said["in all"] = bytes_said(size.total) + (_fits(plan) if plan.machine else "")
    said |= _decoding(plan)
    if plan.machine is not None and plan.seconds is not None:
        source = f"measured {plan.machine.measured[:10]}" if plan.machine.measured else "published peak: a bound"
        rate = whole(plan.lengths.batch) * whole(plan.lengths.n) / plan.seconds
        said["time"] = f"{seconds_said(plan.seconds)}, {count_said(rate)} tokens/s on {plan.machine.name} ({source})"
    said["bottleneck"] = plan.bottleneck
    return said


def _fits(plan: Plan) -> str:
    assert plan.machine is not None
    there = plan.machine.memory
    verb = "fits" if whole(math.ceil(plan.memory.total)) <= there else "does not fit"
    return f", {verb} the {bytes_said(there)} of {plan.machine.name}"


def _theory(plan: Plan) -> dict[str, str]:
    """The theory's exercise, where the model is one attention layer."""
    if plan.model.kind != "attention":
        return {}
    ((_, part),) = plan.model.attentions
    sizes = {weight.name: whole(weight.count) for weight in part.weights()}
    heads = sum(sizes[f"{name}.{kind}"] for name in "qkv" for kind in ("weight", "bias") if f"{name}.{kind}" in sizes)
    out = sizes["out.weight"] + sizes.get("out.bias", 0)
    each = f"{heads // whole(part.heads):,} a head, " if part.kv_heads == part.heads else ""
    said = {"parameters": f"{each}{heads:,} all heads, {out:,} output, {plan.parameters:,} in all"}
    n = _LETTER["n"]
    m = _LETTER["m"] if plan.lengths.m is not None else n
    stored = part.stored(Call(1, n, m, m))
    parts = ", ".join(f"{name} {text(x)}" for name, x in stored.items())
    return said | {"memory": f"{text(total(stored.values()))} values, as the theory counts: {parts}"}


def _decoding(plan: Plan) -> dict[str, str]:
    step = plan.decoding
    if step is None:
        return {}
    n = whole(plan.lengths.n)
    said = {"cache": f"{bytes_said(step.cache)} of keys and values for {plan.lengths.batch} × {n:,} tokens"}
    said["decode"] = f"{_count(step.flops)}FLOP and {bytes_said(step.read)} read for a token after {n:,}"
    if step.tokens_per_second is not None:
        said["decode"] += f"; {count_said(step.tokens_per_second)} tokens/s"
    if step.most is not None:
        speed = "" if step.most_per_second is None else f", {count_said(step.most_per_second)} tokens/s together"
        said["batch"] = f"{step.most:,} such sequences fit{speed}" if step.most else "not one such sequence fits"
    return said


def compared(ways: Iterable[Way], n: int, d: int, d_p: int, kernel: int) -> Table:
    """Ways to mix a sequence, side by side."""
    table = plain_table(f"One head of D = {d:,} on n = {n:,} tokens; D_p = {d_p}, K = {kernel}")
    table.add_column("way", no_wrap=True)
    for name in ("cost, O(…)", "FLOPs", "parameters", "kept values", "steps", "sees"):
        table.add_column(name, justify="right", no_wrap=True)
    for way in ways:
        at = way.at(n, d, d_p, kernel)
        numbers = (count_said(at[name]) for name in ("flops", "parameters", "memory", "steps", "reach"))
        table.add_row(way.name, way.order, *numbers)
    return table


def fitted(fits: Iterable[Fit]) -> Table:
    """Dimensions that fit, ranked."""
    fits = list(fits)
    plan = fits[0].plan
    what = "training" if plan.training else "inference"
    table = plain_table(f"{plan.model.title}s that fit, {what} of {plan.lengths.batch:,} × {plan.lengths.n:,} tokens")
    timed = plan.machine is not None
    for name in (
        "d",
        "heads",
        "layers",
        "hidden",
        "parameters",
        "memory",
        "FLOPs",
        *["time"] * timed,
        "of the limits",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for one in fits:
        fields, found = one.fields, one.plan
        cells = [
            str(fields["d"]),
            str(fields["heads"]),
            str(fields["layers"]),
            str(fields.get("hidden", 4 * fields["d"])),
        ]
        cells += [_number(found.parameters), bytes_said(found.memory.total), _count(found.needed)]
        cells += [seconds_said(found.seconds)] if found.seconds is not None else []
        table.add_row(*cells, ", ".join(f"{share:.0%}" for share in one.used.values()))
    return table


def swept(name: str, plans: Iterable[tuple[int, Plan]]) -> Table:
    """One row a value: what a change of it does."""
    plans = list(plans)
    table = plain_table(f"{plans[0][1].model.title}, {name} from {plans[0][0]:,} to {plans[-1][0]:,}")
    timed = plans[0][1].machine is not None
    for column in (name, "parameters", "FLOPs", "attention", "peak", "in all", *["time"] * timed):
        table.add_column(column, justify="right", no_wrap=True)
    for value, plan in plans:
        cells = [f"{value:,}", _number(plan.parameters), _count(plan.needed), f"{plan.shares.get('attention', 0):.0%}"]
        cells += [bytes_said(plan.memory.peak), bytes_said(plan.memory.total)]
        table.add_row(*cells, *([seconds_said(plan.seconds)] if plan.seconds is not None else []))
    return table


def formula_table(given: Mapping[str, Number], title: str) -> Table:
    """Formulas on a line each."""
    table = plain_table(title)
    table.add_column("what", no_wrap=True)
    table.add_column("formula", overflow="fold")
    for name, x in given.items():
        table.add_row(name, text(x))
    return table


def formula_json(given: Mapping[str, Number]) -> dict[str, dict[str, str]]:
    """Formulas as text and LaTeX."""
    return {name.strip(): {"text": text(x), "latex": latex(x)} for name, x in given.items()}


def _lines(said: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, what in said.items():
        grid.add_row(name, plain(what))
    return grid


def _number(x: int) -> str:
    return f"{x:,}" if x else "–"


def _count(x: float) -> str:
    return count_said(x) if x else "–"


def _share(part: int, of: int) -> str:
    return f"{part / of:.0%}" if part and of else "–"


def machine_table(machines: Iterable[Machine]) -> Table:
    """Machines that are known by name, with what was published of them."""
    table = plain_table("Machines by name: published dense peaks in TFLOP/s, memory")
    table.add_column("name", no_wrap=True)
    dtypes = ("float32", "bfloat16", "float16", "int8")
    for name in (*dtypes, "GB/s", "memory"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in machines:
        peaks = (f"{one.peak[name] / 1e12:,.1f}" if name in one.peak else "–" for name in dtypes)
        table.add_row(one.name, *peaks, f"{one.bandwidth / 1e9:,.0f}", f"{one.memory / 1e9:,.0f} GB")
    return table


def costs(plan: Plan, planned: Callable[[int], Plan]) -> Figure:
    """Cost against n, by group, with the crossover marked: seconds on a machine, else FLOPs."""
    timed = plan.machine is not None
    middle = plan.crossover or float(whole(plan.lengths.n))
    longest = whole(plan.model.longest) if plan.model.longest is not None else None
    most = min(2.0**24, max(16 * middle, 4.0 * whole(plan.lengths.n)))
    most = min(most, longest) if longest else most
    points = sorted({max(1, round(2 ** (k / 2))) for k in range(8, int(2 * math.log2(most)) + 1)})
    plans = [planned(n) for n in points]
    lines: dict[str, list[float]] = {}
    for one in plans:
        whole_ = one.seconds if one.seconds is not None else float(one.needed)
        for name, groups in (("attention", ("attention",)), ("projections", LINEAR), ("logits", ("head",))):
            lines.setdefault(name, []).append(whole_ * sum(one.shares.get(group, 0.0) for group in groups))
        lines.setdefault("total", []).append(whole_)
    series = {name: (points, ys) for name, ys in lines.items() if any(ys)}
    marks = {} if plan.crossover is None or plan.crossover > most else {f"n* = {plan.crossover:,.0f}": plan.crossover}
    where = f" on {plan.machine.name}" if plan.machine is not None else ""
    return plots.series(
        series,
        title=f"{plan.model.title}, {count_said(plan.parameters)} parameters{where}",
        x_label="tokens n",
        y_label="seconds" if timed else "FLOPs of a forward pass",
        log="xy",
        marks=marks,
    )
