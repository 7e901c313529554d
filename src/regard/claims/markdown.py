"""The ledger as docs/claims.md: one line a claim, and the corrections."""

from __future__ import annotations

from collections.abc import Sequence

from regard.claims.claim import HOLDS, HOLDS_IF, Result

__all__ = ["markdown"]

HEAD = """# The claims of the theory, executed

Written by `regard claims --markdown docs/claims.md`. Every statement of the theory that can be true or false, run:
`regard claims` prints this, `--report FILE.html` makes a page with formulas, figures and the code that ran, `--only ID`
runs one. In Python `regard.claims.claim("hard-limit").run(gap=0.1)` runs a claim with other values. Numbers are of one
machine.
"""


def markdown(results: Sequence[Result]) -> str:
    """What was found, without what changes from run to run."""
    lines = [HEAD, "| claim | source | verdict | evidence |", "|---|---|---|---|"]
    for one in results:
        name = one.claim.id
        lines.append(f"| [{name}](#{name}) | {', '.join(one.claim.sources)} | {one.verdict} | {_cell(one.line)} |")
    for one in results:
        claim = one.claim
        lines += ["", f"## {claim.id}", "", f"{claim.statement} **{one.verdict.capitalize()}.**"]
        if one.verdict != HOLDS:
            label = "It holds if" if one.verdict == HOLDS_IF else "True instead"
            lines += ["", f"{label}: {claim.correction}"]
        lines += ["", f"Refuted by: {claim.refuted} Control: {claim.control}"]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
