"""What ``regard budget`` answers: a plan, what fits, a sweep, a comparison, formulas, machines; as tables or JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from regard import plots
from regard.budget import compare, report, solve, tables
from regard.budget.configs import from_config
from regard.budget.fields import FIELDS, WHOLE, build, in_letters, read_fields
from regard.budget.formulas import formulas
from regard.budget.machine import Machine, machines, named
from regard.budget.model import Model
from regard.budget.plan import Plan, plan
from regard.budget.spec import KINDS
from regard.budget.symbols import whole
from regard.budget.this_machine import this
from regard.budget.units import parse, parse_whole
from regard.terminal import plain

FITTED = {"vocab": 32000}  # what a model that is looked for has, unless it is said

# The options that each mode reads; what it would ignore is refused.
COUNTING = {
    *("--tokens", "--source", "--batch", "--train", "--optimizer", "--attention", "--dtype", "--weights"),
    *("--machine", "--refresh"),
}
READS = {
    "": COUNTING | {"--plot"},
    "--fit": COUNTING,
    "--sweep": COUNTING,
    "--compare": {"--tokens"},
    "--formula": {"--attention"},
    "--machine list": {"--machine"},
}


@dataclass(frozen=True)
class Asked:
    """A command line: the model and its fields, options by name, and which of several answers is wanted."""

    model: str | None
    fields: list[str]
    options: dict[str, Any]
    modes: dict[str, Any]
    as_json: bool

    @property
    def mode(self) -> str:
        """The one answer that is wanted."""
        wanted = [name for name, value in self.modes.items() if value not in (None, False)]
        if self.options["--machine"] == "list":
            wanted = ["--machine list", *wanted]
        if len(wanted) > 1:
            raise ValueError(f"{wanted[0]} takes no {wanted[1]}; ask for one at a time")
        return wanted[0] if wanted else ""

    def check(self) -> None:
        """Refuse what the answer would not look at."""
        for name, value in self.options.items():
            if value not in (None, False) and name not in READS[self.mode]:
                raise ValueError(f"{self.mode} takes no {name}")
        if self.options["--optimizer"] is not None and not self.options["--train"]:
            raise ValueError("--optimizer is for a training step; give --train too")
        if self.options["--refresh"] and self.options["--machine"] != "this":
            raise ValueError("--refresh measures this machine anew; give --machine this too")
        if self.options["--attention"] not in (None, "tiled", "plain"):
            raise ValueError(f"--attention is {self.options['--attention']!r}; it is tiled or plain")

    def whole(self, name: str) -> int | None:
        """An option that is a whole number."""
        given = self.options[name]
        return None if given is None else parse_whole(name, given)

    @property
    def tiled(self) -> bool:
        """Whether attention never stores n × n."""
        return self.options["--attention"] != "plain"

    def counting(self) -> dict[str, Any]:
        """What ``plan`` takes beside a model and its length."""
        given = {
            "source": self.whole("--source"),
            "batch": self.whole("--batch"),
            "dtype": self.options["--dtype"],
            "weights": self.options["--weights"],
            "optimizer": self.options["--optimizer"],
            "machine": _machine(self.options["--machine"], self.options["--refresh"]),
        }
        return {name: x for name, x in given.items() if x is not None} | {"training": self.options["--train"]}


def answer(asked: Asked) -> None:
    """Print what is asked for; what goes wrong is JSON too where that was wanted, beside the line on standard error."""
    with _errors(asked.as_json):
        mode = asked.mode
        asked.check()
        if mode == "--machine list":
            if asked.model is not None:
                raise ValueError(f"--machine list takes no model, got {asked.model}")
            return _machines(asked)
        kind, fields = _described(asked)
        if mode == "--fit":
            return _fit(asked, kind, fields)
        if mode == "--sweep":
            return _sweep(asked, kind, fields)
        model = _model(asked, kind, fields)
        if mode == "--formula":
            return _formulas(asked, model, None if kind is None else in_letters(kind, fields))
        if mode == "--compare":
            return _compare(asked, model)
        _plan(asked, model)


@contextmanager
def _errors(as_json: bool) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        if as_json:
            _json({"error": str(error)})
        raise


def _described(asked: Asked) -> tuple[str | None, dict[str, Any]]:
    """The kind and its fields; no kind where a file describes the model."""
    model, fields, fits = asked.model, asked.fields, asked.mode == "--fit"
    if model is not None and "=" in model:
        fields, model = [model, *fields], None
    if model is None:
        if not fits:
            raise ValueError(f"give a kind of model ({', '.join(KINDS)}) and its fields, or a config.json; see --help")
        model = "decoder"
    if model.lower() in KINDS:
        kind = model.lower()
        given = read_fields(kind, fields)
        return kind, (FITTED | given if fits and "vocab" in FIELDS[kind] else given)
    if fields:
        raise ValueError(f"{model} is no kind of model ({', '.join(KINDS)}), and a config.json takes no fields")
    if fits:
        raise ValueError("--fit looks for dimensions, and a config.json has them; give a kind of model instead")
    return None, {}


def _model(asked: Asked, kind: str | None, fields: dict[str, Any]) -> Model:
    found = from_config(str(asked.model)) if kind is None else build(kind, fields)
    return found if asked.tiled else found.plain()


def _machine(name: str | None, refresh: bool) -> Machine | None:
    if name is None or name != "this":
        return None if name is None else named(name)
    with Console(stderr=True).status("measuring this machine (once, about 5 s)"):
        return this(refresh)


def _plan(asked: Asked, model: Model) -> None:
    found = plan(model, asked.whole("--tokens"), **asked.counting())
    file: Path | None = asked.options["--plot"]
    if file is not None:
        if model.tokens is not None:
            raise ValueError("--plot draws cost against n, and an image model has one n; leave it out")
        plots.save(tables.costs(found), file)
    if asked.as_json:
        return _json(found.to_dict())
    Console().print(report.overview(found))
    if file is not None:
        Console().print(plain(f"figure: {file}"), soft_wrap=True)


def _fit(asked: Asked, kind: str | None, fields: dict[str, Any]) -> None:
    limits: dict[str, float] = {}
    for one in asked.modes["--fit"].split(","):
        name, equals, value = one.strip().partition("=")
        if name not in solve.LIMITS or not equals:
            raise ValueError(f"--fit has {one.strip()!r}; limits are {', '.join(solve.LIMITS)}, e.g. params=110M")
        if name in limits:
            raise ValueError(f"--fit limits {name} twice; give one limit")
        limits[name] = parse(name, value, solve.LIMITS[name])
    fits = solve.fit(
        str(kind), limits, asked.whole("--tokens"), fields=fields, plain=not asked.tiled, **asked.counting()
    )
    if asked.as_json:
        return _json(
            [{"fields": dict(x.fields), "unusual": x.unusual, "used": x.used} | x.plan.to_dict() for x in fits]
        )
    Console().print(tables.fitted(fits, fields))


def _sweep(asked: Asked, kind: str | None, fields: dict[str, Any]) -> None:
    name, equals, values = asked.modes["--sweep"].partition("=")
    if not equals or not values:
        raise ValueError(f"--sweep is {asked.modes['--sweep']!r}; it is written n=256:65536 or d=256,512,1024")
    options, tokens = asked.counting(), asked.whole("--tokens")
    rows: list[tuple[int, Plan]] = []
    note = ""
    if name in ("n", "batch", "source"):
        if asked.options["--tokens" if name == "n" else f"--{name}"] is not None:
            raise ValueError(f"--sweep {name}: it is swept and given; leave one out")
        model = _model(asked, kind, fields)
        numbers = _values(name, values)
        within = [x for x in numbers if name == "batch" or model.longest is None or x <= whole(model.longest)]
        for value in within or numbers:  # where none is within, the first says so
            given = {"tokens": value} if name == "n" else {"tokens": tokens, name: value}
            rows.append((value, plan(model, **{**options, **given})))
        if len(within) < len(numbers) and not asked.as_json:
            note = f"Learned positions reach {whole(model.longest or 0):,}: longer ones are left out."
    else:
        if name == "reach" and tokens is None:
            tokens = min(512, *_values(name, values))  # one length for all rows
        rows = [(x, plan(_swept(asked, kind, fields, name, x), tokens, **options)) for x in _values(name, values)]
    if asked.as_json:
        return _json([{name: value} | found.to_dict() for value, found in rows])
    Console().print(tables.swept(name, rows))
    if note:
        Console().print(note)


def _swept(asked: Asked, kind: str | None, fields: dict[str, Any], name: str, value: int) -> Model:
    if kind is None:
        raise ValueError(
            f"--sweep {name}: a config.json has its sizes; sweep n, batch or source, or give a kind of model"
        )
    numbers = [one for one in FIELDS[kind] if one in WHOLE]
    if name not in numbers:
        raise ValueError(f"--sweep {name}: what can be swept is n, batch, source, {', '.join(numbers)}")
    if name in fields:
        raise ValueError(f"--sweep {name}: it is swept and given; leave one out")
    return _model(asked, kind, fields | {name: value})


def _values(name: str, given: str) -> list[int]:
    if ":" not in given:
        return [parse_whole(f"--sweep {name}", one) for one in given.split(",")]
    first, _, last = given.partition(":")
    low, high = parse_whole(f"--sweep {name}", first), parse_whole(f"--sweep {name}", last)
    if high < low:
        raise ValueError(f"--sweep {name}={given} goes from {low} down to {high}; give the smaller one first")
    found = [low]
    while 2 * found[-1] <= high:
        found.append(2 * found[-1])
    return found


def _machines(asked: Asked) -> None:
    found = [named(name) for name in machines()]
    if asked.as_json:
        return _json([json.loads(one.to_json()) for one in found])
    Console().print(tables.machine_table(found))


def _formulas(asked: Asked, model: Model, letters: Model | None) -> None:
    if letters is not None and not asked.tiled:
        letters = letters.plain()
    sizes, general = formulas(model), None if letters is None else formulas(letters)
    if asked.as_json:
        both = {"letters": general, "sizes": sizes}
        return _json({name: x and tables.formula_json(x) for name, x in both.items()})
    console = Console()
    if general is not None:
        console.print(tables.formula_table(general, f"{model.title}, in letters"))
        console.print()
    console.print(tables.formula_table(sizes, f"{model.title}, with its sizes"))
    console.print()
    for line in tables.formula_latex(general or sizes):
        console.print(plain(line), soft_wrap=True)


def _compare(asked: Asked, model: Model) -> None:
    found = plan(model, asked.whole("--tokens"))
    sizes = (whole(found.lengths.n), whole(model.d), 3, 3)
    if asked.as_json:
        return _json([{"way": way.name.strip(), "order": way.order} | way.at(*sizes) for way in compare.ways()])
    Console().print(tables.compared(compare.ways(), *sizes))


def _json(found: Any) -> None:
    typer.echo(json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False))
