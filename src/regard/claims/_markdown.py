"""Writes docs/claims.md (the results of claims) and docs/theory.md (the documents that claims come from)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from regard._files import write_text
from regard.claims._claim import HOLDS, Claim, Result, correction_label, statement_label
from regard.claims._documents import DOCUMENTS, PAPERS, Document
from regard.claims._registry import list_claims
from regard.claims._typeset import typeset_text

HEAD = """# The claims of the theory, executed

Which statements about attention are true? The theory behind `regard` is in five course documents and one article
([theory](theory.md), and their letters: [symbols](symbols.md)). Every statement in them that can be true or false is
checked here by code that measures or derives it. Each check includes a control: a case that must fail. The verdicts
are:

- **holds**: the statement is true as it stands, as far as the check goes.
- **holds conditionally**: the statement leaves out a condition. The section below names it.
- **false as stated**: there is a counterexample. The section says what is true instead, and that is checked too.

A title in quotation marks is a claim that does not hold as it stands; “what holds” is the true statement in one line.

`regard claims --markdown docs/claims.md` writes this page. `regard claims` prints the same verdicts, `--only ID` runs
one claim, and `--report FILE.html` writes a page with formulas, figures and the code that ran. In Python,
`regard.claims.get_claim("hard-limit").run(gap=0.1)` runs a claim with other values. The numbers are from one machine.
"""

THEORY_HEAD = """# The documents of the theory

The [claims](claims.md) are statements of five course documents and one article. The course documents name no author,
and none of the documents is part of this package, so this page lists what they are: the title and the date as far as
each gives one, its sections that make claims, and the verdict of each claim. The short names (for example `homework-3`)
are those of `regard claims --source`. Published papers that make some of the statements, or their corrections, are at
the end.

`python -m regard.claims._markdown docs/theory.md` writes this page.
"""


def markdown_report(results: Sequence[Result]) -> str:
    """All results as one Markdown page, without anything that changes from run to run."""
    lines = [HEAD, "| claim | verdict | what holds | evidence |", "|---|---|---|---|"]
    lines += map(table_row, results)
    lines += map(claim_section, results)
    return "\n".join(lines) + "\n"


def table_row(result: Result) -> str:
    """One claim as a row of the table, with the evidence that decided it."""
    claim = result.claim
    cells = [
        f"[{claim.id}](#{claim.id}): {typeset_text(claim.heading)}",
        result.verdict,
        typeset_text(claim.what_holds) or "as stated",
        typeset_text(result.summary),
    ]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def claim_section(result: Result) -> str:
    """One claim in full: title, verdict, what holds, statement, correction, sources, refutation and control."""
    claim = result.claim
    lines = ["", f"## {claim.id}", "", f"**{typeset_text(claim.heading)}**: {result.verdict}."]
    if result.verdict != HOLDS:
        lines += ["", f"**What holds:** {typeset_text(claim.what_holds)}"]
    lines += ["", f"{statement_label(claim.verdict)} {typeset_text(claim.statement)}"]
    if result.verdict != HOLDS:
        lines += ["", f"{correction_label(result.verdict)} {typeset_text(claim.correction)}"]
    lines += ["", f"Refuted by: {typeset_text(claim.refuted_by)} Control: {typeset_text(claim.control)}"]
    lines += ["", f"Stated in: {_sources(claim)}."]
    return "\n".join(lines)


def _sources(claim: Claim) -> str:
    """Links to the documents with their sections, then to the papers."""
    links = []
    for key, section in claim.citations:
        document = DOCUMENTS[key]
        links.append(f"[{document.label}](theory.md#{key}), {section} “{document.sections[section]}”")
    for key in claim.papers:
        links.append(f"[{PAPERS[key].short}](theory.md#papers)")
    return "; ".join(links)


def theory_page() -> str:
    """The documents, their sections with the claims that cite them, and the papers, as one Markdown page."""
    lines = [THEORY_HEAD]
    claims = list_claims()
    for document in DOCUMENTS.values():
        lines += _document_section(document, claims)
    lines += ["## Papers", ""]
    for paper in PAPERS.values():
        lines.append(f"- {paper.authors} ({paper.year}): [{paper.title}]({paper.address}). {paper.venue}.")
    return "\n".join(lines) + "\n"


def _document_section(document: Document, claims: Sequence[Claim]) -> list[str]:
    lines = [f"## {document.label}", "", f"*{document.title}* (`{document.key}`): {document.kind}. {document.about}"]
    if document.papers:
        papers = "; ".join(PAPERS[key].short for key in document.papers)
        lines += ["", f"Papers that it names, or whose results it explains: {papers}."]
    lines += ["", "| section | heading or question | claims |", "|---|---|---|"]
    for section, heading in document.sections.items():
        links = []
        for claim in claims:
            if (document.key, section) in claim.citations:
                links.append(f"[{claim.id}](claims.md#{claim.id}): {claim.verdict}")
        lines.append(f"| {section} | {heading} | {'<br>'.join(links)} |")
    return [*lines, ""]


if __name__ == "__main__":
    write_text(theory_page(), Path(sys.argv[1]))
