"""Print plans as text and tables: one plan, models that fit, sweeps, machines, alternatives."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from regard._terminal import frameless_table, literal_text
from regard.budget._counted_plan import CountedPlan
from regard.budget._experts_part import Experts
from regard.budget._latent_attention import LatentAttention
from regard.budget._machine import Machine
from regard.budget._memory import COMPUTE_DTYPES
from regard.budget._parts import Call
from regard.budget._plan import Plan
from regard.budget._solve import Fit
from regard.budget._symbols import SYMBOLS, to_int, to_text
from regard.budget._units import format_bytes, format_count, format_seconds

# The headings of columns of shares, by the basis of the shares.
SHARE_HEADINGS = {"time": "% of time", "FLOPs": "% of FLOPs", "unmasked FLOPs": "% unmasked"}
DOES_NOT_FIT = "✗"


# --- one plan --------------------------------------------------------------------------------------------------------


def plan_text(plan: Plan) -> str:
    """A plan as text, 80 columns wide."""
    return as_text(plan_report(plan))


def as_text(report: RenderableType) -> str:
    """A report as text, 80 columns wide."""
    console = Console(file=io.StringIO(), width=80, color_system=None)
    console.print(report)
    lines = console.file.getvalue().rstrip("\n").splitlines()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in lines)


def plan_report(plan: Plan) -> Group:
    """The table of parts, and the summary below it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, line in _summary(plan).items():
        grid.add_row(name, literal_text(line))
    return Group(_parts_table(plan), Text(""), grid)


def _parts_table(plan: Plan) -> Group:
    # For a training step, the FLOPs are those of the forward pass, and the time is that of the whole step.
    columns = ["part", "layers", "parameters"]
    last = ["total", "", f"{plan.parameters:,}", format_count(plan.forward_flops)]
    if plan.training:
        columns += ["forward", "saved", *_time_column(plan)]
        last += [format_bytes(plan.memory.activations), *_time_cell(plan.seconds)]
    else:
        columns += ["FLOPs", *_time_column(plan), SHARE_HEADINGS[plan.share_basis]]
        last += [*_time_cell(plan.seconds), ""]

    rows = []
    for row in plan.rows:
        cells = [row.name, f"{row.repeats:,}", _or_dash(f"{row.parameters:,}", row.parameters)]
        cells.append(_or_dash(format_count(row.flops), row.flops))
        if plan.training:
            cells += [_or_dash(format_bytes(row.saved_bytes), row.saved_bytes), *_time_cell(row.seconds)]
        else:
            share = row.share or 0.0
            cells += [*_time_cell(row.seconds), _or_dash(_share_text(share), share)]
        rows.append(cells)
    title = f"{_full_title(plan)}, {step_name(plan)} of {conditions_text(plan)}"
    return titled_table(title, columns, rows, last=last)


def _share_text(share: float) -> str:
    """A share in percent; a small one is not 0."""
    if 0 < share < 0.01:
        return "< 1%"
    return f"{share:.0%}"


def _full_title(plan: Plan) -> str:
    """The title of the model; for a model of a folder also its class."""
    model = plan.model
    if model.architecture is None or model.architecture == model.title:
        return model.title
    return f"{model.title} ({model.architecture})"


def _summary(plan: Plan) -> dict[str, str]:
    """The lines below the table, by name."""
    lines = _textbook_counts(plan)
    if plan.active_parameters != plan.parameters:
        chosen = _experts_text(plan)
        lines["active"] = f"{plan.active_parameters:,} parameters per token: it uses {chosen}"
    lines["forward"] = f"{format_count(plan.forward_flops)}FLOP"
    if plan.unmasked_flops != plan.forward_flops:
        lines["forward"] += f"; {format_count(plan.unmasked_flops)} if masked pairs are skipped"
    lines["backward"] = f"{format_count(plan.backward_flops)}FLOP"
    if _has_blocks(plan):
        more = format_count(plan.recomputation_flops)
        lines["backward"] += f"; {more} more with checkpointing (blocks computed again)"
    lines |= _memory_lines(plan)
    if not plan.training:
        lines |= _decoding_lines(plan)

    if plan.machine is not None and plan.seconds:
        source = "published peak: a bound"
        if plan.machine.measured:
            source = f"{plan.machine.measurement}; --refresh measures again"
        rate = format_count(to_int(plan.lengths.batch) * to_int(plan.lengths.n) / plan.seconds)
        lines["time"] = f"{format_seconds(plan.seconds)}, {rate} tokens/s on {plan.machine.name} ({source})"
    lines["bottleneck"] = plan.bottleneck
    return lines


