"""Writes the results of claims as one HTML page: typeset statements, figures and code, without scripts or network."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from typing import Any

from regard import plots
from regard._errors import RegardError
from regard.claims._claim import (
    FALSE_AS_STATED,
    HOLDS,
    HOLDS_CONDITIONALLY,
    UNDECIDED,
    Claim,
    Evidence,
    Finding,
    Result,
    Series,
    check_source,
    correction_label,
    statement_label,
)
from regard.claims._documents import DOCUMENTS, PAPERS, Document, citation_text
from regard.claims._registry import TOPICS
from regard.claims._typeset import SUBSCRIPT, typeset_formula, typeset_text

MARKS = {HOLDS: "✓", HOLDS_CONDITIONALLY: "◐", FALSE_AS_STATED: "✗", UNDECIDED: "?"}
CSS_CLASSES = {HOLDS: "holds", HOLDS_CONDITIONALLY: "if", FALSE_AS_STATED: "fails", UNDECIDED: "undecided"}
ROLE_HEADINGS = {
    "stated": "As stated",
    "condition": "Under the condition",
    "corrected": "As corrected",
    "control": "Controls, which must fail",
}
FONT_SIZE = 8.5  # size of the text in figures, in SVG units
DASHES = ("", "7 4", "2 3", "7 3 2 3")  # dash patterns, which tell lines apart when all colours are in use


def html_report(results: Sequence[Result]) -> str:
    """Return the HTML page: per claim its statement, verdict, figures, findings, numbers, and the code that ran."""
    if not results:
        raise RegardError("results must not be empty: no claim was run")
    parts = {
        "style": _static_file("report.css"),
        "summary": _verdict_counts(results),
        "contents": _by_topic(results, _contents_entry, "<h2>{}</h2>\n<ol>\n{}\n</ol>"),
        "sections": _by_topic(results, _section, '<h2 class="part">{}</h2>\n{}'),
        "documents": "\n".join(map(_document, DOCUMENTS.values())),
        "papers": "\n".join(f'<li id="paper-{key}">{escape(paper.text)}</li>' for key, paper in PAPERS.items()),
    }
    # Replace all placeholders in one pass, so that inserted text which looks like a placeholder is not replaced.
    return re.sub(rf"\{{\{{({'|'.join(parts)})\}}\}}", lambda match: parts[match[1]], _static_file("report.html"))


def _static_file(name: str) -> str:
    return resources.files("regard.claims").joinpath("static", name).read_text(encoding="utf-8")


def _verdict_counts(results: Sequence[Result]) -> str:
    counts = []
    for verdict in MARKS:
        count = sum(result.verdict == verdict for result in results)
        if count:
            counts.append(_verdict_html(verdict, f"{count} {verdict}"))
    return " ".join(counts)


def _verdict_html(verdict: str, label: str) -> str:
    return f'<span class="verdict {CSS_CLASSES[verdict]}">{MARKS[verdict]} {label}</span>'


def _by_topic(results: Sequence[Result], render: Callable[[int, Result], str], template: str) -> str:
    """The claims under the headings of their topics, numbered from 1 across all topics."""
    # Numbers run through the whole page, so every claim is rendered before it is sorted by topic.
    rendered = {}
    for number, result in enumerate(results, 1):
        rendered[result.claim.id] = render(number, result)
    blocks = []
    for topic, names in TOPICS.items():
        entries = [entry for name, entry in rendered.items() if name in names]
        if entries:
            blocks.append(template.format(escape(topic), "\n".join(entries)))
    return "\n".join(blocks)


def _contents_entry(number: int, result: Result) -> str:
    claim = result.claim
    return (
        f'<li value="{number}"><span class="entry"><a href="#{escape(claim.id)}">{typeset_text(claim.heading)}</a>'
        f'<span class="leader"></span>{_verdict_html(result.verdict, result.verdict)}</span>{_what_holds(claim)}</li>'
    )


def _what_holds(claim: Claim) -> str:
    if not claim.what_holds:
        return ""
    return f'<p class="instead"><b>What holds:</b> {typeset_text(claim.what_holds)}</p>'


def _sources(claim: Claim) -> str:
    """Links to the documents and papers at the end of the page."""
    links = []
    for document, section in claim.citations:
        links.append(f'<a href="#document-{document}">{escape(citation_text(document, section))}</a>')
    for paper in claim.papers:
        links.append(f'<a href="#paper-{paper}">{escape(PAPERS[paper].short)}</a>')
    return "; ".join(links)


def _document(document: Document) -> str:
    return (
        f'<dt id="document-{document.key}">{escape(document.label)}</dt>'
        f"<dd><cite>{escape(document.title)}</cite> ({escape(document.kind)}). {typeset_text(document.about)}</dd>"
    )


def _section(number: int, result: Result) -> str:
    claim = result.claim
    recorded = ""
    if not result.as_recorded:
        recorded = f" <em>(recorded: {claim.verdict})</em>"
    correction = ""
    if claim.correction:
        label = correction_label(claim.verdict)
        css_class = f"correction {CSS_CLASSES[claim.verdict]}"
        correction = f'<p class="{css_class}"><b>{label}</b> {typeset_text(claim.correction)}</p>'
    return f"""<section id="{escape(claim.id)}">
