"""A claim of the theory, the evidence that a run of its check gives, and the verdict that follows from it."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAILS", "HOLDS", "HOLDS_IF", "UNDECIDED", "Claim", "Evidence", "Finding", "Result", "Series"]

HOLDS, HOLDS_IF, FAILS, UNDECIDED = "holds", "holds if", "fails as written", "undecided"
ROLES = ("written", "condition", "corrected", "control")


@dataclass(frozen=True)
class Finding:
    """One thing that was asked, and the answer.

    ``role``: "written" is the statement as it stands, "condition" the statement under the condition that was missing,
    "corrected" the statement that is true instead, "control" the same question asked of something for which the answer
    must be no.
    """

    role: str
    asked: str
    holds: bool
    said: str


@dataclass(frozen=True)
class Series:
    """Named lines ``{name: (x, y)}`` or ``(x, y, low, high)``, as ``regard.plots.series`` draws them."""

    title: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    x: str
    y: str
    log: str = ""


@dataclass
class Evidence:
    """What a check found: answers, numbers, and lines to draw; plain data throughout.

    >>> found = Evidence()
    >>> found.written("softmax rows sum to 1", bool(torch.randn(3, 5).softmax(-1).sum(-1).sub(1).abs().max() < 1e-6))
    >>> found.verdict  # nothing has shown yet that the question can be answered with no
    'undecided'
    >>> found.control("so do rows that are not normalised", bool(torch.ones(3, 5).sum(-1).eq(1).all()))
    >>> found.verdict
    'holds'
    """

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float | int | str | list[float]] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)

    def written(self, asked: str, holds: bool, said: str = "") -> None:
        """The statement as it stands."""
        self.findings.append(Finding("written", asked, bool(holds), said))

    def condition(self, asked: str, holds: bool, said: str = "") -> None:
        """The statement where the condition that was missing is met."""
        self.findings.append(Finding("condition", asked, bool(holds), said))

    def corrected(self, asked: str, holds: bool, said: str = "") -> None:
        """The statement that is true instead."""
        self.findings.append(Finding("corrected", asked, bool(holds), said))

    def control(self, asked: str, holds: bool, said: str = "") -> None:
        """The same question, of something for which ``holds`` must be False: else the question proves nothing."""
        self.findings.append(Finding("control", asked, bool(holds), said))

    def draw(
        self, title: str, lines: Mapping[str, Sequence[Sequence[float]]], *, x: str, y: str, log: str = ""
    ) -> None:
        """Lines for a figure; numbers are kept as Python's own."""
        plain = {name: [[float(v) for v in part] for part in parts] for name, parts in lines.items()}
        self.series.append(Series(title, plain, x, y, log))

    def of(self, role: str) -> list[Finding]:
        """The findings of one role: "written", "condition", "corrected" or "control"."""
        return [one for one in self.findings if one.role == role]

    @property
    def verdict(self) -> str:
        """``holds`` where all that is written does; else by what does: the condition, or the correction.

        Without a control, or where one does not fail, nothing is decided.
        """
        controls = self.of("control")
        if not controls or any(one.holds for one in controls) or not self.of("written"):
            return UNDECIDED
        condition, corrected = self.of("condition"), self.of("corrected")
        sound = all(one.holds for one in (*condition, *corrected))
        if all(one.holds for one in self.of("written")):
            return HOLDS if sound else UNDECIDED
        if not sound or bool(condition) == bool(corrected):
            return UNDECIDED
        return HOLDS_IF if condition else FAILS


@dataclass(frozen=True)
class Claim:
    """One statement of the theory.

    - ``statement`` in words, ``formula`` in LaTeX, ``sources``: which documents say it.
    - ``refuted``: what would refute it. ``control``: what must fail the same check.
    - ``verdict`` is the recorded one; ``correction`` says under which condition it holds, or what is true instead.
    - ``check`` takes keyword arguments with defaults, numbers that people may want to turn and the parts it looks at,
      and gives ``Evidence``; the same for the same arguments. One named ``full`` stands for the long version.

    >>> limit = regard.claims.claim("hard-limit")
    >>> limit.statement
    'As the inverse temperature β grows, softmax(β s) becomes the one-hot argmax.'
    >>> limit.verdict, limit.parameters
    ('holds if', {'n': 8, 'gap': 0.5, 'seed': 0})
    """

    id: str
    sources: tuple[str, ...]
    statement: str
    formula: str
    refuted: str
    control: str
    verdict: str
    check: Callable[..., Evidence]
    correction: str = ""

    def __post_init__(self) -> None:
        if self.verdict not in (HOLDS, HOLDS_IF, FAILS):
            raise ValueError(f"{self.id}: the verdict is {self.verdict!r}; it must be {HOLDS}, {HOLDS_IF} or {FAILS}")
        if bool(self.correction) != (self.verdict != HOLDS):
            raise ValueError(f"{self.id}: a correction goes with {HOLDS_IF} and {FAILS}, and with nothing else")

    @property
    def parameters(self) -> dict[str, float | int]:
        """What can be turned: the check's numbers, with their defaults."""
        found = {}
        for name, parameter in inspect.signature(self.check).parameters.items():
            if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
                found[name] = parameter.default
        return found

    def run(self, *, full: bool = False, **changes: Any) -> Result:
        """Run the check, with some of its arguments changed.

        >>> result = regard.claims.claim("hard-limit").run(gap=0.1)
        >>> result.verdict, round(result.evidence.numbers["rate"], 3)  # the error falls as exp(−β·gap)
        ('holds if', -0.1)
        """
        known = inspect.signature(self.check).parameters
        wrong = [name for name in changes if name not in known]
        if wrong:
            raise ValueError(f"{self.id} has no {wrong[0]}; it has {', '.join(known)}")
        if full and "full" in known:
            changes["full"] = True
        began = time.perf_counter()
        evidence = self.check(**changes)
        return Result(self, evidence, time.perf_counter() - began)


@dataclass(frozen=True)
class Result:
    """A claim and what a run of it found.

    >>> result = regard.claims.claim("hard-limit").run()
    >>> result.as_recorded, result.line
    (True, 'under a tie the error stays 1; error 0 at β = ∞')
    """

    claim: Claim
    evidence: Evidence
    seconds: float
    missing: str = ""  # the package without which the check could not be run

    @property
    def verdict(self) -> str:
        """What the evidence says: "holds", "holds if", "fails as written" or "undecided"."""
        return self.evidence.verdict

    @property
    def as_recorded(self) -> bool:
        """Whether the verdict is the one in the ledger."""
        return self.verdict == self.claim.verdict

    @property
    def line(self) -> str:
        """The evidence in a line: what decided the verdict, or why there is none."""
        if self.missing:
            return self.missing
        role = {HOLDS_IF: "condition", FAILS: "corrected"}.get(self.verdict, "written")
        decided = [one for one in self.evidence.of("written") if not one.holds] if role != "written" else []
        said = [one.said for one in (*decided[:1], *self.evidence.of(role)[:1]) if one.said]
        return "; ".join(said)

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        claim = self.claim
        return {
            **{"id": claim.id, "sources": list(claim.sources), "statement": claim.statement, "formula": claim.formula},
            **{"refuted": claim.refuted, "control": claim.control, "recorded": claim.verdict},
            **{"correction": claim.correction, "verdict": self.verdict, "as_recorded": self.as_recorded},
            **{"parameters": claim.parameters, "findings": [vars(one) for one in self.evidence.findings]},
            **{"numbers": self.evidence.numbers, "series": [vars(one) for one in self.evidence.series]},
            **{"seconds": self.seconds, "missing": self.missing},
        }