def _memory_lines(plan: Plan) -> dict[str, str]:
    memory = plan.memory
    lines = {"weights": format_bytes(memory.weights)}
    if plan.training:
        state = f"{plan.optimizer} {format_bytes(memory.optimizer)}"
        lines["training"] = f"gradients {format_bytes(memory.gradients)}, {state}"
        lines["activations"] = f"{format_bytes(memory.activations)} saved for the backward pass"
        if _has_blocks(plan):  # checkpointing is per block
            lines["activations"] += f", {format_bytes(memory.checkpointed_activations)} with checkpointing"

    if memory.attention_weights:
        stored = "stored, one layer at a time"
        if plan.model.is_tiled:
            stored = "never stored (tiled)"
        elif plan.training:
            stored = "stored"
        lines["n × n"] = f"{format_bytes(memory.attention_weights)} of attention weights, {stored}"

    # Memory that is allocated before a step is not part of its peak.
    lines["peak"] = f"{format_bytes(memory.peak)} above weights"
    if plan.training:
        lines["peak"] += " and optimizer state"
    if memory.checkpointed_peak is not None:
        lines["peak"] += f", {format_bytes(memory.checkpointed_peak)} with checkpointing"
    if memory.cache and not plan.training:  # nothing is cached in training
        tokens = f"{plan.lengths.batch:,} × {plan.lengths.n:,} tokens"
        lines["cache"] = f"{format_bytes(memory.cache)} of {_cached_text(plan)} for {tokens}"

    lines["needs"] = format_bytes(memory.total)
    if plan.available_memory is not None:
        verb = "fits" if plan.fits else "does not fit"
        lines["needs"] += f", {verb} {_memory_text(plan)}"
        if plan.max_batch:
            lines["needs"] += f"; largest batch {plan.max_batch:,}"
        lines |= _longest_lines(plan)
    return lines | _context_lines(plan)


def _experts_text(plan: Plan) -> str:
    """How many experts a token uses in a layer, for each kind of layer that has some."""
    parts = [placed.part for placed in plan.model if isinstance(placed.part, Experts)]
    counts = dict.fromkeys(f"{to_int(part.used):,} of {to_int(part.experts):,} experts" for part in parts)
    return " or ".join(counts)


def _cached_text(plan: Plan) -> str:
    """What the cache holds, and whether it drops some of it."""
    parts = [part for _, part in plan.model.attention_parts]
    text = "keys and values"
    if any(isinstance(part, LatentAttention) for part in parts):
        text = "latent vectors"
    if any(part.rolling and part.reach is not None for part in parts):
        text += ", without those that windows hide,"
    return text


def _memory_text(plan: Plan) -> str:
    """The available memory, and whose it is."""
    size = format_bytes(plan.available_memory or 0)
    if plan.memory_limit is not None or plan.machine is None:
        return f"the given {size}"
    return f"the {size} of {plan.machine.name}"


def _longest_lines(plan: Plan) -> dict[str, str]:
    """The largest n that fits, for each kind of step that the model has."""
    steps = {
        "in one pass": plan.max_tokens_forward,
        "decoding": plan.max_tokens_decoding,
        "training": plan.max_tokens_training,
    }
    known = {step: _count_or_none(n) for step, n in steps.items() if n is not None}
    if plan.decodes_any_length:
        known["decoding"] = "no limit by memory"
    if not known:
        return {}
    line = ", ".join(f"{step} {known[step]}" for step in steps if step in known)
    positions = plan.model.max_tokens
    if positions is not None and positions in steps.values():
        line += f"; there are {to_int(positions or 0):,} learned positions"
    return {"longest n": line}


def _context_lines(plan: Plan) -> dict[str, str]:
    """The length that the model is made for, if this n or the longest n that fits is beyond it."""
    context = plan.context_length
    if context is None:
        return {}
    # Memory is not the only limit: a model gives poor results beyond the length that it is made for.
    line = f"the model is made for n ≤ {context:,}"
    if to_int(plan.lengths.n) > context:
        return {"context": f"{line}; this n is longer"}
    longest = (plan.max_tokens_forward, plan.max_tokens_decoding, plan.max_tokens_training)
    if plan.decodes_any_length or any(n is not None and n > context for n in longest):
        return {"context": line}
    return {}


def _count_or_none(n: int) -> str:
    return f"{n:,}" if n else "none"


def _has_blocks(plan: Plan) -> bool:
    return plan.model.kind not in ("attention", "block")


