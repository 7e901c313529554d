"""The ledger as one HTML page that opens anywhere: statements typeset, figures drawn, no script and no network."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from regard import plots
from regard.claims.claim import FAILS, HOLDS, HOLDS_IF, UNDECIDED, Claim, Evidence, Finding, Result, Series
from regard.claims.ledger import PARTS
from regard.claims.typeset import formula, text, title

__all__ = ["report"]

MARKS = {HOLDS: "✓", HOLDS_IF: "◐", FAILS: "✗", UNDECIDED: "?"}
CLASSES = {HOLDS: "holds", HOLDS_IF: "if", FAILS: "fails", UNDECIDED: "undecided"}
ROLES = {
    "written": "As written",
    "condition": "Where the condition is met",
    "corrected": "As corrected",
    "control": "Control, which must fail",
}
LETTERS = 8.5  # of figures, in the drawing's own measure


def report(results: Sequence[Result]) -> str:
    """A section a claim: the statement, the verdict, the figure, what was asked and found, numbers, and the code."""
    if not results:
        raise ValueError("no claim was run, so there is nothing to report")
    parts = {
        "style": resources.files("regard.claims").joinpath("static/report.css").read_text(encoding="utf-8"),
        "summary": _summary(results),
        "contents": _in_parts(results, _entry, "<h2>{}</h2>\n<ol>\n{}\n</ol>"),
        "sections": _in_parts(results, _section, '<h2 class="part">{}</h2>\n{}'),
    }
    page = resources.files("regard.claims").joinpath("static/report.html").read_text(encoding="utf-8")
    # One pass: a placeholder's name in a text stays text.
    return re.sub(r"\{\{(style|summary|contents|sections)\}\}", lambda found: parts[found[1]], page)


def _summary(results: Sequence[Result]) -> str:
    counts = {verdict: sum(one.verdict == verdict for one in results) for verdict in MARKS}
    said = [
        f'<span class="verdict {CLASSES[verdict]}">{MARKS[verdict]} {many} {verdict}</span>'
        for verdict, many in counts.items()
        if many
    ]
    return " ".join(said)


def _in_parts(results: Sequence[Result], shown: Callable[[int, Result], str], frame: str) -> str:
    """Claims under the headings of the ledger's parts, numbered throughout."""
    numbers = {one.claim.id: number for number, one in enumerate(results, 1)}
    blocks = []
    for part, names in PARTS.items():
        lines = [shown(numbers[one.claim.id], one) for one in results if one.claim.id in names]
        if lines:
            blocks.append(frame.format(escape(part), "\n".join(lines)))
    return "\n".join(blocks)


def _entry(number: int, result: Result) -> str:
    name = escape(result.claim.id)
    return (
        f'<li value="{number}"><span class="entry"><a href="#{name}">{escape(title(name))}</a>'
        '<span class="leader"></span>'
        f'<span class="verdict {CLASSES[result.verdict]}">{MARKS[result.verdict]} {result.verdict}</span></span></li>'
    )


def _section(number: int, result: Result) -> str:
    claim, verdict = result.claim, result.verdict
    changed = "" if result.as_recorded else f" <em>(recorded: {claim.verdict})</em>"
    correction = ""
    if claim.correction:
        label = "It holds if" if claim.verdict == HOLDS_IF else "What is true instead"
        correction = f'<p class="correction {CLASSES[claim.verdict]}"><b>{label}.</b> {text(claim.correction)}</p>'
    sources = ", ".join(claim.sources)
    return f"""<section id="{escape(claim.id)}">
<h3><span class="number">{number}</span> <span>{escape(title(claim.id))}</span>
 <span class="verdict {CLASSES[verdict]}">{MARKS[verdict]} {verdict}</span>{changed}</h3>
<p class="statement">{text(claim.statement)} <span class="source">[{escape(sources)}]</span>
<span class="name">{escape(claim.id)}</span></p>
<div class="formula">{formula(claim.formula)}</div>
{correction}
{"".join(_figure(claim, one) for one in result.evidence.series)}
{_findings(result.evidence)}
{_numbers(result.evidence)}
<p class="small"><b>What would refute it.</b> {text(claim.refuted)} <b>Control.</b> {text(claim.control)}</p>
{_code(claim)}
</section>"""


