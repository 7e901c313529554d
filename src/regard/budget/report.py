"""A plan as text: a table of its parts, the sums, and the bottleneck."""

from __future__ import annotations

import io
from collections.abc import Mapping

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from regard.budget.parts import Call, total
from regard.budget.plan import Plan
from regard.budget.symbols import LETTERS, text, whole
from regard.budget.tables import conditions, shown, table_of
from regard.budget.units import bytes_said, count_said, seconds_said
from regard.terminal import plain

__all__ = ["overview", "printed"]


def printed(plan: Plan) -> str:
    """A plan as text, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(overview(plan))
    lines = console.file.getvalue().rstrip("\n").splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def overview(plan: Plan) -> Group:
    """The table of parts, and the lines under it."""
    return Group(_parts(plan), Text(""), _lines(_summary(plan)))


def _parts(plan: Plan) -> Group:
    what = "training step" if plan.training else "forward pass"
    title = f"{plan.model.title}, {what} of {conditions(plan)}"
    timed = plan.machine is not None
    rows = []
    for row in plan.rows:
        share = f"{row.flops / plan.forward:.0%}" if row.flops else "–"
        cells = [row.name, f"{row.times:,}", shown(row.parameters), count_said(row.flops) if row.flops else "–"]
        cells += [bytes_said(row.kept) if row.kept else "–"] if plan.training else [share]
        rows.append([*cells, *[seconds_said(row.seconds or 0.0)] * timed])
    last = ["total", "", shown(plan.parameters), count_said(plan.forward)]
    last += [bytes_said(plan.memory.activations) if plan.training else "", *[seconds_said(plan.seconds or 0.0)] * timed]
    # In a training step FLOPs are those of its forward pass, time is all of it.
    columns = ["part", "layers", "parameters", *(["forward", "kept"] if plan.training else ["FLOPs", "share"])]
    return table_of(title, [*columns, *["time"] * timed], rows, last=last)


def _summary(plan: Plan) -> dict[str, str]:
    """Name → what is said under it."""
    saved = f"; {count_said(plan.needed)} where masked pairs are skipped" if plan.needed != plan.forward else ""
    said = _theory(plan) | {"forward": f"{count_said(plan.forward)}FLOP{saved}"}
    again = (
        f"; {count_said(plan.recomputation)} more with checkpointing (blocks computed again)" if _stacks(plan) else ""
    )
    said["backward"] = f"{count_said(plan.backward)}FLOP{again}"
    said |= _memory(plan) | ({} if plan.training else _decoding(plan))
    if plan.machine is not None and plan.seconds:
        source = f"measured {plan.machine.measured[:10]}" if plan.machine.measured else "published peak: a bound"
        rate = whole(plan.lengths.batch) * whole(plan.lengths.n) / plan.seconds
        said["time"] = f"{seconds_said(plan.seconds)}, {count_said(rate)} tokens/s on {plan.machine.name} ({source})"
    said["bottleneck"] = plan.bottleneck
    return said


def _memory(plan: Plan) -> dict[str, str]:
    size = plan.memory
    said = {"weights": bytes_said(size.weights)}
    if plan.training:
        said["training"] = f"gradients {bytes_said(size.gradients)}, {plan.optimizer} {bytes_said(size.optimizer)}"
        less = f", {bytes_said(size.recomputed)} with checkpointing" if _stacks(plan) else ""
        said["activations"] = f"{bytes_said(size.activations)} kept for the backward pass{less}"
    if size.matrices:
        how = "stored" if plan.training else "stored, a layer at a time"
        how = "never stored (tiled)" if all(part.tiled for _, part in plan.model.attentions) else how
        said["n × n"] = f"{bytes_said(size.matrices)} of attention weights, {how}"
    also = "" if size.recomputed_peak is None else f", {bytes_said(size.recomputed_peak)} with checkpointing"
    beside = "weights and optimizer state" if plan.training else "weights"
    said["peak"] = f"{bytes_said(size.peak)} above {beside}{also}"
    if size.cache and not plan.training:
        said["cache"] = (
            f"{bytes_said(size.cache)} of keys and values for {plan.lengths.batch:,} × {plan.lengths.n:,} tokens"
        )
    said["in all"] = bytes_said(size.total)
    if plan.machine is not None:
        verb = "fits" if size.total <= plan.machine.memory else "does not fit"
        most = f"; {plan.most:,} {'sequence fits' if plan.most == 1 else 'sequences fit'}" if plan.most else ""
        said["in all"] += f", {verb} the {bytes_said(plan.machine.memory)} of {plan.machine.name}{most}"
    return said


def _stacks(plan: Plan) -> bool:
    return plan.model.kind not in ("attention", "block")


def _theory(plan: Plan) -> dict[str, str]:
    """The theory's exercise, where the model is one attention layer."""
    if plan.model.kind != "attention":
        return {}
    ((_, part),) = plan.model.attentions
    sizes = {weight.name: whole(weight.count) for weight in part.weights()}
    heads = sum(count for name, count in sizes.items() if name.split(".")[0] in ("q", "k", "v"))
    out = sum(count for name, count in sizes.items() if name.split(".")[0] == "out")
    each = f"{heads // whole(part.heads):,} a head, " if part.kv_heads == part.heads else ""
    n, m = (letter for name in "nm" for letter in LETTERS if str(letter) == name)
    stored = part.stored(Call(1, n, n, n) if plan.lengths.m is None else Call(1, n, m, m))
    parts = ", ".join(f"{name} {text(x)}" for name, x in stored.items())
    return {
        "parameters": f"{each}{heads:,} all heads, {out:,} output, {plan.parameters:,} in all",
        "memory": f"{text(total(stored.values()))} values, as the theory counts: {parts}",
    }


def _decoding(plan: Plan) -> dict[str, str]:
    step, n = plan.decoding, plan.lengths.n
    if step is None:
        return {}
    whose = "a token" if plan.lengths.batch == 1 else f"{plan.lengths.batch:,} tokens, one each,"
    said = {"decode": f"{count_said(step.flops)}FLOP and {bytes_said(step.read)} read for {whose} after {n:,}"}
    if step.tokens_per_second is not None:
        said["decode"] += f"; {count_said(step.tokens_per_second)} tokens/s"
    if step.most is not None:
        speed = "" if step.most_per_second is None else f", {count_said(step.most_per_second)} tokens/s together"
        many = "1 such cache fits" if step.most == 1 else f"{step.most:,} such caches fit"
        said["serving"] = (
            f"{many} beside the weights{speed}" if step.most else "not one such cache fits beside the weights"
        )
    return said


def _lines(said: Mapping[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, what in said.items():
        grid.add_row(name, plain(what))
    return grid