def _textbook_counts(plan: Plan) -> dict[str, str]:
    """Count parameters and memory as the theory's exercise does; only for a single attention layer."""
    if plan.model.kind != "attention":
        return {}
    ((_, part),) = plan.model.attention_parts
    heads = 0
    out = 0
    for weight in part.weights():
        projection = weight.name.split(".")[0]
        if projection in ("q", "k", "v"):
            heads += to_int(weight.count)
        elif projection == "out":
            out += to_int(weight.count)
    parameters = f"{heads:,} all heads, {out:,} output, {plan.parameters:,} total"
    # If heads share keys and values, there is no number of parameters per head.
    if part.kv_heads == part.heads:
        parameters = f"{heads // to_int(part.heads):,} per head, {parameters}"

    n = SYMBOLS["n"]
    m = n if plan.lengths.m is None else SYMBOLS["m"]
    memory = part.textbook_memory(Call(1, n, m, m))
    terms = ", ".join(f"{name} {to_text(formula)}" for name, formula in memory.items())
    return {
        "parameters": parameters,
        "memory": f"{to_text(sum(memory.values()))} values, as the theory counts: {terms}",
    }


def _decoding_lines(plan: Plan) -> dict[str, str]:
    step = plan.decoding
    if step is None:
        return {}
    tokens = "one token"
    if plan.lengths.batch != 1:
        tokens = f"{plan.lengths.batch:,} tokens, one per sequence,"
    cost = f"{format_count(step.flops)}FLOP and {format_bytes(step.bytes_read)} read"
    lines = {"decode": f"{cost} for {tokens} after {plan.lengths.n:,}"}
    if step.tokens_per_second is not None:
        lines["decode"] += f"; {format_count(step.tokens_per_second)} tokens/s"

    if step.max_batch == 0:
        lines["serving"] = "no memory is left for the cache of one sequence"
    elif step.max_batch is not None:
        lines["serving"] = f"largest batch {step.max_batch:,}, with its caches and the weights in memory"
        if step.max_batch_tokens_per_second is not None:
            lines["serving"] += f", {format_count(step.max_batch_tokens_per_second)} tokens/s together"
    return lines


# --- tables of several plans -----------------------------------------------------------------------------------------


def titled_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    text_columns: int = 1,
    last: Sequence[str] | None = None,
) -> Group:
    """A title and a table. Columns of text come first, then numbers; a line separates the row `last`."""
    table = frameless_table()
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < text_columns else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(literal_text, row))
    if last is not None:
        table.add_row()
        table.add_row(*last)
    return Group(literal_text(title), table)


def _or_dash(text: str, number: float) -> str:
    """The text of a number; a dash for 0, because a dash is easier to skip when reading."""
    return text if number else "–"


def _time_column(plan: Plan) -> list[str]:
    """The heading of the column of times, in a list; an empty list without a machine."""
    if plan.machine is None:
        return []
    return ["time"]


def _time_cell(seconds: float | None) -> list[str]:
    """The cell of the column of times, in a list; an empty list without a machine."""
    if seconds is None:
        return []
    return [format_seconds(seconds)]


def step_name(plan: Plan | CountedPlan) -> str:
    """What the plan counts, in words."""
    return "training step" if plan.training else "forward pass"


def conditions_text(plan: Plan | CountedPlan, without: str = "") -> str:
    """The lengths and dtypes of a table. `without`: the length that differs by row; only its name is shown."""
    lengths = plan.lengths
    sizes = {"batch": f"{lengths.batch:,}", "n": f"{lengths.n:,}"}
    if without in sizes:
        sizes[without] = without
    conditions = [f"{sizes['batch']} × {sizes['n']} tokens"]
    if isinstance(plan, CountedPlan) and not plan.model.reads_tokens:
        conditions = [f"{sizes['batch']} × {plan.model.reads}"]
        if plan.model.reads == "images":
            conditions = ["1 image" if lengths.batch == 1 else f"{sizes['batch']} images"]
    if lengths.m is not None and without != "source":
        conditions.append(f"source {lengths.m:,}")
    conditions.append(plan.dtype)
    if plan.weights is not None:
        conditions.append(f"weights {plan.weights}")
    return ", ".join(conditions)


def on_machine(plan: Plan) -> str:
    return "" if plan.machine is None else f" on {plan.machine.name}"


