"""The output of ``regard budget``: a plan, models that fit, a sweep, comparisons, formulas, names or machines."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from regard import plots
from regard._errors import RegardError
from regard._terminal import literal_text, printable_json
from regard.budget import _report as report
from regard.budget._attention_vs_alternatives import alternatives
from regard.budget._compare_models import compare
from regard.budget._cost_figure import plot_costs
from regard.budget._counted_model import CountedModel
from regard.budget._counted_report import counted_report
from regard.budget._formulas import formulas
from regard.budget._machine import Machine, find_machine, machines
from regard.budget._machine_benchmark import this_machine
from regard.budget._make_plan import DEFAULT_TOKENS, plan
from regard.budget._model import Model
from regard.budget._models_from_fields import FIELDS, INTEGER_FIELDS
from regard.budget._plan import Plan
from regard.budget._presets import PRESETS
from regard.budget._report_comparison import alternatives_table, comparison_table, preset_table
from regard.budget._report_formulas import formula_json, formula_table, latex_lines
from regard.budget._solve import LIMITS, fit
from regard.budget._symbols import to_int
from regard.budget._units import parse_integer, parse_quantity
from regard.budget._walk_counted import MOST_WALK_SECONDS
from regard.cli.budget_model import ACCEPTED, ModelChoice, choose_from_line, choose_model, distinct_titles
from regard.cli.output_file import check_figure_file

SILENT_SECONDS = 3.0  # after so long a count by walking says that it goes on
FIT_DEFAULTS = {"vocab": 32000}  # fixed fields of --fit if they are not given
COMPARED_SIZES = (3, 3)  # for --compare: width of position codes, taps of the convolution

# The options that each mode reads; other options are refused, not ignored.
MODEL_OPTIONS = {"--tokens", "--source", "--batch", "--train", "--optimizer", "--attention", "--dtype", "--weights"}
COUNTING = MODEL_OPTIONS | {"--machine", "--refresh"}
READS = {
    "": COUNTING | {"--plot", "--memory"},  # a plan, the answer without a mode
    "--against": COUNTING | {"--memory"},
    "--list": set(),
    "--fit": COUNTING,
    "--sweep": COUNTING | {"--memory"},
    "--compare": {"--tokens"},
    "--formula": {"--attention"},
    "--machine list": {"--machine"},
}


@dataclass(frozen=True)
class BudgetRequest:
    """A parsed command line: the model and its fields, options by name, and the modes. At most one mode is set."""

    model: str | None
    fields: list[str]
    options: dict[str, Any]
    modes: dict[str, Any]
    as_json: bool

    @property
    def mode(self) -> str:
        """The one mode that is set; "" for a plan."""
        modes = [name for name, value in self.modes.items() if value not in (None, False)]
        if self.options["--machine"] == "list":
            modes.insert(0, "--machine list")
        if len(modes) > 1:
            raise RegardError(f"{modes[0]} and {modes[1]} cannot be combined; give one of them")
        return "".join(modes)

    def check_options(self) -> None:
        """Raise an error for options that the mode would ignore, and for unknown values."""
        for name, value in self.options.items():
            if value not in (None, False) and name not in READS[self.mode]:
                raise RegardError(f"{self.mode} takes no {name}")
        if self.options["--optimizer"] is not None and not self.options["--train"]:
            raise RegardError("--optimizer needs --train")
        if self.options["--refresh"] and self.options["--machine"] != "this":
            raise RegardError("--refresh needs --machine this")
        if self.options["--attention"] not in (None, "tiled", "plain"):
            raise RegardError(f"--attention must be tiled or plain, got {self.options['--attention']!r}")

    def integer(self, name: str) -> int | None:
        """The value of an option that is an integer; None if it is not given."""
        text = self.options[name]
        return None if text is None else parse_integer(name, text)

    @property
    def is_tiled(self) -> bool:
        """Whether attention never stores its n × n weights."""
        return self.options["--attention"] != "plain"

    def plan_options(self) -> dict[str, Any]:
        """The arguments of `plan` besides a model and its length."""
        options = {
            "source": self.integer("--source"),
            "batch": self.integer("--batch"),
            "dtype": self.options["--dtype"],
            "weights": self.options["--weights"],
            "optimizer": self.options["--optimizer"],
            "machine": _load_machine(self.options["--machine"], self.options["--refresh"]),
        }
        # Options that are not given have the defaults of `plan`.
        arguments = {name: value for name, value in options.items() if value is not None}
        if self.options["--memory"] is not None:
            arguments["memory_limit"] = int(parse_quantity("--memory", self.options["--memory"], "size"))
        return arguments | {"training": self.options["--train"]}


def run_request(request: BudgetRequest) -> None:
    """Print the answer to a request; with --json an error is printed as JSON too."""
    try:
        _print_answer(request)
    except (ValueError, TypeError, OSError, ImportError) as error:
        if request.as_json:
            _print_json({"error": str(error)})
        raise  # the caller prints it on standard error


def _print_answer(request: BudgetRequest) -> None:
    mode = request.mode
    request.check_options()
    if mode == "--machine list":
        if request.model is not None:
            raise RegardError(f"--machine list takes no model, got {request.model}")
        return _print_machines(request)
    if mode == "--list":
        if request.model is not None:
            raise RegardError(f"--list takes no model, got {request.model}")
        return _print_presets(request)
    choice = _choose(request)
    if mode == "--fit":
        return _print_fits(request, str(choice.kind), choice.fields)
    counted = choice.build_counted()
    if counted is not None:
        return _print_counted(request, counted)
    if mode == "--sweep":
        return _print_sweep(request, choice)
    model = _make_model(request, choice)
    if mode == "--formula":
        return _print_formulas(request, model, choice)
    if mode == "--compare":
        return _print_alternatives(request, model)
    if mode == "--against":
        return _print_comparison(request, choice, model)
    _print_plan(request, model)


def _choose(request: BudgetRequest) -> ModelChoice:
    """The model of the command line. With --fit, its fields stay fixed."""
    model = request.model
    field_texts = request.fields
    fits = request.mode == "--fit"

    # If the kind is left out, the command line parser takes the first field for the model.
    if model is not None and "=" in model and not model.lstrip().startswith("{"):
        field_texts = [model, *field_texts]
        model = None
    if model is None:
        if not fits:
            raise RegardError(f"give {ACCEPTED}; see --help")
        model = "decoder"

    choice = choose_model(model, field_texts)
    if not fits:
        return choice
    if choice.kind is None or choice.preset is not None:
        raise RegardError(f"--fit searches for dimensions, but {model} has fixed ones; give a kind of model")
    if "vocab" in FIELDS[choice.kind]:
        return replace(choice, fields=FIT_DEFAULTS | choice.fields)
    return choice


def _make_model(request: BudgetRequest, choice: ModelChoice, changes: dict[str, Any] | None = None) -> Model:
    model = choice.build(changes)
    if request.is_tiled:
        return model
    return model.with_plain_attention()


def _load_machine(name: str | None, refresh: bool) -> Machine | None:
    if name is None:
        return None
    if name != "this":
        return find_machine(name)
    with Console(stderr=True).status("measuring this machine (once, about 5 s)"):
        return this_machine(refresh)


def _print_plan(request: BudgetRequest, model: Model) -> None:
    file: Path | None = request.options["--plot"]
    if file is not None:
        check_figure_file(file)
        if model.fixed_tokens is not None:
            raise RegardError("--plot shows cost against n, but an image model has one n; leave it out")
    result = plan(model, request.integer("--tokens"), **request.plan_options())
    if file is not None:
        plots.save(plot_costs(result), file)
    if request.as_json:
        return _print_json(result.to_dict())
    Console().print(report.plan_report(result))
    if file is not None:
        Console().print(literal_text(f"figure: {file}"), soft_wrap=True)


def _print_counted(request: BudgetRequest, model: CountedModel) -> None:
    """Print the plan of a model without a formula; refuse what only formulas give."""
    needs_formulas = ("--attention", "--machine", "--memory", "--plot")
    refused = [name for name in needs_formulas if request.options[name] is not None]
    if request.mode:
        refused.insert(0, request.mode)
    if refused:
        raise RegardError(f"{refused[0]} needs formulas, but {model.title} is counted by walking; leave it out")
    result = plan(model, request.integer("--tokens"), **request.plan_options())
    with _notice_if_slow():
        result.walk  # noqa: B018  computed here, and read by the report
    if request.as_json:
        return _print_json(result.to_dict())
    Console().print(counted_report(result))


@contextmanager
def _notice_if_slow() -> Iterator[None]:
    """Say on standard error that the model is still being counted, once that takes some seconds."""
    text = (
        f"regard: still counting by walking; this takes at most {MOST_WALK_SECONDS:.0f} s, and fewer tokens take less"
    )
    timer = threading.Timer(SILENT_SECONDS, typer.echo, (text,), {"err": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_fits(request: BudgetRequest, kind: str, fields: dict[str, Any]) -> None:
    limits: dict[str, float | str] = {}
    for text in request.modes["--fit"].split(","):
        name, equals, value = text.strip().partition("=")
        if name not in LIMITS or not equals:
            raise RegardError(f"--fit takes limits of {', '.join(LIMITS)}, e.g. params=110M, got {text.strip()!r}")
        if name in limits:  # otherwise the second value would silently replace the first
            raise RegardError(f"--fit has two limits of {name}; give one")
        limits[name] = value

    plain_attention = not request.is_tiled
    options = request.plan_options()
    fits = fit(kind, limits, request.integer("--tokens"), fields=fields, plain_attention=plain_attention, **options)
    if not request.as_json:
        return Console().print(report.fit_table(fits, fields))
    entries = []
    for each in fits:
        entry = {"fields": dict(each.fields), "unusual": each.unusual, "used": each.used}
        entries.append(entry | each.plan.to_dict())
    _print_json(entries)


def _print_sweep(request: BudgetRequest, choice: ModelChoice) -> None:
    name, _, text = request.modes["--sweep"].partition("=")  # for example n=256:65536
    if not text:
        raise RegardError(
            f"--sweep must be a name with values, such as n=256:65536 or d=256,512, got {request.modes['--sweep']!r}"
        )
    values = _sweep_values(name, text)
    note = ""
    if name in ("n", "batch", "source"):
        rows, note = _sweep_length(request, _make_model(request, choice), name, values)
    else:
        rows = _sweep_field(request, choice, name, values)
    if request.as_json:
        return _print_json([{name: value} | result.to_dict() for value, result in rows])
    # The title of a changed preset has the value of its own row.
    title = choice.preset_title or rows[0][1].model.title
    Console().print(report.sweep_table(name, rows, title))
    if note:
        Console().print(note)


def _sweep_length(
    request: BudgetRequest, model: Model, name: str, values: list[int]
) -> tuple[list[tuple[int, Plan]], str]:
    """Plans by length or batch, and a note about lengths that are left out."""
    argument = {"n": "tokens"}.get(name, name)
    if request.options[f"--{argument}"] is not None:
        raise RegardError(f"--sweep {name} cannot be combined with --{argument}; give one of them")
    valid = values
    note = ""
    if name != "batch" and model.max_tokens is not None:
        valid = [value for value in values if value <= to_int(model.max_tokens)]
        note = f"There are {to_int(model.max_tokens):,} learned positions: longer lengths are left out."
    elif name == "n" and model.image_tokens is not None:
        least = model.image_tokens
        valid = [value for value in values if value >= least]
        note = f"The image has {least:,} tokens: shorter lengths are left out."

    options = {"tokens": request.integer("--tokens"), **request.plan_options()}
    # If no length is valid, the first of them raises the error that explains it.
    rows = []
    for value in valid or values:
        rows.append((value, plan(model, **(options | {argument: value}))))
    if len(valid) in (0, len(values)):
        return rows, ""
    return rows, note


def _sweep_field(request: BudgetRequest, choice: ModelChoice, name: str, values: list[int]) -> list[tuple[int, Plan]]:
    """Plans by the value of a field of the model."""
    if choice.kind is None:
        raise RegardError(f"--sweep must be n, batch or source for a config.json, got {name}; or give a kind of model")
    numbers = [field for field in FIELDS[choice.kind] if field in INTEGER_FIELDS]
    if name not in numbers:
        raise RegardError(f"--sweep must be one of n, batch, source, {', '.join(numbers)}, got {name}")
    if name in choice.fields:
        raise RegardError(f"--sweep {name} cannot be combined with {name}={choice.fields[name]}; give one of them")

    tokens = request.integer("--tokens")
    if name == "reach" and tokens is None:
        # All rows have the same length, one that all of these models can read.
        tokens = min(DEFAULT_TOKENS, *values)
    options = request.plan_options()
    rows = []
    for value in values:
        model = _make_model(request, choice, {name: value})
        rows.append((value, plan(model, tokens, **options)))
    return rows


def _sweep_values(name: str, text: str) -> list[int]:
    """Parse ``"256,512"`` to these two numbers, and ``"256:2048"`` to 256, 512, 1024, 2048."""
    option = f"--sweep {name}"
    if ":" not in text:
        return [parse_integer(option, value) for value in text.split(",")]
    first, _, last = text.partition(":")
    low = parse_integer(option, first)
    high = parse_integer(option, last)
    if high < low:
        raise RegardError(f"{option} must have the smaller number first, got {text}")
    values = [low]
    while 2 * values[-1] <= high:
        values.append(2 * values[-1])
    return values


def _print_machines(request: BudgetRequest) -> None:
    known = list(map(find_machine, machines()))
    if not request.as_json:
        return Console().print(report.machine_table(known))
    _print_json([json.loads(machine.to_json()) for machine in known])


def _print_formulas(request: BudgetRequest, model: Model, choice: ModelChoice) -> None:
    sizes = formulas(model)
    # The model of a config.json has numbers for all sizes, so it has no formulas in symbols.
    general = {}
    symbolic = choice.build_symbolic()
    if symbolic is not None:
        if not request.is_tiled:
            symbolic = symbolic.with_plain_attention()
        general = formulas(symbolic)
    if request.as_json:
        return _print_json({"letters": formula_json(general) or None, "sizes": formula_json(sizes)})
    console = Console()
    if general:
        console.print(formula_table(general, f"{model.title}, in symbols"))
        console.print()
    console.print(formula_table(sizes, f"{model.title}, with its sizes"))
    console.print()
    for line in latex_lines(general or sizes):
        console.print(literal_text(line), soft_wrap=True)


def _print_alternatives(request: BudgetRequest, model: Model) -> None:
    n = to_int(plan(model, request.integer("--tokens")).lengths.n)
    sizes = (n, to_int(model.d), *COMPARED_SIZES)
    if not request.as_json:
        return Console().print(alternatives_table(alternatives(), *sizes))
    entries = []
    for layer in alternatives():
        costs: dict[str, Any] = layer.at(*sizes)
        costs["saved_values"] = costs.pop("memory")  # elsewhere a memory is in bytes
        entries.append({"way": layer.name.strip(), "order": layer.order} | costs)
    _print_json(entries)


def _print_comparison(request: BudgetRequest, choice: ModelChoice, model: Model) -> None:
    other_choice = choose_from_line(request.modes["--against"])
    other = _make_model(request, other_choice)
    titles = distinct_titles((choice, other_choice), (model, other))
    model = replace(model, title=titles[0])
    other = replace(other, title=titles[1])
    comparison = compare(model, other, request.integer("--tokens"), **request.plan_options())
    if request.as_json:
        return _print_json(comparison.to_dict())
    Console().print(comparison_table(comparison))


def _print_presets(request: BudgetRequest) -> None:
    if not request.as_json:
        return Console().print(preset_table(PRESETS.values()))
    entries = []
    for preset in PRESETS.values():
        model = preset.build()
        entries.append(
            {
                "preset": preset.name,
                "model": preset.title,
                "kind": model.kind,
                "tokens": preset.tokens or model.fixed_tokens,
                "parameters": to_int(model.parameters),
                "published_by": preset.source,
                "hub": preset.hub or None,
            }
        )
    _print_json(entries)


def _print_json(data: Any) -> None:
    typer.echo(printable_json(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)))
