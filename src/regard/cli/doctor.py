"""``regard doctor``: describes this machine and tests whether regard computes correctly on it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from regard._errors import RegardError
from regard._files import json_safe
from regard._terminal import frameless_table, literal_text, printable
from regard.budget._units import format_bytes


def doctor_command(
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    as_report: Annotated[
        bool, typer.Option("--report", help="print the same as Markdown, to paste into an issue")
    ] = False,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="also run the self-test on every GPU, with the Triton kernels")
    ] = False,
) -> None:
    """Describe this machine and run a self-test against float64; the exit code is 1 if something is wrong.

    regard doctor --json
    regard doctor --gpu --report
    """
    if as_json and as_report:
        raise RegardError("--report prints Markdown and cannot be combined with --json")
    # Imported here, because no other command needs it.
    from regard.doctor import run_checks
    from regard.doctor.device_test import run_long_test

    console = Console(highlight=False, stderr=as_json or as_report)
    with console.status("testing: 2 s, and some minutes if kernels for a GPU are compiled"):
        report = run_checks()
    if gpu:
        with console.status("testing the kernels of the GPU, which are compiled first: some minutes"):
            report["gpu_test"] = run_long_test()
        for device, result in report["gpu_test"].items():
            report["problems"] += [f"self-test on {device} failed: {problem}" for problem in result["failed"]]
        report["well"] = not report["problems"]
    if as_json:
        typer.echo(json.dumps(json_safe(report), ensure_ascii=False, allow_nan=False, indent=1))
    elif as_report:
        typer.echo(printable(_markdown(report), lines=True), nl=False)
    else:
        _print_report(console, report)
    if not report["well"]:
        raise typer.Exit(1)


def _markdown(report: dict[str, Any]) -> str:
    """What ``_print_report`` prints, without colours, as a block of Markdown."""
    text = io.StringIO()
    _print_report(Console(file=text, width=REPORT_WIDTH, highlight=False, color_system=None), report)
    lines = [line.rstrip() for line in text.getvalue().splitlines()]
    return "\n".join(["### regard doctor", "", "```text", *lines, "```", ""])


def _print_report(console: Console, report: dict[str, Any]) -> None:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, format_result in FORMATS.items():
        result = report[name]
        if "error" in result:
            lines = [f"not known: {result['error']}"]
        else:
            lines = format_result(result)
        # Only the first line of a check has its label.
        label = LABELS.get(name, name)
        for line in lines:
            table.add_row(Text(label, style="bold"), literal_text(line))
            label = ""
    console.print(table)
    if "rows" in report["self_test"]:
        console.print()
        console.print(_self_test_table(report["self_test"], wide=console.width >= 75))
    for device, result in report.get("gpu_test", {}).items():
        console.print()
        console.print(_self_test_table(result, wide=console.width >= 75, device=device))
    console.print()
    for note in report["notes"]:
        console.print(Text("note: ", style="yellow") + literal_text(note))
    for problem in report["problems"]:
        console.print(Text("✗ ", style="red") + literal_text(problem))
    if report["well"]:
        console.print(Text("✓ ", style="green") + literal_text("all well"))


def _versions(result: dict[str, str]) -> list[str]:
    return [", ".join(f"{name} {version}" for name, version in result.items())]


def _cpu(result: dict[str, Any]) -> list[str]:
    plural = "" if result["cores"] == 1 else "s"
    lines = [f"{result['model']}, {result['architecture']}, {result['cores']} core{plural}"]
    if result["has"] is not None:
        lines.append(f"has {' '.join(result['has']) or 'none of the features that are used here'}")
    if result["lacks"]:
        lines.append(f"lacks {' '.join(result['lacks'])}")
    return lines


def _memory(result: dict[str, int | None]) -> list[str]:
    total = result["total"]
    available = result["available"]
    if total is None:
        return ["the system does not report it"]
    if available is None:
        return [format_bytes(total)]
    return [f"{format_bytes(total)}, {format_bytes(available)} of it free"]


def _native(result: dict[str, Any]) -> list[str]:
    if not result["built"]:
        return [result["why"]]
    forced = " (by REGARD_ISA)" if result["forced"] else ""
    return [f"built, can run {', '.join(result['instruction_sets'])}; in use {result['in_use']}{forced}"]


def _devices(result: dict[str, dict[str, Any]]) -> list[str]:
    """One line per GPU; no line if there is none."""
    lines = []
    for name, described in result.items():
        facts = [f"{fact} {value}" for fact, value in described.items() if fact not in ("device", "device name")]
        lines.append(f"{name}: {described.get('device name', 'unknown')}, {', '.join(facts)}")
    return lines


def _kernel_check(result: dict[str, dict[str, str]]) -> list[str]:
    """The verdict of the Triton kernels on each GPU; no line if there is none."""
    lines = []
    for device, problems in result.items():
        used = [dtype for dtype, problem in problems.items() if not problem]
        if used:
            lines.append(f"{device}: the Triton kernels passed their self-check in {', '.join(used)}")
        for dtype, problem in problems.items():
            if problem:
                lines.append(f"{device}: the reference computes {dtype}, because {problem}")
    return lines


def _device_test(result: dict[str, dict[str, Any]]) -> list[str]:
    """The error of each GPU; no line if there is none."""
    lines = []
    for name, tested in result.items():
        if tested["problem"]:
            lines.append(f"{name}: {tested['problem']}")
        else:
            lines.append(f"{name} computes what the CPU computes, largest relative error {tested['error']:.1e}")
    return lines


def _threads(result: dict[str, Any]) -> list[str]:
    lines = [f"{result['torch']} of torch, OMP_NUM_THREADS {result['OMP_NUM_THREADS'] or 'not set'}"]
    return lines + [f"OpenMP: {_shorten_path(file)}" for file in result["openmp"]]


def _extras(result: dict[str, dict[str, str | None]]) -> list[str]:
    installed = []
    missing = []
    for extra in result.values():
        if extra["version"] is None:
            missing.append(f"{extra['package']} is missing, for {extra['for']}: {extra['install']}")
        else:
            installed.append(f"{extra['package']} {extra['version']}")
    if not installed:
        return missing
    return [", ".join(installed), *missing]


def _state_files(result: dict[str, str]) -> list[str]:
    content = {"lab": "files of the lab", "machine": "measurements of this machine"}
    return [f"{content[name]}: {_relative_to_home(file)}" for name, file in result.items()]


# The checks in printed order, each with the function that formats it, and the labels that differ from a check's name.
FORMATS = {
    "versions": _versions,
    "cpu": _cpu,
    "memory": _memory,
    "native": _native,
    "devices": _devices,
    "kernel_check": _kernel_check,
    "device_test": _device_test,
    "threads": _threads,
    "extras": _extras,
    "kept": _state_files,
}
LABELS = {"kept": "files", "device_test": "device test", "kernel_check": "GPU kernels"}
REPORT_WIDTH = 100  # columns of --report, whatever the terminal has


def _self_test_table(result: dict[str, Any], *, wide: bool, device: str = "") -> Table:
    """One row per kind of call; a narrow terminal shows the ratios only."""
    where = f" on {device}" if device else ""
    table = frameless_table(
        f"self-test, {result['backend']} backend{where}, {result['seconds']:.1f} s: largest errors against float64"
    )
    table.add_column("calls", no_wrap=wide, overflow="fold")
    columns = ["× torch's", "backward"]
    if wide:
        columns = ["cases", "forward", "× torch's", "backward", "× torch's"]
    for name in (*columns, ""):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["rows"]:
        cells = [str(row["cases"])] if wide else []
        for part in ("forward", "backward"):
            if wide:
                cells.append(f"{row['error'][part]:.1e}" if part in row["error"] else "")
            cells.append(_format_ratio(row["ratio"].get(part)))
        table.add_row(row["what"], *cells, _mark(row["passed"]))
    for name, problem in result["corners"].items():
        table.add_row(name, *[""] * len(columns), _mark(not problem))
    return table


def _mark(passed: bool) -> Text:
    return Text("✓", style="green") if passed else Text("✗", style="red")


def _format_ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0e}"


def _shorten_path(file: str) -> str:
    """The last three parts of a long path, which show the package that owns the file."""
    parts = Path(file).parts
    if len(parts) < 5:
        return file
    return str(Path("…", *parts[-3:]))


def _relative_to_home(file: str) -> str:
    try:
        return str(Path("~") / Path(file).relative_to(Path.home()))
    except (ValueError, RuntimeError):
        return file