def _figure(claim: Claim, series: Series) -> str:
    # Short names for the drawing: the page names the lines below it, in full.
    short = {str(at): line for at, line in enumerate(series.lines.values())}
    figure = plots.series(short, x_label=series.x, y_label=series.y, log=series.log)
    for name in list(figure.axes[0].texts):
        name.remove()
    _plain_ticks(figure.axes[0], series.log)
    if "x" not in series.log and all(float(x).is_integer() for line in series.lines.values() for x in line[0]):
        figure.axes[0].locator_params(axis="x", integer=True)
    drawn = io.StringIO()
    # Words stay words, and names inside one drawing do not meet those of another.
    with plots.part("").rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{claim.id} {series.title}"}):
        figure.savefig(
            drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    # The page's own letters are narrower than those the drawing made room for, so that they may be larger.
    svg = re.sub(r"font-size: 7px; font-family: [^;]*;", f"font-size: {LETTERS}px;", svg)
    label = escape(f"{series.title}: {series.y} against {series.x}")
    caption = text(series.title[0].upper() + series.title[1:])
    return (
        f'<figure><figcaption>{caption}</figcaption><div role="img" aria-label="{label}">{svg}</div>'
        f'<ul class="legend">{"".join(_name(at, name) for at, name in enumerate(series.lines))}</ul></figure>'
    )


def _name(at: int, name: str) -> str:
    """A line of the drawing by its colour and stroke, and what it is."""
    colour, dash = plots.SERIES[at % len(plots.SERIES)], ("", "7 4", "2 3", "7 3 2 3")[at // len(plots.SERIES) % 4]
    stroke = f'<line x1="0" y1="4" x2="22" y2="4" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    return f'<li><svg viewBox="0 0 22 8" aria-hidden="true">{stroke}</svg>{text(name)}</li>'


def _plain_ticks(axes: Any, log: str) -> None:
    """Numbers of logarithmic axes as text: matplotlib would set powers letter by letter, in a font of its own."""
    base = plots.part(".ticker").LogFormatter

    class Plain(base):  # type: ignore[misc, valid-type]
        def __call__(self, x: float, pos: int | None = None) -> str:
            return power(x) if super().__call__(x, pos) else ""

    for name in log:
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(Plain())
        axis.set_minor_formatter(Plain(minor_thresholds=(1, 0.4)))


def power(x: float) -> str:
    """0.02, 500, 3·10⁻⁷: a tick of a logarithmic axis."""
    if 1e-3 <= x < 1e5:
        return f"{x:,g}" if x < 1e3 else f"{x:,.0f}"
    digits, exponent = f"{x:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if digits == "1" else f"{digits}·10{raised}"


def _findings(evidence: Evidence) -> str:
    rows = []
    for role, label in ROLES.items():
        of = evidence.of(role)
        if of:
            rows.append(f'<tr><th colspan="2">{label}</th></tr>')
            rows += [_finding(one) for one in of]
    return f'<table class="findings"><tbody>{"".join(rows)}</tbody></table>'


def _finding(one: Finding) -> str:
    answer = "yes" if one.holds else "no"
    good = one.holds != (one.role == "control")
    said = f'<span class="said">{text(one.said)}</span>' if one.said else ""
    asked = f'<div class="asked"><span>{text(one.asked)}</span>{said}</div>'
    return f'<tr><td class="answer {"good" if good else "bad"}">{answer}</td><td>{asked}</td></tr>'


def _numbers(evidence: Evidence) -> str:
    shown = "".join(
        f"<div><dt>{text(name)}</dt><dd>{escape(_value(value))}</dd></div>" for name, value in evidence.numbers.items()
    )
    return f'<dl class="numbers">{shown}</dl>'


def _value(value: float | int | str | list[float]) -> str:
    if isinstance(value, list):
        return ", ".join(_value(x) for x in value)
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value


def _code(claim: Claim) -> str:
    module = inspect.getmodule(claim.check)
    source = inspect.getsource(module if module is not None else claim.check)
    source = source.split("\nCLAIM = Claim(")[0].rstrip()  # what follows is the text of this section
    given = ", ".join(f"{name} = {value:g}" for name, value in claim.parameters.items())
    told = f'The code that ran <span class="given">{escape(given)}</span>' if given else "The code that ran"
    return f"<details><summary>{told}</summary><pre><code>{escape(source)}</code></pre></details>"
