"""``regard doctor``: what is here, and whether it computes right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard.budget.units import bytes_said
from regard.terminal import plain, plain_table


def doctor(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """What regard finds on this machine, and a self-test against float64; exits with 1 where something is wrong.

    regard doctor --json
    """
    # Here, not at the top: no other command needs it.
    from regard.doctor import examine

    console = Console(highlight=False, stderr=as_json)
    with console.status("testing, about 2 s"):
        found = examine()
    if as_json:
        typer.echo(json.dumps(_finite(found), ensure_ascii=False, allow_nan=False, indent=1))
    else:
        _print(console, found)
    if not found["well"]:
        raise typer.Exit(1)


def _print(console: Console, found: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, say in SAID.items():
        answer = found[name]
        lines = [f"not known: {answer['error']}"] if "error" in answer else say(answer)
        for at, line in enumerate(lines):
            table.add_row(Text("" if at else LABELS.get(name, name), style="bold"), plain(line))
    console.print(table)
    if "rows" in found["self_test"]:
        console.print()
        console.print(_tested(found["self_test"], wide=console.width >= 75))
    console.print()
    for note in found["notes"]:
        console.print(Text("note: ", style="yellow") + plain(note))
    for problem in found["problems"]:
        console.print(Text("✗ ", style="red") + plain(problem))
    if found["well"]:
        console.print(Text("✓ ", style="green") + plain("all well"))


def _versions(given: dict[str, str]) -> list[str]:
    return [", ".join(f"{name} {version}" for name, version in given.items())]


def _cpu(given: dict[str, Any]) -> list[str]:
    cores = f"{given['cores']} {'core' if given['cores'] == 1 else 'cores'}"
    lines = [f"{given['model']}, {given['architecture']}, {cores}"]
    if given["has"] is not None:
        lines.append(f"has {' '.join(given['has']) or 'none of what matters here'}")
        lines += [f"lacks {' '.join(given['lacks'])}"] if given["lacks"] else []
    return lines


def _memory(given: dict[str, int | None]) -> list[str]:
    total, available = given["total"], given["available"]
    if total is None:
        return ["the system does not tell"]
    return [bytes_said(total) + ("" if available is None else f", {bytes_said(available)} of it free")]


def _native(given: dict[str, Any]) -> list[str]:
    if not given["built"]:
        return [given["why"]]
    forced = " (by REGARD_ISA)" if given["forced"] else ""
    return [f"built, can run {', '.join(given['instruction_sets'])}; in use {given['in_use']}{forced}"]


def _threads(given: dict[str, Any]) -> list[str]:
    asked = given["OMP_NUM_THREADS"]
    lines = [f"{given['torch']} of torch, OMP_NUM_THREADS {'not set' if asked is None else asked}"]
    return lines + [f"OpenMP: {_short(file)}" for file in given["openmp"]]


def _extras(given: dict[str, dict[str, str | None]]) -> list[str]:
    there = [f"{one['package']} {one['version']}" for one in given.values() if one["version"] is not None]
    missing = [one for one in given.values() if one["version"] is None]
    return [", ".join(there)] * bool(there) + [
        f"{one['package']} is missing, for {one['for']}: {one['install']}" for one in missing
    ]


def _kept(given: dict[str, str]) -> list[str]:
    what = {"lab": "what the lab has made", "machine": "this machine's figures"}
    return [f"{what[name]}: {_at_home(file)}" for name, file in given.items()]


SAID = {
    "versions": _versions,
    "cpu": _cpu,
    "memory": _memory,
    "native": _native,
    "threads": _threads,
    "extras": _extras,
    "kept": _kept,
}
LABELS = {"kept": "kept in"}


def _tested(given: dict[str, Any], *, wide: bool) -> Table:
    """A row a kind of call; a narrow terminal gets the ratios alone."""
    how = f"{given['backend']} backend, {given['seconds']:.1f} s"
    table = plain_table(f"self-test, {how}: largest errors against float64")
    table.add_column("calls", no_wrap=wide, overflow="fold")
    shown = ("cases", "forward", "× torch's", "backward", "× torch's") if wide else ("× torch's", "backward")
    for name in (*shown, ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in given["rows"]:
        cells = [f(row, part) for part in ("forward", "backward") for f in ((_error, _ratio) if wide else (_ratio,))]
        mark = Text("✓", style="green") if row["passed"] else Text("✗", style="red")
        table.add_row(row["what"], *([str(row["cases"])] if wide else []), *cells, mark)
    for what, wrong in given["corners"].items():
        mark = Text("✗", style="red") if wrong else Text("✓", style="green")
        table.add_row(what, *[""] * len(shown), mark)
    return table


def _error(row: dict[str, Any], part: str) -> str:
    return f"{row['error'][part]:.1e}" if part in row["error"] else ""


def _ratio(row: dict[str, Any], part: str) -> str:
    ratio = row["ratio"].get(part)
    return "" if ratio is None else f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"


def _short(file: str) -> str:
    """The last folders of a path are what tells whose file it is."""
    parts = Path(file).parts
    return file if len(parts) < 5 else str(Path("…", *parts[-3:]))


def _at_home(file: str) -> str:
    try:
        return str(Path("~") / Path(file).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return file


def _finite(value: Any) -> Any:
    """JSON has no NaN: an error that is none becomes null."""
    if isinstance(value, dict):
        return {name: _finite(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value
