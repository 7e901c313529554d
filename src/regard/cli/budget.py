"""``regard budget MODEL FIELDS``: parameters, FLOPs, bytes and time of a model, counted before it exists."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from regard import plots
from regard.budget import compare as comparing
from regard.budget import machine as machines
from regard.budget import report, solve, tables
from regard.budget.configs import from_config
from regard.budget.fields import build, in_letters, read_fields
from regard.budget.formulas import formulas
from regard.budget.machine import Machine
from regard.budget.model import Model
from regard.budget.plan import Plan, plan
from regard.budget.spec import KINDS
from regard.budget.symbols import latex
from regard.budget.this_machine import this
from regard.budget.units import parse, parse_whole
from regard.terminal import plain

FITTED = {"vocab": 32000}  # what a model that is looked for has, unless it is said


def budget(
    model: Annotated[
        str | None, typer.Argument(help=f"{', '.join(KINDS)}; or a config.json, or its folder", show_default=False)
    ] = None,
    fields: Annotated[
        list[str] | None, typer.Argument(help="sizes: d=512 heads=8 layers=6 vocab=32000 bias=no …", show_default=False)
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="n; 512 unless given", show_default=False)] = None,
    source: Annotated[str | None, typer.Option(help="m, of what an encoder reads; n unless given")] = None,
    batch: Annotated[str, typer.Option(help="sequences at once")] = "1",
    train: Annotated[bool, typer.Option("--train", help="a training step instead of a forward pass")] = False,
    optimizer: Annotated[str, typer.Option(help="adam, adam32, momentum, sgd, none")] = "adam",
    attention: Annotated[str, typer.Option(help="tiled, or plain, which stores n × n")] = "tiled",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, float64")] = "float32",
    weights: Annotated[str | None, typer.Option(help="of weights alone: int8, int4")] = None,
    machine: Annotated[
        str | None, typer.Option(help="'this' (measured once, 5 s), or one by name; 'list' names them")
    ] = None,
    fit: Annotated[str | None, typer.Option(help="params=110M,memory=2GiB,flops=1T,time=10ms: what fits?")] = None,
    sweep: Annotated[str | None, typer.Option(help="n=256:65536 (doubling), or d=256,512 or any other field")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="attention beside recurrence and convolution")] = False,
    formula: Annotated[bool, typer.Option("--formula", help="formulas instead of numbers, and LaTeX")] = False,
    plot: Annotated[Path | None, typer.Option(help="cost against n, as .png, .svg or .pdf")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="measure 'this' machine anew")] = False,
) -> None:
    """Count parameters, FLOPs, bytes and time of a model, and name its bottleneck.

    regard budget attention d=512 heads=8 bias=no

    regard budget gpt2/config.json --tokens 1024 --train --machine A100-80GB --dtype bfloat16

    regard budget --fit params=110M,memory=2GiB --tokens 4096
    """
    out = _Out(as_json)
    with out.errors():
        if machine == "list":
            return out.machines()
        chosen = _machine(machine, refresh)
        if attention not in ("tiled", "plain"):
            raise ValueError(f"--attention is {attention!r}; it is tiled or plain")
        options: dict[str, Any] = {
            "source": None if source is None else parse_whole("--source", source),
            "batch": parse_whole("--batch", batch),
            "dtype": dtype,
            "weights": weights,
            "training": train,
            "optimizer": optimizer,
            "machine": chosen,
        }
        length = None if tokens is None else parse_whole("--tokens", tokens)

        def planned(found: Model, n: int | None = length) -> Plan:
            return plan(found if attention == "tiled" else found.plain(), n, **options)

        kind, given = _asked(model, fields or [], fit)
        if fit is not None:
            _refuse("--fit", {"--sweep": sweep, "--plot": plot, "--formula": formula, "--compare": compare})
            return _fit(out, kind, given, fit, planned)
        found = from_config(model) if kind is None and model is not None else build(str(kind), given)
        if formula:
            _refuse("--formula", {"--sweep": sweep, "--plot": plot, "--compare": compare})
            return out.formulas(found, None if kind is None else in_letters(kind, given))
        if compare:
            _refuse("--compare", {"--sweep": sweep, "--plot": plot})
            return out.compared(found, planned(found))
        if sweep is not None:
            _refuse("--sweep", {"--plot": plot})
            return _sweep(out, kind, given, found, sweep, planned)
        result = planned(found)
        if plot is not None:
            _plot(result, found, planned, plot)
        out.plan(result)


def _asked(model: str | None, fields: list[str], fit: str | None) -> tuple[str | None, dict[str, Any]]:
    """The kind and its fields; no kind where a file describes the model."""
    if model is not None and "=" in model:
        fields, model = [model, *fields], None
    if model is None:
        if fit is None:
            raise ValueError(f"give a kind of model ({', '.join(KINDS)}) and its fields, or a config.json; see --help")
        model = "decoder"
    if model in KINDS:
        given = read_fields(model, fields)
        takes_words = fit is not None and model in ("encoder", "decoder", "encoder-decoder")
        return model, (FITTED | given if takes_words else given)
    if fields:
        raise ValueError(f"{model} is no kind of model ({', '.join(KINDS)}), and a config.json takes no fields")
    if fit is not None:
        raise ValueError("--fit looks for dimensions, and a config.json has them; give a kind of model instead")
    return None, {}


def _machine(name: str | None, refresh: bool) -> Machine | None:
    if refresh and name != "this":
        raise ValueError("--refresh measures this machine anew; give --machine this too")
    if name is None:
        return None
    if name != "this":
        return machines.named(name)
    console = Console(stderr=True)
    with console.status("measuring this machine (once, about 5 s)"):
        return this(refresh)


def _refuse(what: str, unused: dict[str, Any]) -> None:
    for name, value in unused.items():
        if value not in (None, False):
            raise ValueError(f"{what} takes no {name}; ask for one at a time")


def _fit(out: _Out, kind: str | None, given: dict[str, Any], asked: str, planned: Callable[[Model], Plan]) -> None:
    limits = {}
    for one in asked.split(","):
        name, equals, value = one.strip().partition("=")
        if name not in solve.LIMITS or not equals:
            raise ValueError(f"--fit has {one.strip()!r}; limits are {', '.join(solve.LIMITS)}, e.g. params=110M")
        limits[name] = parse(name, value, solve.LIMITS[name])
    assert kind is not None
    out.fits(solve.fit(kind, given, limits, lambda fields: planned(build(kind, fields))))


def _sweep(
    out: _Out, kind: str | None, given: dict[str, Any], found: Model, asked: str, planned: Callable[..., Plan]
) -> None:
    name, equals, values = asked.partition("=")
    if not equals or not values:
        raise ValueError(f"--sweep is {asked!r}; it is written n=256:65536 or d=256,512,1024")
    if name in ("n", "tokens"):
        return out.sweep("n", [(n, planned(found, n)) for n in _values(name, values)])
    if kind is None:
        raise ValueError(f"--sweep {name}: a config.json has its sizes; sweep n, or give a kind of model with fields")
    rows = []
    for value in _values(name, values):
        fields = given | read_fields(kind, [f"{name}={value}"])
        rows.append((value, planned(build(kind, fields))))
    out.sweep(name, rows)


def _values(name: str, given: str) -> list[int]:
    if ":" not in given:
        return [parse_whole(name, one) for one in given.split(",")]
    first, _, last = given.partition(":")
    low, high = parse_whole(name, first), parse_whole(name, last)
    if high < low:
        raise ValueError(f"--sweep {name}={given} goes from {low} down to {high}; give the smaller one first")
    found = [low]
    while 2 * found[-1] <= high:
        found.append(2 * found[-1])
    return found


def _plot(result: Plan, found: Model, planned: Callable[..., Plan], file: Path) -> None:
    if found.tokens is not None:
        raise ValueError("--plot draws cost against n, and an image model has one n; leave it out")
    figure = tables.costs(result, lambda n: planned(found, n))
    plots.save(figure, file)


class _Out:
    """What is printed: tables, or JSON alone."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console()

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What goes wrong is JSON too, beside the line on standard error."""
        try:
            yield
        except (ValueError, TypeError, OSError, ImportError) as error:
            if self.as_json:
                self._json({"error": str(error)})
            raise

    def _json(self, found: Any) -> None:
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False))

    def plan(self, result: Plan) -> None:
        if self.as_json:
            return self._json(result.to_dict())
        self.console.print(report.overview(result))

    def machines(self) -> None:
        found = [machines.named(name) for name in machines.machines()]
        if self.as_json:
            return self._json([json.loads(one.to_json()) for one in found])
        self.console.print(tables.machine_table(found))

    def formulas(self, found: Model, letters: Model | None) -> None:
        sizes = formulas(found)
        general = None if letters is None else formulas(letters)
        if self.as_json:
            both = {"letters": general, "sizes": sizes}
            return self._json({name: x and tables.formula_json(x) for name, x in both.items()})
        if general is not None:
            self.console.print(tables.formula_table(general, f"{found.title}, in letters"))
            self.console.print()
        self.console.print(tables.formula_table(sizes, f"{found.title}, with its sizes"))
        self.console.print()
        for name, x in (general or sizes).items():
            self.console.print(plain(f"{name.strip()}: {latex(x)}"), soft_wrap=True)

    def compared(self, found: Model, result: Plan) -> None:
        n, d = result.lengths.n, found.d
        sizes = (int(n), int(d), 3, 3)
        if self.as_json:
            rows = [{"way": way.name.strip(), "order": way.order} | way.at(*sizes) for way in comparing.ways()]
            return self._json(rows)
        self.console.print(tables.compared(comparing.ways(), *sizes))

    def fits(self, fits: list[solve.Fit]) -> None:
        if self.as_json:
            rows = [{"fields": dict(x.fields), "usual": x.usual, "used": x.used} | x.plan.to_dict() for x in fits]
            return self._json(rows)
        self.console.print(tables.fitted(fits))

    def sweep(self, name: str, rows: list[tuple[int, Plan]]) -> None:
        if self.as_json:
            return self._json([{name: value} | found.to_dict() for value, found in rows])
        self.console.print(tables.swept(name, rows))
