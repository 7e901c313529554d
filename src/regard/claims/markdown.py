"""The ledger as docs/claims.md: one line a claim, and the corrections."""

from __future__ import annotations

from collections.abc import Sequence

from regard.claims.claim import HOLDS, HOLDS_IF, Result

__all__ = ["markdown", "row", "section"]

HEAD = """# The claims of the theory, executed

Which statements about attention are true? The theory behind `regard` is five course documents, 000 to 004 (their
letters: [symbols](symbols.md)). Every statement in them that can be true or false is run here, as code that measures
or derives, beside a control that must fail:

- **holds**: as it is written, as far as the check goes.
- **holds if**: under a condition that the statement leaves out; the section below names it.
- **fails as written**: a counterexample was found; the section says what is true instead, and that is checked too.

Written by `regard claims --markdown docs/claims.md`; `regard claims` prints the same, `--report FILE.html` makes a
page with formulas, figures and the code that ran, `--only ID` runs one. In Python
`regard.claims.claim("hard-limit").run(gap=0.1)` runs a claim with other values. Numbers are of one machine.
"""


def markdown(results: Sequence[Result]) -> str:
    """What was found, without what changes from run to run."""
    lines = [HEAD, "| claim | source | verdict | evidence |", "|---|---|---|---|", *(row(one) for one in results)]
    return "\n".join([*lines, *(section(one) for one in results)]) + "\n"


def row(result: Result) -> str:
    """A claim in the table, with the evidence that decided."""
    name, evidence = result.claim.id, result.line.replace("|", "\\|")
    return f"| [{name}](#{name}) | {', '.join(result.claim.sources)} | {result.verdict} | {evidence} |"


def section(result: Result) -> str:
    """A claim in full: statement, verdict, correction, what would refute it, control."""
    claim = result.claim
    lines = ["", f"## {claim.id}", "", f"{claim.statement} **{result.verdict.capitalize()}.**"]
    if result.verdict != HOLDS:
        label = "It holds if" if result.verdict == HOLDS_IF else "True instead"
        lines += ["", f"{label}: {claim.correction}"]
    return "\n".join([*lines, "", f"Refuted by: {claim.refuted} Control: {claim.control}"])