def fit_table(fits: Sequence[Fit], fields: Mapping[str, object]) -> Group:
    """A ranked table of models that fit. ``used``: the limit that is used most, and its share."""
    first = fits[0].plan
    rows = []
    for fit in fits:
        plan = fit.plan
        cells = [f"{fit.fields['d']:,}", f"{fit.fields['heads']:,}", f"{fit.fields['layers']:,}"]
        cells += [format_count(plan.parameters), format_bytes(plan.memory.total), format_count(plan.forward_flops)]
        name, share = max(fit.used.items(), key=lambda item: item[1])
        mark = "unusual" if fit.unusual else ""
        rows.append([*cells, *_time_cell(plan.seconds), f"{name} {share:.0%}", mark])
    columns = ["d", "heads", "layers", "params", "memory", "FLOPs", *_time_column(first), "used", ""]
    conditions = [conditions_text(first)]
    for name, value in fields.items():
        conditions.append(f"{name}={_field_text(value)}")
    title = f"{first.model.title}s that fit, {step_name(first)} of {', '.join(conditions)}{on_machine(first)}"
    return titled_table(title, columns, rows, text_columns=0)


def _field_text(x: object) -> str:
    """A field as it is written on the command line, with separators in large numbers."""
    if isinstance(x, bool):
        return "yes" if x else "no"
    if isinstance(x, int):
        return f"{x:,}"
    return str(x)


def sweep_table(name: str, plans: Sequence[tuple[int, Plan]], title: str) -> Group:
    """One row per value of the swept size; `title`: the name of the model without this size.

    ``attention``: the share of attention in the cost. A model that generates has its cache in place of ``n × n``; both
    would not fit into 80 columns. Rows that do not fit into the available memory are marked.
    """
    first = plans[0][1]
    has_cache = bool(first.memory.cache) and not first.training
    # Lengths and batches do not change the number of parameters.
    varies = len({plan.parameters for _, plan in plans}) > 1
    rows = []
    for value, plan in plans:
        memory = plan.memory
        cells = [f"{value:,}"]
        if varies:
            cells.append(format_count(plan.parameters))
        cells += [format_count(plan.forward_flops), _share_text(plan.shares.get("attention", 0.0))]
        cells.append(format_bytes(memory.cache if has_cache else memory.attention_weights))
        cells += [format_bytes(memory.peak), _marked_total(plan, plans), *_time_cell(plan.seconds)]
        rows.append(cells)

    # The basis can differ between rows: a sequence of one token has no masked pairs.
    basis = max((plan.share_basis for _, plan in plans), key=len)
    columns = [name.replace("_", "_\n")]
    if varies:
        columns.append("params")
    columns += ["FLOPs", f"attention\n{SHARE_HEADINGS[basis]}", "cache" if has_cache else "n × n"]
    columns += ["peak", "total", *_time_column(first)]
    conditions = conditions_text(first, without=name)
    heading = f"{title}, {step_name(first)} of {conditions}{on_machine(first)}, by {name}"
    if not varies:
        heading += f"; {format_count(first.parameters)} parameters"
    notes = []
    if any(plan.fits is False for _, plan in plans):
        notes.append(f"{DOES_NOT_FIT} does not fit {_memory_text(first)}")
    context = first.context_length
    if context is not None and any(to_int(plan.lengths.n) > context for _, plan in plans):
        notes.append(f"The model is made for n ≤ {context:,}.")
    table = titled_table(heading, columns, rows, text_columns=0)
    if not notes:
        return table
    return Group(table, Text(""), *map(literal_text, notes))


def _marked_total(plan: Plan, plans: Sequence[tuple[int, Plan]]) -> str:
    """The total memory of a plan, marked if it does not fit; without a mark there is room for one, to align numbers."""
    total = format_bytes(plan.memory.total)
    if plan.fits is False:
        return f"{total} {DOES_NOT_FIT}"
    if any(other.fits is False for _, other in plans):
        return f"{total}  "
    return total


def machine_table(machines: Iterable[Machine]) -> Group:
    """Machines with their published figures."""
    rows = []
    for machine in machines:
        peaks = []
        for dtype in COMPUTE_DTYPES:
            rate = machine.peak.get(dtype, 0.0)
            peaks.append(_or_dash(f"{rate / 1e12:,.1f}", rate))
        memory = f"{machine.memory / 2**30:,.0f} GiB"
        rows.append([machine.name, *peaks, f"{machine.bandwidth / 1e9:,.0f}", memory])
    title = "Machines by name: published dense peaks in TFLOP/s, bandwidth and memory"
    return titled_table(title, ["name", *COMPUTE_DTYPES, "GB/s", "memory"], rows)
