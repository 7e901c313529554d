"""The ledger as one HTML page that opens anywhere: statements typeset, figures drawn, no script and no network."""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

from latex2mathml.converter import convert

from regard import plots
from regard.claims.claim import FAILS, HOLDS, HOLDS_IF, UNDECIDED, Claim, Evidence, Finding, Result, Series

__all__ = ["report"]

MARKS = {HOLDS: "✓", HOLDS_IF: "◐", FAILS: "✗", UNDECIDED: "?"}
CLASSES = {HOLDS: "holds", HOLDS_IF: "if", FAILS: "fails", UNDECIDED: "undecided"}
ROLES = {
    "written": "As written",
    "condition": "Where the condition is met",
    "corrected": "As corrected",
    "control": "Control, which must fail",
}


def report(results: Sequence[Result]) -> str:
    """A section a claim: the statement, the verdict, the figure, what was asked and found, numbers, and the code."""
    if not results:
        raise ValueError("no claim was run, so there is nothing to report")
    parts = {
        "style": resources.files("regard.claims").joinpath("static/report.css").read_text(encoding="utf-8"),
        "summary": _summary(results),
        "contents": "\n".join(_entry(one) for one in results),
        "sections": "\n".join(_section(number, one) for number, one in enumerate(results, 1)),
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


def _entry(result: Result) -> str:
    name = escape(result.claim.id)
    return (
        f'<li><span class="entry"><a href="#{name}">{name}</a><span class="leader"></span>'
        f'<span class="verdict {CLASSES[result.verdict]}">{MARKS[result.verdict]} {result.verdict}</span></span></li>'
    )


def _section(number: int, result: Result) -> str:
    claim, verdict = result.claim, result.verdict
    changed = "" if result.as_recorded else f" <em>(recorded: {claim.verdict})</em>"
    correction = ""
    if claim.correction:
        label = "It holds if" if claim.verdict == HOLDS_IF else "What is true instead"
        correction = f'<p class="correction {CLASSES[claim.verdict]}"><b>{label}.</b> {escape(claim.correction)}</p>'
    sources = ", ".join(claim.sources)
    return f"""<section id="{escape(claim.id)}">
<h2><span class="number">{number}</span> {escape(claim.id)}
 <span class="verdict {CLASSES[verdict]}">{MARKS[verdict]} {verdict}</span>{changed}</h2>
<p class="statement">{escape(claim.statement)} <span class="source">[{escape(sources)}]</span></p>
<div class="formula">{_formula(claim.formula)}</div>
{correction}
{"".join(_figure(claim, one) for one in result.evidence.series)}
{_findings(result.evidence)}
{_numbers(result.evidence)}
<p class="small"><b>What would refute it.</b> {escape(claim.refuted)} <b>Control.</b> {escape(claim.control)}</p>
{_code(claim)}
</section>"""


def _formula(latex: str) -> str:
    return convert(latex, display="block")


def _figure(claim: Claim, series: Series) -> str:
    figure = plots.series(series.lines, title=series.title, x_label=series.x, y_label=series.y, log=series.log)
    drawn = io.StringIO()
    # Words stay words, and names inside one drawing do not meet those of another.
    with plots.part("").rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{claim.id} {series.title}"}):
        figure.savefig(
            drawn, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")), transparent=True
        )
    svg = drawn.getvalue()
    svg = svg[svg.index("<svg") :]
    label = escape(f"{series.title}: {series.y} against {series.x}")
    return f'<figure role="img" aria-label="{label}">{svg}</figure>'


def _findings(evidence: Evidence) -> str:
    rows = []
    for role, label in ROLES.items():
        of = evidence.of(role)
        if of:
            rows.append(f'<tr><th colspan="2">{label}</th></tr>')
            rows += [_finding(one) for one in of]
    return f'<div class="wide"><table class="findings"><tbody>{"".join(rows)}</tbody></table></div>'


def _finding(one: Finding) -> str:
    answer = "yes" if one.holds else "no"
    good = one.holds != (one.role == "control")
    said = f'<span class="said">{escape(one.said)}</span>' if one.said else ""
    asked = f'<div class="asked"><span>{escape(one.asked)}</span>{said}</div>'
    return f'<tr><td class="answer {"good" if good else "bad"}">{answer}</td><td>{asked}</td></tr>'


def _numbers(evidence: Evidence) -> str:
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(_value(value))}</dd></div>"
        for name, value in evidence.numbers.items()
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
    told = f"The code that ran ({given})" if given else "The code that ran"
    return f"<details><summary>{escape(told)}</summary><pre><code>{escape(source)}</code></pre></details>"
