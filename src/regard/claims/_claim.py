"""A claim of the theory, the evidence that its check collects, and the verdict that follows from the evidence."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from regard._errors import RegardError
from regard.claims._documents import PAPERS, check_citations, citation_dict

HOLDS = "holds"
HOLDS_CONDITIONALLY = "holds conditionally"
FALSE_AS_STATED = "false as stated"
UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """One yes-or-no question that a check asked, and its answer.

    - ``role``: "stated" for the statement as it stands, "condition" for the statement under the condition that it
      leaves out, "corrected" for the statement that is true instead, "control" for the same question about a case in
      which the answer must be no. A control shows that the check can fail.
    - ``question``: the property that was tested, as a sentence.
    - ``holds``: the answer.
    - ``description``: the measured values behind the answer.
    """

    role: str
    question: str
    holds: bool
    description: str

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        return {"role": self.role, "asked": self.question, "holds": self.holds, "said": self.description}


@dataclass(frozen=True)
class Series:
    """Named lines ``{name: (x, y)}`` or ``{name: (x, y, low, high)}``, as ``regard.plots.series`` draws them."""

    title: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    x: str
    y: str
    log: str = ""


@dataclass
class Evidence:
    """The result of a check: findings, numbers, and lines to draw. All of it is plain data.

    >>> evidence = Evidence()
    >>> row_sums = torch.randn(3, 5).softmax(-1).sum(-1)
    >>> evidence.add_statement("softmax rows sum to 1", bool((row_sums - 1).abs().max() < 1e-6))
    >>> evidence.verdict  # without a control, nothing shows that the check can fail
    'undecided'
    >>> evidence.add_control("rows that are not normalised sum to 1", bool(torch.ones(3, 5).sum(-1).eq(1).all()))
    >>> evidence.verdict
    'holds'
    """

    findings: list[Finding] = field(default_factory=list)
    numbers: dict[str, float | int | str | list[float]] = field(default_factory=dict)
    series: list[Series] = field(default_factory=list)

    def add_statement(self, question: str, holds: bool, description: str = "") -> None:
        """Add a finding about the statement as it stands."""
        self.findings.append(Finding("stated", question, bool(holds), description))

    def add_condition(self, question: str, holds: bool, description: str = "") -> None:
        """Add a finding about the statement under the condition that it leaves out."""
        self.findings.append(Finding("condition", question, bool(holds), description))

    def add_correction(self, question: str, holds: bool, description: str = "") -> None:
        """Add a finding about the statement that is true instead."""
        self.findings.append(Finding("corrected", question, bool(holds), description))

    def add_control(self, question: str, holds: bool, description: str = "") -> None:
        """Add a control, a statement that must be false. If ``holds`` is True, the check cannot detect errors."""
        self.findings.append(Finding("control", question, bool(holds), description))

    def add_series(
        self, title: str, lines: Mapping[str, Sequence[Sequence[float]]], *, x: str, y: str, log: str = ""
    ) -> None:
        """Add lines for one figure; ``x`` and ``y`` label the axes, ``log`` names the logarithmic axes."""
        # Tensors and NumPy numbers would not survive JSON.
        plain = {}
        for name, columns in lines.items():
            plain[name] = [list(map(float, column)) for column in columns]
        self.series.append(Series(title, plain, x, y, log))

    def add_curves(self, title: str, xs: Sequence[float], curves: Mapping[str, Sequence[float]], **axes: str) -> None:
        """Add lines ``{name: ys}`` that share their x values; ``axes`` are x, y and log as in ``add_series``."""
        self.add_series(title, {name: (xs, ys) for name, ys in curves.items()}, **axes)

    def by_role(self, role: str) -> list[Finding]:
        """The findings of one role: "stated", "condition", "corrected" or "control"."""
        return [finding for finding in self.findings if finding.role == role]

    def all_hold(self, role: str) -> bool:
        """Whether every finding of one role holds; True if there is none."""
        return all(finding.holds for finding in self.by_role(role))

    @property
    def verdict(self) -> str:
        """The verdict that follows from the findings.

        - "holds": all findings about the statement as it stands hold, and so do all other findings except controls.
        - "holds conditionally": the statement fails, but all findings about the missing condition hold.
        - "false as stated": the statement fails, but all findings about the corrected statement hold.
        - "undecided": anything else, also if there is no control or if a control holds (a control must be false).
        """
        controls = self.by_role("control")
        controls_fail = bool(controls) and not any(finding.holds for finding in controls)
        if not controls_fail or not self.by_role("stated"):
            return UNDECIDED
        if not self.all_hold("condition") or not self.all_hold("corrected"):
            return UNDECIDED
        if self.all_hold("stated"):
            return HOLDS

        # A statement that fails needs either a condition or a correction. Both together would leave the verdict open.
        has_condition = bool(self.by_role("condition"))
        has_correction = bool(self.by_role("corrected"))
        if has_condition == has_correction:
            return UNDECIDED
        return HOLDS_CONDITIONALLY if has_condition else FALSE_AS_STATED


@dataclass(frozen=True)
class Claim:
    """One statement of the theory, together with the check that decides it.

    - ``id``: the name, such as "hard-limit".
    - ``title``: the statement as it is made, in one short line.
    - ``citations``: where the statement is made, as pairs of a document of the theory and a section of it.
    - ``papers``: published papers that make the statement or its correction, by their keys in ``PAPERS``.
    - ``statement``: the statement in words; ``formula``: the statement in LaTeX.
    - ``refuted_by``: the observation that would refute it.
    - ``control``: a case for which the same check must give the answer no.
    - ``verdict``: the recorded verdict.
    - ``what_holds``: what is true instead, in one line that can be read alone; empty if the statement holds.
    - ``correction``: the condition under which it holds, or what is true instead, in full; empty if it holds.
    - ``check``: a deterministic function that returns ``Evidence``. It takes keyword arguments with
      defaults: numbers that users may change, and the parts under test. An argument ``full`` selects the long version.

    >>> limit = regard.claims.get_claim("hard-limit")
    >>> limit.statement
    'As the inverse temperature β grows, softmax(β s) becomes the one-hot argmax.'
    >>> limit.verdict, limit.parameters
    ('holds conditionally', {'n': 8, 'gap': 0.5, 'seed': 0})
    >>> limit.what_holds
    'With one largest score, softmax(β s) becomes the one-hot argmax. Tied keys share the weight equally.'
    >>> limit.citations
    (('assignment-6', '4.1'), ('homework-3', '1.1 (c)'))
    """

    id: str
    title: str
    citations: tuple[tuple[str, str], ...]
    statement: str
    formula: str
    refuted_by: str
    control: str
    verdict: str
    check: Callable[..., Evidence]
    what_holds: str = ""
    correction: str = ""
    papers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.verdict not in (HOLDS, HOLDS_CONDITIONALLY, FALSE_AS_STATED):
            raise RegardError(
                f"{self.id}: verdict must be {HOLDS}, {HOLDS_CONDITIONALLY} or {FALSE_AS_STATED}, got {self.verdict!r}"
            )
        for name in ("correction", "what_holds"):
            text = getattr(self, name)
            if bool(text) != (self.verdict != HOLDS):
                raise RegardError(
                    f"{self.id}: {name} must be empty if the verdict is {HOLDS!r}, and must not be empty otherwise; "
                    f"got verdict {self.verdict!r} and {name} {text!r}"
                )
        check_citations(self.id, self.citations, self.papers)

    @property
    def sources(self) -> tuple[str, ...]:
        """The documents that make the statement, each once."""
        return tuple(dict.fromkeys(document for document, _ in self.citations))

    @property
    def heading(self) -> str:
        """The title, in quotation marks unless the statement holds: only what holds is said in our own voice."""
        if self.verdict == HOLDS:
            return self.title
        return f"“{self.title}”"

    @property
    def parameters(self) -> dict[str, float | int]:
        """The numeric arguments of the check, with their defaults."""
        numbers = {}
        for name, parameter in inspect.signature(self.check).parameters.items():
            # A bool is an int in Python, but a switch is not a number that users vary.
            if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool):
                numbers[name] = parameter.default
        return numbers

    def run(self, *, full: bool = False, **changes: Any) -> Result:
        """Run the check, with some of its arguments changed.

        - ``full``: run the long version, if the check has one.
        - ``changes``: new values for arguments of the check, by name.

        Raises ``RegardError`` if the check has no argument of that name, or if a number is out of the range in which
        the check tells something.

        >>> result = regard.claims.get_claim("hard-limit").run(gap=0.1)
        >>> result.verdict, round(result.evidence.numbers["rate"], 3)  # the error falls as exp(−β·gap)
        ('holds conditionally', -0.1)
        """
        known = inspect.signature(self.check).parameters
        for name in changes:
            if name not in known:
                raise RegardError(f"{self.id} has no argument {name!r}; it has {', '.join(known)}")
        # Here, not at the top: that module imports this one.
        from regard.claims._parameters import check_parameters

        numbers = {name: value for name, value in changes.items() if name in self.parameters}
        changes.update({name: check_parameters(self, numbers)[name] for name in numbers})
        if full and "full" in known:  # most checks have only one version
            changes["full"] = True
        start = time.perf_counter()
        evidence = self.check(**changes)
        return Result(self, evidence, time.perf_counter() - start)


@dataclass(frozen=True)
class Result:
    """A claim and the evidence of one run of its check.

    >>> result = regard.claims.get_claim("hard-limit").run()
    >>> result.as_recorded, result.verdict
    (True, 'holds conditionally')
    """

    claim: Claim
    evidence: Evidence
    seconds: float
    missing: str = ""  # the error message, if the check needs a package that is not installed

    @property
    def verdict(self) -> str:
        """The verdict of this run: "holds", "holds conditionally", "false as stated" or "undecided"."""
        return self.evidence.verdict

    @property
    def as_recorded(self) -> bool:
        """Whether the verdict equals the recorded one."""
        return self.verdict == self.claim.verdict

    @property
    def summary(self) -> str:
        """The evidence in one line: the findings that decided the verdict, or the package that is missing."""
        if self.missing:
            return self.missing
        role = {HOLDS_CONDITIONALLY: "condition", FALSE_AS_STATED: "corrected"}.get(self.verdict, "stated")
        deciding = self.evidence.by_role(role)[:1]
        if role != "stated":
            # The counterexample comes first: it says why the statement does not hold as it stands.
            failing = [finding for finding in self.evidence.by_role("stated") if not finding.holds]
            deciding = failing[:1] + deciding
        return "; ".join(finding.description for finding in deciding if finding.description)

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data, for JSON."""
        claim = self.claim
        return {
            "id": claim.id,
            "title": claim.title,
            "what_holds": claim.what_holds,
            "sources": list(claim.sources),
            "citations": [citation_dict(document, section) for document, section in claim.citations],
            "papers": [PAPERS[paper].text for paper in claim.papers],
            "statement": claim.statement,
            "formula": claim.formula,
            "refuted": claim.refuted_by,  # the JSON keys are stable; the attribute says more
            "control": claim.control,
            "recorded": claim.verdict,
            "correction": claim.correction,
            "verdict": self.verdict,
            "as_recorded": self.as_recorded,
            "parameters": claim.parameters,
            "findings": [finding.to_dict() for finding in self.evidence.findings],
            "numbers": self.evidence.numbers,
            "series": [vars(series) for series in self.evidence.series],
            "seconds": self.seconds,
            "missing": self.missing,
        }


def check_source(claim: Claim) -> str:
    """The source code of a claim's check: its module, up to the texts of the claim."""
    module = inspect.getmodule(claim.check)
    source = inspect.getsource(module if module is not None else claim.check)
    return source.split("\nCLAIM = Claim(")[0].rstrip() + "\n"


def statement_label(verdict: str) -> str:
    """The label in front of a claim's statement: a statement that does not hold is marked as the document's."""
    return "Statement:" if verdict == HOLDS else "As the document states it:"


def correction_label(verdict: str) -> str:
    """The label in front of a claim's correction, which depends on the verdict."""
    return "Holds if:" if verdict == HOLDS_CONDITIONALLY else "In detail:"