<h3><span class="number">{number}</span> <span>{typeset_text(claim.heading)}</span>
 {_verdict_html(result.verdict, result.verdict)}{recorded}</h3>
{_what_holds(claim)}
<p class="statement"><span class="label">{statement_label(claim.verdict)}</span> {typeset_text(claim.statement)}</p>
<p class="source">{_sources(claim)} <span class="name">{escape(claim.id)}</span></p>
<div class="formula">{typeset_formula(claim.formula)}</div>
{correction}
{"".join(_figure(claim, series) for series in result.evidence.series)}
{_findings(result.evidence)}
{_numbers(result.evidence)}
<p class="small"><b>Refuted by:</b> {typeset_text(claim.refuted_by)} <b>Control:</b> {typeset_text(claim.control)}</p>
{_code(claim)}
</section>"""


def _figure(claim: Claim, series: Series) -> str:
    # The drawing gets short line names and no labels: the legend below it has the full names.
    short_names = {str(index): line for index, line in enumerate(series.lines.values())}
    figure = plots.series(short_names, x_label=series.x, y_label=series.y, log=series.log)
    axes = figure.axes[0]
    for label in list(axes.texts):
        label.remove()
    _set_log_tick_labels(axes, series.log)
    if "x" not in series.log and all(map(_has_whole_x, series.lines.values())):
        axes.locator_params(axis="x", integer=True)

    # Text stays text, and the salt keeps the ids inside one drawing different from those of the others.
    drawing = io.StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))  # a date would make every run differ
    with plots.import_matplotlib("").rc_context({"svg.fonttype": "none", "svg.hashsalt": f"{claim.id} {series.title}"}):
        figure.savefig(drawing, format="svg", metadata=no_metadata, transparent=True)
    svg = drawing.getvalue()
    svg = svg[svg.index("<svg") :]  # without the XML header, which HTML does not allow inside a page
    svg = re.sub(r"(?<=>)[^<>]*_[^<>]*(?=</text>)", _svg_subscripts, svg)

    # The page's font is narrower than the one that matplotlib reserved space for, so it can be larger.
    svg = re.sub(r"font-size: 7px; font-family: [^;]*;", f"font-size: {FONT_SIZE}px;", svg)
    alt_text = escape(f"{series.title}: {series.y} against {series.x}")
    caption = typeset_text(series.title[0].upper() + series.title[1:])
    legend = "".join(_legend_entry(index, name) for index, name in enumerate(series.lines))
    return (
        f'<figure><figcaption>{caption}</figcaption><div role="img" aria-label="{alt_text}">{svg}</div>'
        f'<ul class="legend">{legend}</ul></figure>'
    )


def _svg_subscripts(match: re.Match[str]) -> str:
    """The text of an SVG element with its subscripts set lower and smaller: SVG does not know ``<sub>``."""

    def subscript(parts: re.Match[str]) -> str:
        base = parts[1] or parts[3]
        index = (parts[2] or parts[4]).strip("{}()")
        return f'{base}<tspan dy="0.25em" font-size="75%">{index}</tspan><tspan dy="-0.19em">&#8203;</tspan>'

    return SUBSCRIPT.sub(subscript, match[0])


def _has_whole_x(line: Sequence[Sequence[float]]) -> bool:
    return all(float(x).is_integer() for x in line[0])


def _legend_entry(index: int, name: str) -> str:
    """One line of the drawing: a sample of its colour and dashes, and its name."""
    colour = plots.LINE_COLOURS[index % len(plots.LINE_COLOURS)]
    dash = DASHES[index // len(plots.LINE_COLOURS) % len(DASHES)]
    stroke = f'<line x1="0" y1="4" x2="22" y2="4" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>'
    return f'<li><svg viewBox="0 0 22 8" aria-hidden="true">{stroke}</svg>{typeset_text(name)}</li>'


def _set_log_tick_labels(axes: Any, log: str) -> None:
    """Write the ticks of logarithmic axes as plain text: matplotlib would set powers in a font of its own."""
    base = plots.import_matplotlib(".ticker").LogFormatter

    class PlainText(base):  # type: ignore[misc, valid-type]
        def __call__(self, x: float, pos: int | None = None) -> str:
            return tick_label(x) if super().__call__(x, pos) else ""  # the base class decides which ticks have a label

    for name in log:
        axis = getattr(axes, f"{name}axis")
        axis.set_major_formatter(PlainText())
        axis.set_minor_formatter(PlainText(minor_thresholds=(1, 0.4)))


def tick_label(x: float) -> str:
    """The label of a tick on a logarithmic axis: 0.02, 500, 3·10⁻⁷."""
    if 1e-3 <= x < 1e3:
        return f"{x:g}"
    if 1e3 <= x < 1e5:
        return f"{x:,.0f}"
    digits, exponent = f"{x:.0e}".split("e")
    power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return power if digits == "1" else f"{digits}·{power}"


def _findings(evidence: Evidence) -> str:
    rows = []
    for role, heading in ROLE_HEADINGS.items():
        findings = evidence.by_role(role)
        if findings:
            rows.append(f'<tr><th colspan="2">{heading}</th></tr>')
            rows += map(_finding_row, findings)
    return f'<table class="findings"><tbody>{"".join(rows)}</tbody></table>'


def _finding_row(finding: Finding) -> str:
    answer = "yes" if finding.holds else "no"
    is_good = finding.holds != (finding.role == "control")  # a control is good if its statement is false
    quality = "good" if is_good else "bad"
    description = ""
    if finding.description:
        description = f'<span class="description">{typeset_text(finding.description)}</span>'
    question = f'<div class="question"><span>{typeset_text(finding.question)}</span>{description}</div>'
    return f'<tr><td class="answer {quality}">{answer}</td><td>{question}</td></tr>'


def _numbers(evidence: Evidence) -> str:
    entries = []
    for name, value in evidence.numbers.items():
        entries.append(f"<div><dt>{typeset_text(name)}</dt><dd>{escape(_format_value(value))}</dd></div>")
    return f'<dl class="numbers">{"".join(entries)}</dl>'


def _format_value(value: float | int | str | list[float]) -> str:
    if isinstance(value, list):
        return ", ".join(map(_format_value, value))
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value


def _code(claim: Claim) -> str:
    summary = "The code that ran"
    if claim.parameters:
        parameters = ", ".join(f"{name} = {value:g}" for name, value in claim.parameters.items())
        summary += f' <span class="parameters">{escape(parameters)}</span>'
    source = escape(check_source(claim).rstrip())
    return f"<details><summary>{summary}</summary><pre><code>{source}</code></pre></details>"
